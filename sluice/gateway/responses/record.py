"""What the gateway keeps of a response, so that any gateway can stream, retrieve and continue it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.contract.events import Delta, Event, Finished, Timings, Usage, parse_as
from sluice.gateway.responses.head import ResponseHead
from sluice.gateway.responses.stream import ResponseState

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


def from_completion(head: ResponseHead, completion: Mapping[str, Any]) -> ResponseState:
    """Return the response of a job's stored result, for a job whose log has expired.

    It is that of the log, but for output that the model interleaved: the result has all text in one piece. The tokens
    of its reasoning are not counted.
    """
    state = ResponseState(head)
    for event in _as_log(completion):
        state.add(event)
    return state


def _as_log(completion: Mapping[str, Any]) -> list[Event]:
    choice, details = completion["choices"][0], completion["sluice"]
    message, timings = choice["message"], parse_as(Timings, details["timings"])
    ended_at = completion["created"] + timings.ttft_s + timings.decode_s
    fields: dict[str, Any] = {"id": completion["id"], "attempt": details["attempt"], "ts": ended_at}
    usage = completion["usage"]
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    logprobs = (choice.get("logprobs") or {}).get("content")
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
    written = [
        {"reasoning": message.get("reasoning")},
        {"content": message.get("content"), "logprobs": tuple(logprobs) if logprobs else None},
        {"tool_calls": tuple(calls)},
    ]
    deltas = [Delta(type="delta", seq=seq, token_ids=(), **each, **fields) for seq, each in enumerate(written)]
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    counts = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, reasoning_tokens=reasoning)
    end = Finished(
        type="finished", seq=3, finish_reason=choice["finish_reason"], usage=counts, timings=timings, **fields
    )
    return [*deltas, end]
