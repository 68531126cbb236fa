"""How large a text is: in characters, cheaply, and in tokens, before it is tokenized whole."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from schemas.messages import ImagePart
from worker.errors import Refusal, prompt_too_large
from worker.text.threads import Check
from worker.text.tokenizer import Conversation

# At most 32 kB: any tokenizer reads that in some 20 ms.
_SLICE = 8_192  # characters
# A cut falls into a word, into a control token or behind a run of space: no such cut was seen to add more than a
# token for each character of the word. Tests measure it over tokenizers and texts.
_PER_CUT = 32  # tokens
# Tokenizers take up to 120 bytes for each character of a text that they read whole, and those that split words by a
# regular expression fail on runs of some ten million characters.
_WHOLE = 4_000_000  # characters
_WHOLE_PER_TOKEN = 16  # of the context, where that is more; English has some 4 characters a token
_EACH_VALUE = 32  # characters: a value costs about as much as these to copy and to render
_IMAGE = 2_000  # characters; what its address holds, perhaps its whole file, is no text

_ENDS_THOUGHTS = "</think>"  # templates look for it, also of models that have other markers


class Counting:
    """Refuses a prompt that cannot fit the context. A worker has one."""

    def __init__(
        self, encode: Callable[[str], list[int]], context: int | None, think: Iterable[str] | None = None
    ) -> None:
        """`context` in tokens; without it no prompt is refused. `think`: the markers around reasoning."""
        self._encode, self._context = encode, context
        self._think = {_ENDS_THOUGHTS, *(think or ())}

    def contents(self, conversation: Conversation, check: Check) -> int:
        """Count the contents before they go through the template. Returns the characters that were counted.
        Raises `Refusal`."""
        texts = [text for message in conversation for text in self._shown(message)]
        if self._context is None or sum(map(len, texts)) <= self._context:
            return 0
        self._refuse(texts, check)
        return sum(map(len, texts))

    def whole(self, text: str, counted: int, check: Check) -> None:
        """Count the template's text, of which its contents' characters have been counted. Raises `Refusal`."""
        if self._context is None:
            return
        if len(text) - counted > self._context:
            self._refuse([text], check)
        most = max(_WHOLE, _WHOLE_PER_TOKEN * self._context)
        if len(text) > most:
            raise Refusal(
                "too_large",
                f"The prompt has {len(text):,} characters and this worker tokenizes at most {most:,}: shorten it.",
            )

    def _shown(self, message: dict[str, Any]) -> Iterator[str]:
        """Yield what every template shows: arguments, and the content but for space around it. Of an assistant's they
        may leave out thoughts, and gpt-oss's leaves out what was said before a call."""
        content: str = message["content"]
        called = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        yield from _long_strings(called)
        if message["role"] != "assistant" or not (called or any(marker in content for marker in self._think)):
            yield content.strip()

    def _refuse(self, texts: Iterable[str], check: Check) -> None:
        assert self._context is not None
        at_least = 0
        for text in texts:
            for piece in _slices(text):
                check()
                at_least += max(0, len(self._encode(piece)) - _PER_CUT)
                if at_least > self._context:
                    raise prompt_too_large(at_least, self._context, exact=False)


def _long_strings(values: Iterable[Any]) -> Iterator[str]:
    ahead = [iter(values)]
    while ahead:
        value = next(ahead[-1], ahead)
        if value is ahead:
            ahead.pop()
        elif isinstance(value, str) and len(value) > _PER_CUT:
            yield value
        elif (within := _within(value)) is not None:
            ahead.append(within)


def _slices(text: str) -> Iterator[str]:
    return (text[start : start + _SLICE] for start in range(0, len(text), _SLICE))


def characters(values: Iterable[Any], most: int) -> int:
    """Characters in strings at any depth, where each value counts as some more. Stops when they are more than `most`,
    so the cost has a bound. The names of fields do not count, and an image counts as a short text."""
    total, ahead = 0, [iter(values)]
    while ahead and total <= most:
        value = next(ahead[-1], ahead)
        if value is ahead:
            ahead.pop()
            continue
        total += _cost(value)
        if (within := _within(value)) is not None:
            ahead.append(within)
    return total


def _cost(value: Any) -> int:
    if isinstance(value, ImagePart):
        return _IMAGE
    return _EACH_VALUE + (len(value) if isinstance(value, str) else 0)


def _within(value: Any) -> Iterator[Any] | None:
    match value:
        case ImagePart():
            return None
        case BaseModel():
            return iter(vars(value).values())
        case dict():
            return (each for item in value.items() for each in item)
        case list() | tuple():
            return iter(value)
    return None
