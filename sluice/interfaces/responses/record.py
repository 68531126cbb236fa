"""What the gateway keeps of a response, so that any gateway can stream, retrieve and continue it."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.interfaces.fields import refusal, requested_model
from sluice.interfaces.responses.conversation import dropped_types, read_conversation
from sluice.interfaces.responses.request import ResponseRequest
from sluice.interfaces.tools import RequestTools, read_tools

PREFIX = "resp_"
VERSION = 1  # of the format; gateways take a record of another version for absent
MAX_BYTES = 16_000_000  # of a conversation, as stored; a job's body is not longer either

Response = dict[str, Any]


@dataclass(frozen=True)
class ResponseHead:
    """The part of a response that is fixed before its first token: the fields that it repeats from its request, and how
    its output is to be written."""

    id: str
    created_at: int  # Unix seconds
    echo: Mapping[str, Any]
    summary: bool  # reasoning goes into `summary`, and into `content` otherwise
    enclosed: bool  # reasoning items carry `encrypted_content`
    logprobs: bool

    @property
    def suffix(self) -> str:
        """The part of the id that the ids of its items repeat."""
        return self.id.removeprefix(PREFIX)

    @property
    def background(self) -> bool:
        """True if the response goes on without a reader."""
        return bool(self.echo["background"])

    def tools(self) -> RequestTools:
        """Return the tools of the request."""
        return read_tools(self.echo["tools"])


def new_head(request: ResponseRequest, id: str, created_at: int, model: str) -> ResponseHead:
    """Return the head of a new response."""
    return ResponseHead(
        id,
        created_at,
        _echo(request, model),
        summary=request.summary is not None,
        enclosed="reasoning.encrypted_content" in request.includes,
        logprobs=bool(request.chat.get("logprobs")),
    )


def skeleton(head: ResponseHead) -> Response:
    """Return the response without output, status and usage."""
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created_at,
        "completed_at": None,
        "status": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **head.echo,
    }


def _echo(request: ResponseRequest, model: str) -> dict[str, Any]:
    body = request.body
    text = body.get("text") or {}
    reasoning = body.get("reasoning") or {}
    verbosity = text.get("verbosity")
    # Open Responses requires numbers. 1 stands for the model's own default, which no gateway knows.
    sampling = {name: 1 if (given := body.get(name)) is None else given for name in ("temperature", "top_p")}
    return {
        "background": request.background,
        "instructions": request.instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": request.previous,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": request.summary},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "flex" if body.get("service_tier") == "flex" else "default",
        "store": request.store,
        **sampling,
        **{name: body.get(name) or 0 for name in ("presence_penalty", "frequency_penalty")},
        "text": {"format": text.get("format") or {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_filled(tool) for tool in request.tools.offered],
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": "disabled",
        "user": body.get("user"),
        **({"sluice": {"ignored": list(request.ignored)}} if request.ignored else {}),
    }


def _filled(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that OpenAI's answers always have."""
    required = {"parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**required, **tool}


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
