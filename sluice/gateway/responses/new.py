"""A new response: its record, and the chat completion that makes it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.gateway.errors import ApiError
from sluice.gateway.fields import refusal
from sluice.gateway.models import requested_model
from sluice.gateway.responses.conversation import dropped_types, read_conversation
from sluice.gateway.responses.head import new_head
from sluice.gateway.responses.history import Conversation
from sluice.gateway.responses.record import MAX_BYTES, Record, with_ids
from sluice.gateway.responses.request import ResponseRequest


@dataclass(frozen=True)
class NewResponse:
    """A response that can be submitted."""

    record: Record
    written: bytes  # the record as JSON
    chat: Mapping[str, Any]  # the request of the contract
    dropped: tuple[str, ...]  # hosted tools and their items, which have no effect here


def new_response(request: ResponseRequest, before: Conversation, id: str, tenant: str | None) -> NewResponse:
    """Return a response that continues a conversation. Raises `ApiError`, which names the field."""
    messages = read_conversation(request.items, request.tools)
    if before.items:
        messages = [*read_conversation(before.items, request.tools, "previous_response_id"), *messages]
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if not messages:
        raise refusal("input", "it is empty; send a message.")
    head = new_head(request, id, int(time.time()), requested_model(request.body))
    record = Record(head, tenant, with_ids(request.items, head.suffix), before.ids)
    written = record.to_json()
    if request.store and len(written) > MAX_BYTES:
        raise ApiError(413, f"A stored response has at most {MAX_BYTES:,} bytes; send less.", code="too_large")
    dropped = (*request.tools.dropped, *dropped_types(request.items))
    return NewResponse(record, written, {**request.chat, "messages": messages}, dropped)
