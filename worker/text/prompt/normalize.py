"""Converts messages to the form that chat templates expect."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter

from schemas.base import MAX_CHARACTERS, AnyJsonObject
from schemas.messages import AssistantMessage, Message
from worker.text.tokenizer import TemplateMessages

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
