"""Converts messages to the form that chat templates expect, and escapes control tokens in them."""

import json
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from schemas.base import MAX_CHARACTERS, AnyJsonObject
from schemas.messages import AssistantMessage, Message
from worker.text.tokenizer import ControlTokenEscapes, TemplateMessages

BETWEEN = "\n\n"  # between the contents of merged messages
_ARGUMENTS = TypeAdapter(AnyJsonObject)


def normalize(messages: list[Message]) -> TemplateMessages:
    """Return the conversation with adjacent turns of a role merged; system messages stay at their places.

    Turns with tool calls, and tool results, are not merged. Every text and image occurs once, in order. A conversation
    that already has this form keeps its messages. No message is changed by later ones of other roles.
    """
    plain = [_assistant(each) if isinstance(each, AssistantMessage) else _plain(each) for each in messages]
    return merged([turn for at, turn in enumerate(plain) if at == 0 or turn["role"] != "system" or turn["content"]])


def merged(conversation: TemplateMessages) -> TemplateMessages:
    """Merge adjacent messages of a role. Turns with tool calls, and tool results, stay separate."""

    def run(message: dict[str, Any]) -> str | int:
        return id(message) if message["role"] == "tool" or message.get("tool_calls") else str(message["role"])

    return [_one(list(messages)) for _, messages in groupby(conversation, run)]


def joined(contents: Iterable[Any]) -> Any:
    """Join contents: a string if all are strings, else a list of parts. Texts are separated by `BETWEEN`."""
    spoken = [content for content in contents if content]
    if all(isinstance(content, str) for content in spoken):
        return BETWEEN.join(spoken)
    parts: list[dict[str, Any]] = []
    for content in spoken:
        more = [_text(content)] if isinstance(content, str) else content
        if parts and parts[-1]["type"] == more[0]["type"] == "text":
            parts.append(_text(BETWEEN))
        parts += more
    return parts


def _one(messages: TemplateMessages) -> dict[str, Any]:
    first, *rest = messages
    if not rest:
        return first
    # A name stays only if all messages have the same one: else the merged text has several authors.
    one = {field: value for field, value in first.items() if all(each.get(field) == value for each in rest)}
    one["content"] = joined(each["content"] for each in messages)
    if thoughts := joined(each.get("reasoning_content") for each in messages):
        one["reasoning_content"] = thoughts
    return one


def _plain(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer":
        plain["role"] = "system"
    return {**plain, "content": _content(plain.get("content"))}


def _assistant(message: AssistantMessage) -> dict[str, Any]:
    plain = _plain(message)
    # OpenAI's models send a refusal instead of a content. No template reads it, so it becomes content.
    plain["content"] = joined([plain["content"], plain.pop("refusal", None)])
    # Other servers send the same thoughts under both names. Templates read the longer one.
    thoughts = joined(dict.fromkeys([plain.pop("reasoning", None), plain.pop("reasoning_content", None)]))
    if thoughts:
        plain["reasoning_content"] = thoughts
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _content(content: Any) -> Any:
    if isinstance(content, list):
        return [part for part in content if part.get("text") != ""] or ""
    return content or ""


def _text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call without `index`, which only deltas of a stream need."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"id": call["id"], "type": call["type"], "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(text: str) -> Any:
    """Return the object that the JSON text holds, as most templates expect, or the text if it is not an object."""
    if len(text) > MAX_CHARACTERS:  # parsing it would hold the interpreter's lock for long
        return text
    try:
        return _ARGUMENTS.validate_json(text.strip() or "{}")
    except ValueError:  # not JSON, not an object, too deep, a non-finite number, half of a surrogate pair
        return text


# Escapes control tokens in a request: only those that the chat template writes are read as tokens.
#
# Markers around reasoning and tool calls in assistant messages are not escaped. The model wrote them as tokens, chat
# templates search for them to remove earlier reasoning, and a continued answer needs them. They cannot end a turn.

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
