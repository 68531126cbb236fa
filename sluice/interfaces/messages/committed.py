"""Makes a request of what a client of Anthropic's Messages sends, as `sluice.interfaces.committed` describes."""

from collections.abc import Collection, Mapping
from typing import Any

from sluice.interfaces.committed import CommittedBody, Ignored, newest_turn, said
from sluice.interfaces.messages.body import (
    AssistantBlock,
    ResultBlock,
    SystemBlock,
    SystemTurn,
    UserBlock,
    UserTurn,
    fields_by_type,
)

_BLOCKS = {role: fields_by_type(union) for role, union in (
    ("user", UserBlock), ("assistant", AssistantBlock), ("system", SystemBlock), ("result", ResultBlock),
)}  # fmt: skip


def messages(body: CommittedBody) -> tuple[CommittedBody, list[str]]:
    """Read the body of Anthropic's Messages."""
    ignored = Ignored()
    read = ignored.without(body, ("container",)) if body.get("container", "") is None else dict(body)
    if isinstance(read.get("tools"), list):
        read["tools"] = [ignored.without(tool, ("input_examples",), "tools") for tool in read["tools"]]
    given = read.get("messages")
    if isinstance(given, list):
        newest = newest_turn(given)
        read["messages"] = [_message(message, at < newest, ignored) for at, message in enumerate(given)]
    return read, ignored.names


def _message(message: Any, is_past: bool, ignored: "Ignored") -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("role") == "system":
        known = SystemTurn.model_fields
    else:
        known = UserTurn.model_fields
        message = ignored.without(message, ("output_config",), "messages")
    read = ignored.only(message, known, "messages") if is_past else message
    blocks = _BLOCKS.get(str(read.get("role")))
    if blocks is None or not isinstance(read.get("content"), list):
        return read
    return {**read, "content": [_block(block, blocks, is_past, ignored) for block in read["content"]]}


def _block(block: Any, known: Mapping[str, Collection[str]], is_past: bool, ignored: "Ignored") -> Any:
    if not isinstance(block, dict):
        return block
    kind = block.get("type")
    if kind == "tool_result" and isinstance(block.get("content"), list):
        inner = [_block(each, _BLOCKS["result"], True, ignored) for each in block["content"]]
        block = {**block, "content": inner}
    if kind == "search_result":
        return _search_result(block, ignored)
    if not is_past:
        return block
    if kind not in known or not _is_readable(block):
        return said(kind, ignored)
    return ignored.only(block, known[str(kind)], "content")


def _is_readable(block: Mapping[str, Any]) -> bool:
    """Return False for a document that is no plain text, and for a change of tools that a server of MCP offers."""
    match block:
        case {"type": "document", "source": {"type": kind}}:
            return bool(kind == "text")
        case {"type": "tool_addition" | "tool_removal", "tool": {"type": kind}}:
            return kind in ("tool_reference", "tool_definition")
    return block.get("type") != "document"


def _search_result(block: Mapping[str, Any], ignored: "Ignored") -> CommittedBody:
    """Return the text of a search result that a client has found itself."""
    parts = block.get("content")
    found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    texts = [text for text in (block.get("title"), block.get("source"), *found) if isinstance(text, str)]
    return {"type": "text", "text": "\n".join(texts)} if texts else said("search_result", ignored)
