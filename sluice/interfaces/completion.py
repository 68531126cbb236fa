"""The events of a job, from its result."""

from collections.abc import Mapping
from typing import Any

from sluice.contract.events import Delta, Event, Finished, Started, Timings, Usage, parse_as


def events_of(completion: Mapping[str, Any]) -> list[Event]:
    """Return the events that a stored result tells of: those of the log, but with all reasoning, all text and all calls
    in one piece each."""
    choice, details = completion["choices"][0], completion["sluice"]
    message, timings = choice["message"], parse_as(Timings, details["timings"])
    ended_at = completion["created"] + timings.ttft_s + timings.decode_s
    fields: dict[str, Any] = {"id": completion["id"], "attempt": details["attempt"], "ts": ended_at}
    logprobs = (choice.get("logprobs") or {}).get("content")
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
    written = [
        {"reasoning": message.get("reasoning")},
        {"content": message.get("content"), "logprobs": tuple(logprobs) if logprobs else None},
        {"tool_calls": tuple(calls)},
    ]
    claim = {"fingerprint": details.get("fingerprint", ""), "worker": details.get("worker", "")}
    begun = {**fields, "ts": completion["created"], **claim, "seed": details.get("seed", 0)}
    started = Started(type="started", seq=0, model=completion.get("model", ""), **begun)
    deltas = [Delta(type="delta", seq=seq, token_ids=(), **each, **fields) for seq, each in enumerate(written, 1)]
    end = Finished(
        type="finished",
        seq=4,
        finish_reason=choice["finish_reason"],
        stop_sequence=details.get("stop_sequence"),
        usage=_usage(completion["usage"]),
        timings=timings,
        **fields,
    )
    return [started, *deltas, end]


def _usage(usage: Mapping[str, Any]) -> Usage:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    return Usage(usage["prompt_tokens"], usage["completion_tokens"], cached, reasoning_tokens=reasoning)
