"""What the gateway keeps of a response, so that any gateway can stream, retrieve and continue it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.http_errors import ErrorForm
from sluice.interfaces.completion import events_of
from sluice.interfaces.errors import ApiError
from sluice.interfaces.fields import refusal, requested_model
from sluice.interfaces.responses.conversation import dropped_types, read_conversation
from sluice.interfaces.responses.head import ResponseHead, new_head
from sluice.interfaces.responses.request import ResponseRequest
from sluice.interfaces.responses.stream import ResponseState

VERSION = 1  # of the format; gateways take a record of another version for absent
MAX_BYTES = 16_000_000  # of a conversation, as stored; a job's body is not longer either


@dataclass(frozen=True)
class Record:
    """A stored response: its head, its tenant, its input items, and the responses that it continues."""

    head: ResponseHead
    tenant: str | None
    items: tuple[dict[str, Any], ...]  # with ids
    previous: tuple[str, ...]  # ids, oldest first

    def to_json(self) -> bytes:
        """Return the record as JSON."""
        head = self.head
        written = {
            "version": VERSION,
            "id": head.id,
            "created_at": head.created_at,
            "echo": head.echo,
            "summary": head.summary,
            "enclosed": head.enclosed,
            "logprobs": head.logprobs,
            "tenant": self.tenant,
            "items": self.items,
            "previous": self.previous,
        }
        return json.dumps(written, separators=(",", ":")).encode()


def parse_record(raw: bytes) -> Record | None:
    """Parse what `Record.to_json` has written; None if the format has another version."""
    read = json.loads(raw)
    if read.get("version") != VERSION:
        return None
    flags = (read["summary"], read["enclosed"], read["logprobs"])
    head = ResponseHead(read["id"], read["created_at"], read["echo"], *flags)
    return Record(head, read["tenant"], tuple(read["items"]), tuple(read["previous"]))


def with_ids(items: Sequence[Any], suffix: str) -> tuple[dict[str, Any], ...]:
    """Return input items with ids and types, and messages with their content as a list."""
    return tuple(_with_id(item, f"{suffix}_in{index}") for index, item in enumerate(items))


def _with_id(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    given = item.get("id")
    named = {**item, "type": kind, "id": given if isinstance(given, str) else f"{kind[:3]}_{suffix}"}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
        named["content"] = [{"type": part, "text": item["content"], **more}]
    if kind == "message":
        named["status"] = item.get("status") or "completed"
    return named


@dataclass(frozen=True)
class NewResponse:
    """A response that can be submitted."""

    record: Record
    written: bytes  # the record as JSON
    chat: Mapping[str, Any]  # the request of the contract
    dropped: tuple[str, ...]  # hosted tools and their items, which have no effect here


def new_response(
    request: ResponseRequest,
    id: str,
    tenant: str | None,
    previous: tuple[str, ...] = (),
    earlier: Sequence[dict[str, Any]] = (),
) -> NewResponse:
    """Return a response that continues a conversation: the ids of its responses, `previous`, oldest first, and their
    items, `earlier`. Raises `ApiError`, which names the field."""
    messages = read_conversation(request.items, request.tools)
    if earlier:
        messages = [*read_conversation(earlier, request.tools, "previous_response_id"), *messages]
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if not messages:
        raise refusal("input", "it is empty; send a message.")
    head = new_head(request, id, int(time.time()), requested_model(request.body))
    record = Record(head, tenant, with_ids(request.items, head.suffix), previous)
    written = record.to_json()
    if request.store and len(written) > MAX_BYTES:
        raise ApiError(ErrorForm.BODY_TOO_LARGE, f"A stored response has at most {MAX_BYTES:,} bytes; send less.")
    dropped = (*request.tools.dropped, *dropped_types(request.items))
    return NewResponse(record, written, {**request.chat, "messages": messages}, dropped)


def from_completion(head: ResponseHead, completion: Mapping[str, Any]) -> ResponseState:
    """Return the response of a job's stored result, for a job whose log has expired.

    It is that of the log, but for output that the model interleaved: the result has all text in one piece. The tokens
    of its reasoning are not counted.
    """
    state = ResponseState(head)
    for event in events_of(completion):
        state.add(event)
    return state
