"""Which control tokens of a request count: those that the chat template writes. In what a client wrote they are text.

One kind stays: the markers around reasoning and tool calls in what an assistant said. The model wrote them as tokens,
chat templates look for them to take earlier reasoning out, and an answer that goes on needs them. They end no turn.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from worker.text.tokenizer import ControlTokens, Conversation

_SAID = ("content", "reasoning_content")

Mark = Callable[[str], str]


class Inputs(NamedTuple):
    """What a chat template is given of a request."""

    conversation: Conversation
    tools: list[dict[str, Any]]
    variables: dict[str, Any]


class Quoting:
    """A worker has one."""

    def __init__(self, tokens: ControlTokens, own: Iterable[str] = ()) -> None:
        """`own`: the markers that stay in what an assistant said."""
        self._tokens = tokens
        longest_first = sorted(filter(None, own), key=len, reverse=True)
        self._own = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def needed(self, inputs: Inputs) -> bool:
        """Whether there is anything to mark; if not, the template's text is encoded as it is."""
        texts = _strings([inputs.tools, inputs.variables])
        for message in inputs.conversation:
            for field, value in message.items():
                own = message["role"] == "assistant" and field in _SAID
                texts += [part for text in _strings(value) for part in (self._parts(text)[::2] if own else (text,))]
        return self._tokens.found_in("\0".join(texts))

    def marked(self, inputs: Inputs) -> Inputs:
        mark, (conversation, tools, variables) = self._tokens.mark, inputs
        values = {name: _each(value, mark) for name, value in variables.items()}
        return Inputs([self._message(each) for each in conversation], _each(tools, mark), values)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        marked: dict[str, Any] = {**_each(message, self._tokens.mark), "role": message["role"]}
        if message["role"] == "assistant":
            marked |= {field: _each(message[field], self._mark_said) for field in _SAID if field in message}
        return marked

    def _mark_said(self, text: str) -> str:
        parts = self._parts(text)
        parts[::2] = map(self._tokens.mark, parts[::2])
        return "".join(parts)

    def _parts(self, text: str) -> list[str]:
        """The text cut at its own markers, which have the odd places."""
        parts = self._own.split(text) if self._own else [text]
        # A template that takes a marker out must not put a control token together by that.
        return [text] if len(parts) > 1 and self._hides(parts[::2]) else parts

    def _hides(self, parts: list[str]) -> bool:
        return self._tokens.found_in("".join(parts)) and not any(map(self._tokens.found_in, parts))


def _strings(value: Any) -> list[str]:
    """All of them, the keys of objects too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        inner = [_legible(inner) if name == "arguments" else inner for name, inner in value.items()]
        return [*value, *_strings(inner)]
    return [text for inner in value for text in _strings(inner)] if isinstance(value, list) else []


def _each(value: Any, mark: Mark) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        legible = {name: _legible(inner) if name == "arguments" else inner for name, inner in value.items()}
        return {mark(name): _each(inner, mark) for name, inner in legible.items()}
    return [_each(inner, mark) for inner in value] if isinstance(value, list) else value


def _legible(arguments: Any) -> Any:
    """Text in the place of arguments is no JSON by our rules (NaN, ...), but a template in Python may read it all the
    same, and find what was escaped in it. So it comes without escapes."""
    if not isinstance(arguments, str) or "\\" not in arguments:
        return arguments
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
