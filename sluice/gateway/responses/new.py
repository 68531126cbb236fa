"""A new response: its record, and the chat completion that makes it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice.gateway.errors import ApiError
from sluice.gateway.models import requested_model
from sluice.gateway.responses.events.head import new_head
from sluice.gateway.responses.history import Conversation
from sluice.gateway.responses.record import MAX_BYTES, Record, with_ids
from sluice.gateway.responses.request.body import ResponseRequest, read_request
from sluice.gateway.responses.request.conversation import dropped_types, read_conversation
from sluice.gateway.responses.request.fields import refusal

_MOST_LEVELS = 100  # far more than a JSON schema has, far fewer than a JSON writer can nest


@dataclass(frozen=True)
class NewResponse:
    """A response that can be submitted."""

    record: Record
    written: bytes  # the record as JSON
    chat: Mapping[str, Any]  # the request of the contract
    dropped: tuple[str, ...]  # hosted tools and their items, which have no effect here


def read_request_body(body: Mapping[str, Any]) -> ResponseRequest:
    """Read a request, but for its items. Raises `ApiError`."""
    _check_depth(body)
    return read_request(body)


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


def _check_depth(body: Mapping[str, Any]) -> None:
    """Refuse values that JSON cannot be written from. Raises `ApiError`."""
    level: list[Any] = [body]
    for _ in range(_MOST_LEVELS):
        values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ApiError(400, f"The body is nested more than {_MOST_LEVELS} levels deep.", code="invalid_request")
