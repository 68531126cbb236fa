"""Escapes control tokens in a request: only those that the chat template writes are read as tokens.

Markers around reasoning and tool calls in assistant messages are not escaped. The model wrote them as tokens, chat
templates search for them to remove earlier reasoning, and a continued answer needs them. They cannot end a turn.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from worker.text.tokenizer import ControlTokenEscapes, TemplateMessages

_ANSWER_FIELDS = ("content", "reasoning_content")

Mark = Callable[[str], str]


class Inputs(NamedTuple):
    """Inputs of a chat template that come from the request."""

    conversation: TemplateMessages
    tools: list[dict[str, Any]]
    variables: dict[str, Any]


class ControlTokenEscaping:
    """Escapes control tokens in the inputs of a chat template; a worker has one."""

    def __init__(self, tokens: ControlTokenEscapes, kept_markers: Iterable[str] = ()) -> None:
        """`kept_markers`: markers that stay unescaped in assistant messages."""
        self._tokens = tokens
        longest_first = sorted(filter(None, kept_markers), key=len, reverse=True)
        self._kept_markers = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def needs_escaping(self, inputs: Inputs) -> bool:
        """True if there is a control token to escape. If not, the template's text is encoded unchanged."""
        texts = _strings([inputs.tools, inputs.variables])
        for message in inputs.conversation:
            for field, value in message.items():
                own = message["role"] == "assistant" and field in _ANSWER_FIELDS
                texts += [part for text in _strings(value) for part in (self._parts(text)[::2] if own else (text,))]
        return self._tokens.found_in("\0".join(texts))

    def escaped(self, inputs: Inputs) -> Inputs:
        """Return the inputs with their control tokens escaped."""
        mark, (conversation, tools, variables) = self._tokens.mark, inputs
        values = {name: _map_strings(value, mark) for name, value in variables.items()}
        return Inputs([self._message(each) for each in conversation], _map_strings(tools, mark), values)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        marked: dict[str, Any] = {**_map_strings(message, self._tokens.mark), "role": message["role"]}
        if message["role"] == "assistant":
            marked |= {
                field: _map_strings(message[field], self._mark_answer) for field in _ANSWER_FIELDS if field in message
            }
        return marked

    def _mark_answer(self, text: str) -> str:
        parts = self._parts(text)
        parts[::2] = map(self._tokens.mark, parts[::2])
        return "".join(parts)

    def _parts(self, text: str) -> list[str]:
        """Split the text at the kept markers, which get the odd indices."""
        parts = self._kept_markers.split(text) if self._kept_markers else [text]
        # Removing a marker, as templates do, must not join its neighbours to a control token.
        return [text] if len(parts) > 1 and self._hides(parts[::2]) else parts

    def _hides(self, parts: list[str]) -> bool:
        return self._tokens.found_in("".join(parts)) and not any(map(self._tokens.found_in, parts))


def _strings(value: Any) -> list[str]:
    """Return all strings in the value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        inner = [_without_escapes(inner) if name == "arguments" else inner for name, inner in value.items()]
        return [*value, *_strings(inner)]
    return [text for inner in value for text in _strings(inner)] if isinstance(value, list) else []


def _map_strings(value: Any, mark: Mark) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        legible = {name: _without_escapes(inner) if name == "arguments" else inner for name, inner in value.items()}
        return {mark(name): _map_strings(inner, mark) for name, inner in legible.items()}
    return [_map_strings(inner, mark) for inner in value] if isinstance(value, list) else value


def _without_escapes(arguments: Any) -> Any:
    """Return arguments without JSON escapes.

    Arguments that are text are not valid JSON by our rules (NaN, ...). A template written in Python may parse them
    anyway, and decode a control token that was hidden by escapes.
    """
    if not isinstance(arguments, str) or "\\" not in arguments:
        return arguments
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
