"""Builds the stored result: OpenAI's `chat.completion`, with additional fields under `sluice`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas import ChatRequest
from sluice.contract.keys import Lane
from worker.chat.context import WorkerContext
from worker.json_bytes import Items
from worker.monitoring.sink import CallFault
from worker.queue.job.job import Job
from worker.text.output.output import OutputDelta

_CALLS_NOT_READ = "tools: the form of this model's calls is not known, so a call would be in the content."
_CALLS_LEFT_OUT = "tool_choice: the answer has tool calls, which were left out since it is none."
_MOST_FAULTS = 8  # of calls, in the warnings
_NAME_CHARACTERS = 80  # of a name that is quoted
_ECHOED = {"tenant", "safety_identifier", "user", "prompt_cache_key", "metadata", "store"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's part of the result."""

    output: OutputDelta
    left_out_calls: bool  # it had calls, which the request does not allow
    repaired: list[str]  # mistakes in its calls that were put right
    logprobs: list[bytes]  # one entry per token, in OpenAI's form, as JSON
    finish_reason: str
    seed: int
    began_at: float  # Unix seconds
    timings: dict[str, float]
    stop_sequence: str | None  # the stop string that ended it
    warnings: list[str]  # what was ended in it
    rows_mean: float
    specprefill: dict[str, Any] | None = None  # SpecPrefill's report
    speculation: dict[str, Any] | None = None  # speculation's report


@dataclass(frozen=True, slots=True)
class FaultyCall:
    """A call that the model wrote wrong. It is delivered all the same: agents tell their model, which mends it."""

    fault: CallFault
    message: str


def completion(
    job: Job,
    request: ChatRequest,
    context: WorkerContext,
    answer: Answer,
    calls: Sequence[dict[str, Any]],
    faulty: Sequence[FaultyCall],
) -> dict[str, object]:
    """Return the result; `logprobs` in it holds JSON items, so it is written by `json_bytes`. `calls`: of the answer,
    as a message has them, and `faulty` those of them that are wrong."""
    choice = {
        "index": 0,
        "message": _message(answer.output, calls),
        "finish_reason": answer.finish_reason,
        "logprobs": {"content": Items(answer.logprobs), "refusal": None} if request.logprobs else None,
    }
    images = {} if job.usage.image_tokens is None else {"image_tokens": job.usage.image_tokens}
    return {
        "id": job.claim.job_id,
        "object": "chat.completion",
        "created": int(answer.began_at),
        "model": context.settings.model_name,
        "system_fingerprint": context.fingerprint,
        "service_tier": _service_tier(request.service_tier, job.claim.lane),
        "choices": [choice],
        "usage": {
            "prompt_tokens": job.usage.prompt_tokens,
            "completion_tokens": job.usage.completion_tokens,
            "total_tokens": job.usage.prompt_tokens + job.usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": job.usage.cached_tokens, **images},
            **job.usage.completion_details,
        },
        "sluice": _extension(job, request, context, answer, faulty),
    }


def _service_tier(asked: str | None, lane: Lane) -> str:
    """Return OpenAI's name for how the job was run: `flex` or `default`."""
    if asked is None:
        return "flex" if lane == "batch" else "default"
    return "flex" if asked == "flex" else "default"


def _message(output: OutputDelta, calls: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Return the message. Its content is null if there are only tool calls, as in OpenAI's form."""
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if calls and not output.content else output.content,
    }
    if output.reasoning:
        message["reasoning"] = output.reasoning
    if calls:
        message["tool_calls"] = calls
    return {**message, "refusal": None}


def _extension(
    job: Job, request: ChatRequest, context: WorkerContext, answer: Answer, faulty: Sequence[FaultyCall]
) -> dict[str, object]:
    warnings = [
        *warnings_of(request, parses_tools=context.codec.parses_tools, left_out_calls=answer.left_out_calls),
        *list(dict.fromkeys(call.message for call in faulty))[:_MOST_FAULTS],
        *answer.warnings,
    ]
    return {
        "lane": job.claim.lane,
        "worker": context.settings.worker_name,
        "attempt": job.claim.attempt,
        "seed": answer.seed,
        "fingerprint": context.fingerprint,
        "timings": answer.timings,
        "stop_sequence": answer.stop_sequence,
        "rows_mean": answer.rows_mean,
        **({} if job.usage.kept_tokens is None else {"kept_tokens": job.usage.kept_tokens}),
        **({"specprefill": answer.specprefill} if answer.specprefill else {}),
        **({"speculation": answer.speculation} if answer.speculation else {}),
        **({"repaired": answer.repaired} if answer.repaired else {}),
        **({"warnings": warnings} if warnings else {}),
        **request.model_dump(include=_ECHOED, exclude_none=True),
    }


def warnings_of(request: ChatRequest, *, parses_tools: bool, left_out_calls: bool) -> list[str]:
    """Return what the model cannot do as the request asks, or has not done."""
    unread = [] if parses_tools or not request.offered_tools else [_CALLS_NOT_READ]
    return [*unread, *([_CALLS_LEFT_OUT] if left_out_calls else [])]


def faulty_calls(request: ChatRequest, calls: Sequence[dict[str, Any]], *, is_cut_off: bool) -> list[FaultyCall]:
    """Return the calls in which something is wrong. Schemas are not evaluated, since a client chooses what that costs.
    `is_cut_off`: the last call may be incomplete."""
    required = {
        tool.function.name: (tool.function.parameters or {}).get("required", []) for tool in request.offered_tools
    }
    complete = calls[:-1] if is_cut_off else calls
    judged = (_judged(call["function"]["name"], call["function"]["arguments"], required) for call in complete)
    return [call for call in judged if call is not None]


def _judged(name: str, arguments: str, required: Mapping[str, Any]) -> FaultyCall | None:
    called = repr(name[:_NAME_CHARACTERS])
    if name not in required:
        return FaultyCall("unknown_function", f"tool_calls: the function {called} is not among the tools.")
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return FaultyCall("no_json_object", f"tool_calls: the arguments of {called} are no JSON object.")
    asked = required[name] if isinstance(required[name], list) else []
    missing = next((each for each in asked if isinstance(each, str) and each not in given), None)
    if missing is None:
        return None
    absent = f"{missing[:_NAME_CHARACTERS]!r}, which is required."
    return FaultyCall("missing_argument", f"tool_calls: the call of {called} has no {absent}")
