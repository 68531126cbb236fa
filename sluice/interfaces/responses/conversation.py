"""Input items, and the items of earlier answers, as the messages of a chat completion."""

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from sluice.http_errors import ErrorForm
from sluice.interfaces import fields
from sluice.interfaces.fields import refusal
from sluice.interfaces.tools import INPUT, RequestTools

ChatPart = dict[str, Any]

_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


def _read_parts(value: object, param: str, *, images: bool) -> list[ChatPart]:
    """Return the parts of a message's or an output's content, a string or a list. Raises `ApiError`."""
    if isinstance(value, str):
        return [_text(value)]
    if value is not None and not isinstance(value, list):
        raise refusal(param, "it must be a string or a list of parts.", ErrorForm.INVALID_TYPE)
    return [_read_part(fields.mapping(part, place), place, images) for place, part in fields.entries(value, param)]


def _text_of(parts: list[ChatPart]) -> str:
    """Return the text of parts without images."""
    return "".join(part["text"] for part in parts if part["type"] == "text")


def _is_image(part: ChatPart) -> bool:
    """Return True for the part of an image."""
    return bool(part["type"] == "image_url")


def _text(text: str) -> ChatPart:
    return {"type": "text", "text": text}


def _read_part(part: dict[str, Any], param: str, images: bool) -> ChatPart:
    kind = fields.string(part.get("type"), f"{param}.type")
    if kind in _TEXT_TYPES:
        return _text(fields.string(part.get("text"), f"{param}.text"))
    if kind == "refusal":
        return _text(fields.string(part.get("refusal"), f"{param}.refusal"))
    if kind == "input_image" and images:
        return _read_image(part, param)
    usable = "'input_text' or 'input_image'" if images else "text"
    raise refusal(f"{param}.type", f"{kind[:40]!r} is not supported here; use {usable}.", ErrorForm.UNSUPPORTED_VALUE)


def _read_image(part: dict[str, Any], param: str) -> ChatPart:
    if part.get("file_id") is not None:
        raise refusal(f"{param}.file_id", "no files are stored here; send the image as a data: URL in image_url.")
    detail = part.get("detail")
    url = fields.string(part.get("image_url"), f"{param}.image_url")
    detail = "auto" if detail is None else fields.option(detail, _DETAILS, f"{param}.detail")
    return {"type": "image_url", "image_url": {"url": url, "detail": _DETAILS[detail]}}


ChatMessage = dict[str, Any]

# What OpenAI's hosted tools leave in a conversation. It has no text for a model, and is dropped.
HOSTED_CALLS = frozenset(
    {
        "code_interpreter_call", "file_search_call", "image_generation_call", "mcp_list_tools", "tool_search_call",
        "tool_search_output", "web_search_call",
    }
)  # fmt: skip
_ROLES = ("user", "assistant", "system", "developer")


def read_conversation(items: Sequence[Any], tools: RequestTools, param: str = "input") -> list[ChatMessage]:
    """Return the messages of a conversation. Raises `ApiError`, which names an item as `input[3]`."""
    builder = _Builder(tools)
    for index, item in enumerate(items):
        place = f"{param}[{index}]"
        builder.add(fields.mapping(item, place), place)
    builder.end_turn()
    return builder.messages


def dropped_types(items: Sequence[Any]) -> list[str]:
    """Return the types of the items that `read_conversation` drops, each once."""
    types = (item.get("type") for item in items if isinstance(item, dict))
    return list(dict.fromkeys(kind for kind in types if isinstance(kind, str) and kind in HOSTED_CALLS))


