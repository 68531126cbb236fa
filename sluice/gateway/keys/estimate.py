"""The estimate of a job's tokens before it is tokenized."""

from collections.abc import Iterator, Mapping
from typing import Any

_CHARACTERS_PER_TOKEN = 4  # English; the usage corrects it for others
_TOKENS_PER_MESSAGE = 4  # role and marks of a chat template
_TOKENS_PER_IMAGE = 1_000  # a photo of a megapixel in most vision models
_ANSWER_TOKENS = 1_024  # without a limit: what a worker reserves at first; the usage corrects it
_IMAGES = {"image_url", "input_image", "image"}
_TEXTS = {"messages", "tools", "functions", "response_format", "prediction"}


def estimate(body: Mapping[str, Any]) -> int:
    """Return the estimated tokens of a request of the contract, prompt and answer. Takes any JSON."""
    prompt = sum(_tokens(value) for value in _values([body.get(name) for name in _TEXTS]))
    messages = body.get("messages")
    return prompt + _answer(body) + (_TOKENS_PER_MESSAGE * len(messages) if isinstance(messages, list) else 0)


def _answer(body: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit
    return _ANSWER_TOKENS


def _values(root: Any) -> Iterator[Any]:
    """Yield the strings of a JSON value, and its images whole."""
    pending = [root]
    while pending:
        match pending.pop():
            case {"type": str(kind)} as part if kind in _IMAGES:
                yield part
            case dict(members):
                pending.extend(members.values())
            case list(items):
                pending.extend(items)
            case str(text):
                yield text


def _tokens(value: Any) -> int:
    return -(-len(value) // _CHARACTERS_PER_TOKEN) if isinstance(value, str) else _TOKENS_PER_IMAGE
