"""Makes a request of what a client sends: liberal with what it has already committed to.

A client sends its whole history with each request, and cannot change it: one item that is refused ends its session. So,
for all three interfaces: what only describes (hints, marks of caches, other providers' fields, nulls) is left out; what
would change the answer stays, to be refused by name, in the messages after the last turn of the assistant and in the
options; before that, and in the results of tools, a text says what stood there. `SLUICE_SERVE_STRICT` switches it off.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sluice.interfaces.responses.conversation import HOSTED_CALLS, ITEMS

CommittedBody = dict[str, Any]


_HINTS = ("cache_control", "prompt_cache_retention", "prompt_cache_options", "provider_specific_fields")
_CHAT_PARTS = ("text", "image_url")
_CHAT_FIELDS = {
    "assistant": (
        "tool_calls", "reasoning", "reasoning_content", "refusal", "name", "annotations", "audio", "function_call",
    ),
    "tool": ("tool_call_id", "name"),
}  # fmt: skip


def chat(body: CommittedBody) -> tuple[CommittedBody, list[str]]:
    """Read the body of a chat completion."""
    ignored = Ignored()
    read = ignored.without(body, _HINTS)
    for name in ("max_tokens", "max_completion_tokens", "top_k"):
        if read.get(name) == -1:  # "no limit" of llama.cpp, vLLM and their clients
            read = ignored.without(read, (name,))
    if _is_number(read.get("top_p")) and read["top_p"] == 0:  # the likeliest token alone
        read = {**ignored.without(read, ("top_p",)), "temperature": 0}
    if isinstance(usage := read.get("usage"), dict):  # by which OpenRouter's clients ask for it
        read = ignored.without(read, ("usage",))
        if usage.get("include") is True and read.get("stream") is True and read.get("stream_options") is None:
            read["stream_options"] = {"include_usage": True}
    if isinstance(read.get("tools"), list):
        read["tools"] = [ignored.without(tool, _HINTS, "tools") for tool in read["tools"]]
    messages = read.get("messages")
    if isinstance(messages, list):
        newest = newest_turn(messages)
        read["messages"] = [
            each for at, message in enumerate(messages) for each in _chat_messages(message, at < newest, ignored)
        ]
    return read, ignored.names


def _chat_messages(message: Any, is_past: bool, ignored: "Ignored") -> list[Any]:
    """Return a message, and the images of a tool's message in one of the user."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        return [message]
    known = ("role", "content", *_CHAT_FIELDS.get(role, ("name",)))
    read = ignored.only(message, known, "messages") if is_past or role in _CHAT_FIELDS else message
    read = ignored.without(read, (*_HINTS, "thinking_blocks", "usage"), "messages")
    if role == "tool" and read.get("content") is None:
        read = {**read, "content": ""}
    if not isinstance(read.get("content"), list):
        return [read]
    parts = [_chat_part(part, is_past or role in _CHAT_FIELDS, ignored) for part in read["content"]]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") == "image_url"]
    if role == "user" or not images:
        return [{**read, "content": parts}]
    own = {**read, "content": [part for part in parts if part not in images]}
    if role != "tool":
        return [{**read, "content": [*own["content"], *(said("image_url", ignored) for _ in images)]}]
    label = {"type": "text", "text": f"The images of the result {read.get('tool_call_id')}:"}
    return [own, {"role": "user", "content": [label, *images]}]


def _chat_part(part: Any, is_past: bool, ignored: "Ignored") -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if is_past and part.get("type") not in _CHAT_PARTS:
        return said(part.get("type"), ignored)
    known = ("type", "text", "image_url")
    return ignored.only(part, known, "content") if is_past else ignored.without(part, _HINTS, "content")


def responses(body: CommittedBody) -> tuple[CommittedBody, list[str]]:
    """Read the body of a response. What hosted tools have left in its input is dropped later."""
    ignored = Ignored()
    read = dict(body)
    items = read.get("input")
    if not isinstance(items, list):
        return read, ignored.names
    newest = 1 + max((at for at, item in enumerate(items) if _is_answer(item)), default=-1)
    read["input"] = []
    for at, item in enumerate(items):
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "additional_tools" and isinstance(item.get("tools"), list):  # Codex offers tools in its input
            read["tools"] = [*_listed(read.get("tools")), *item["tools"]]
        elif isinstance(kind, str) and kind not in ITEMS and kind not in HOSTED_CALLS and at < newest:
            instead = said(kind, ignored)
            read["input"].append({"type": "message", "role": "developer", "content": instead["text"]})
        else:
            read["input"].append(item)
    return read, ignored.names


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_answer(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call", "custom_tool_call")


def newest_turn(messages: list[Any]) -> int:
    """Return the index of the first message after the last turn of the assistant."""
    answers = (at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "assistant")
    return 1 + max(answers, default=-1)


def said(kind: Any, ignored: "Ignored") -> CommittedBody:
    """Return the text that stands for a part which is not read here."""
    name = kind[:40] if isinstance(kind, str) else "part"
    ignored.add(name)
    return {"type": "text", "text": f"[{name}: this model cannot read it]"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Ignored:
    """Collects what is left out: each name once, and at most so many, since clients choose them."""

    _MOST = 32
    _CHARACTERS = 80  # of a name

    def __init__(self) -> None:
        self.names = list[str]()

    def add(self, name: str) -> None:
        short = name[: self._CHARACTERS]
        if len(self.names) < self._MOST and short not in self.names:
            self.names.append(short)

    def without(self, value: Any, names: Collection[str], place: str = "") -> Any:
        """Return an object without some fields, as a copy; anything else as it is."""
        if not isinstance(value, dict):
            return value
        return self._kept(value, lambda name: name not in names, place)

    def only(self, value: Mapping[str, Any], names: Collection[str], place: str) -> CommittedBody:
        """Return an object with these fields alone."""
        return self._kept(value, lambda name: name in names, place)

    def _kept(self, value: Mapping[str, Any], keeps: Callable[[str], bool], place: str) -> CommittedBody:
        for name in value:
            if not keeps(name):
                self.add(f"{place}.{name}" if place else name)
        return {name: each for name, each in value.items() if keeps(name)}


def told(answer: Mapping[str, Any], ignored: Collection[str]) -> Mapping[str, Any]:
    """Return an answer that names what was left out of its request, in `sluice.ignored`."""
    if not ignored:
        return answer
    return {**answer, "sluice": {**answer.get("sluice", {}), "ignored": list(ignored)}}