class _Builder:
    """Joins the items of one turn of the assistant, its reasoning, text and calls, into one message."""

    def __init__(self, tools: RequestTools) -> None:
        self.messages = list[ChatMessage]()
        self._tools = tools
        self._turn: ChatMessage = {}  # the assistant's, not yet among the messages
        self._images = list[ChatPart]()  # from outputs of tools, which take text alone in a chat completion

    def add(self, item: dict[str, Any], param: str) -> None:
        """Add an item. Raises `ApiError`."""
        kind = fields.string(item.get("type") or "message", f"{param}.type")
        if read := self.READERS.get(kind):
            read(self, item, param)
        elif kind not in HOSTED_CALLS:
            known = "messages, reasoning, and calls of functions and custom tools with their outputs"
            problem = f"items of the type {kind[:40]!r} are not supported; use {known}."
            raise refusal(f"{param}.type", problem, ErrorForm.UNSUPPORTED_VALUE)

    def end_turn(self) -> None:
        """Complete the assistant's message, and the images of the outputs after it."""
        if self._turn:
            self.messages.append({"role": "assistant", **self._turn})
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
        self._turn, self._images = {}, []

    def _add_message(self, item: dict[str, Any], param: str) -> None:
        role = fields.option(item.get("role"), _ROLES, f"{param}.role")
        parts = _read_parts(item.get("content"), f"{param}.content", images=role == "user")
        if role == "assistant":
            self._begin_unless_free("content", "tool_calls")
            self._turn["content"] = _text_of(parts)
        else:
            self.end_turn()
            plain = not any(map(_is_image, parts))
            self.messages.append({"role": role, "content": _text_of(parts) if plain else parts})

    def _add_reasoning(self, item: dict[str, Any], param: str) -> None:
        if text := _read_reasoning(item, param):
            self._begin_unless_free("content", "tool_calls")
            self._turn["reasoning"] = "\n\n".join(filter(None, [self._turn.get("reasoning"), text]))

    def _begin_unless_free(self, *taken: str) -> None:
        """Begin another message of the assistant if the current one has one of the fields."""
        if self._images or any(name in self._turn for name in taken):
            self.end_turn()

    def _add_function_call(self, item: dict[str, Any], param: str) -> None:
        self._add_call(item, fields.string(item.get("arguments"), f"{param}.arguments"), param)

    def _add_custom_call(self, item: dict[str, Any], param: str) -> None:
        self._add_call(item, json.dumps({INPUT: fields.string(item.get("input"), f"{param}.input")}), param)

    def _add_call(self, item: dict[str, Any], arguments: str, param: str) -> None:
        name = fields.string(item.get("name"), f"{param}.name")
        namespace = fields.optional_string(item.get("namespace"), f"{param}.namespace")
        function = {"name": self._tools.function(namespace, name), "arguments": arguments}
        call_id = fields.string(item.get("call_id"), f"{param}.call_id")
        self._begin_unless_free()
        self._turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _add_output(self, item: dict[str, Any], param: str) -> None:
        call_id = fields.string(item.get("call_id"), f"{param}.call_id")
        parts = _read_parts(item.get("output"), f"{param}.output", images=True)
        images = self._images + [part for part in parts if _is_image(part)]
        self._images = []
        self.end_turn()
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": _text_of(parts)})
        self._images = images

    READERS: ClassVar[Mapping[str, Callable[["_Builder", dict[str, Any], str], None]]] = {
        "message": _add_message,
        "reasoning": _add_reasoning,
        "function_call": _add_function_call,
        "custom_tool_call": _add_custom_call,
        "function_call_output": _add_output,
        "custom_tool_call_output": _add_output,
    }


# The types of items that are read; an `item_reference` is replaced by its item before.
ITEMS = frozenset({*_Builder.READERS, "item_reference"})


# Of `encrypted_content`. A client that keeps its conversation itself drops the text of reasoning and sends this back.
# Workers hold no key, so it is the same text, in base64; nothing in it is secret from the client, which received it.
_PREFIX = "sluice1:"


def enclosed(text: str) -> str:
    """Return the text as the `encrypted_content` of a reasoning item."""
    return _PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def _read_reasoning(item: dict[str, Any], param: str) -> str:
    """Return the text of a reasoning item; empty if it has none, or only another server's `encrypted_content`. Raises
    `ApiError`."""
    for name, separator in (("content", ""), ("summary", "\n\n")):
        if item.get(name):
            parts = _read_parts(item[name], f"{param}.{name}", images=False)
            return separator.join(part["text"] for part in parts)
    return _opened(fields.optional_string(item.get("encrypted_content"), f"{param}.encrypted_content") or "", param)


def _opened(sealed: str, param: str) -> str:
    if not sealed.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        problem = "it is not as this server wrote it; send it back unchanged, or leave it out."
        raise fields.refusal(f"{param}.encrypted_content", problem) from None
