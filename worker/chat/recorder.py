"""Records an attempt at a job: its events, usage and timings, the state that it leaves for the next attempt, and the
result."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from schemas import ChatRequest
from sluice.contract.keys import Lane
from worker.chat.context import WorkerContext
from worker.chat.resume import Delivered
from worker.chat.specprefill import as_result, with_outcome
from worker.chat.speculation import SpeculationReceipt, why_no_drafts
from worker.json_bytes import Items, dumps
from worker.monitoring.sink import CallFault
from worker.outcomes import (
    Phase,
    Prefilled,
    Sampled,
    SpecPrefillApplied,
    SpecPrefillSkipped,
    Speculated,
)
from worker.queue.job.job import Job, JobResult
from worker.queue.job.resume_state import ResumeState, SpecPrefillReport
from worker.text.output.events import message_tool_calls
from worker.text.output.output import Output, OutputDelta, concat

logger = logging.getLogger("sluice.jobs")

Entry = dict[str, Any]  # logprobs of a token, in OpenAI's form

_NOTHING = OutputDelta()
_PROGRESS_EVERY_S = 0.25
_GATHER_S = {"interactive": 0.0, "batch": 1.0}  # offline deltas are merged, so that a batch does not fill Redis
_CUT_SHORT = "max_tokens: the answer was ended, since this worker's memory holds no longer one after this prompt."
_CALLS_NOT_READ = "tools: the form of this model's calls is not known, so a call would be in the content."
_CALLS_LEFT_OUT = "tool_choice: the answer has tool calls, which were left out since it is none."
_ECHOED = {"tenant", "safety_identifier", "user", "prompt_cache_key", "metadata", "store"}


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


def warnings_of(request: ChatRequest, *, parses_tools: bool, left_out_calls: bool) -> list[str]:
    """Return what the model cannot do as the request asks, or has not done."""
    unread = [] if parses_tools or not request.offered_tools else [_CALLS_NOT_READ]
    return [*unread, *([_CALLS_LEFT_OUT] if left_out_calls else [])]


def faulty_calls(
    request: ChatRequest, calls: Sequence[dict[str, Any]], *, is_cut_off: bool
) -> list[tuple[CallFault, str]]:
    """Return what is wrong with calls, each fault with a sentence. The calls are delivered all the same: agents tell
    their model, which mends them. Schemas are not evaluated, since a client chooses what that costs. `is_cut_off`: the
    last call may be incomplete."""
    required = {
        tool.function.name: (tool.function.parameters or {}).get("required", []) for tool in request.offered_tools
    }
    complete = calls[:-1] if is_cut_off else calls
    judged = (_judged(call["function"]["name"], call["function"]["arguments"], required) for call in complete)
    return [call for call in judged if call is not None]


def _judged(name: str, arguments: str, required: Mapping[str, Any]) -> tuple[CallFault, str] | None:
    called = _quoted(name)
    if name not in required:
        return "unknown_function", f"tool_calls: the function {called} is not among the tools."
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return "no_json_object", f"tool_calls: the arguments of {called} are no JSON object."
    asked = required[name] if isinstance(required[name], list) else []
    missing = next((each for each in asked if isinstance(each, str) and each not in given), None)
    if missing is None:
        return None
    absent = f"{_quoted(missing)}, which is required."
    return "missing_argument", f"tool_calls: the call of {called} has no {absent}"


def _quoted(name: str) -> str:
    return repr(name[:80])  # models write names of any length


class TokenPace:
    """Token rate of one attempt, by the engine's times: several tokens may reach the event loop at once."""

    def __init__(self) -> None:
        self._tokens = 0
        self._first_at = 0.0
        self._last_at = 0.0

    def count(self, at: float) -> None:
        """Count a token. `at`: monotonic seconds."""
        if not self._tokens:
            self._first_at = at
        self._tokens, self._last_at = self._tokens + 1, at

    def tokens_per_s(self) -> float:
        """Tokens after the first per second; 0 if there are fewer than two tokens."""
        seconds = self._last_at - self._first_at
        return (self._tokens - 1) / seconds if seconds > 0 else 0.0


class JobRecorder:
    """Counts and reports one attempt at a job, on the event loop."""

    def __init__(self, job: Job, context: WorkerContext) -> None:
        self._job = job
        self._context = context
        self._metrics = context.metrics
        self._began_monotonic = self._progress_at = self._delta_at = time.monotonic()
        self._began_at = job.log.clock.now()
        self._prefilled_at = self._first_at = self._last_at = self._began_monotonic
        self._gather_s = _GATHER_S[job.claim.lane]
        self._ids: list[int] = []
        self._pending = _NOTHING  # not emitted yet
        self._logprobs: list[Entry] = []
        self._emitted: list[OutputDelta] = []
        self._emitted_logprobs: list[bytes] = []
        self._rows = self._steps = 0
        self._pace = TokenPace()
        self._specprefill = SpecPrefillReport(kept=None)
        self._speculation = SpeculationReceipt()
        self._cut_short = False  # the worker's memory has ended the answer
        self._warnings = list[str]()  # known before the answer began
        self._state = ResumeState()  # what this attempt leaves for the next one
        load_began, load_ended = context.loading
        queued = self._began_monotonic - job.claim.age_s(self._began_at)
        self._load_s = max(0.0, load_ended - max(load_began, queued))
        if self._load_s:
            job.phases.loaded(self._load_s)

    def consider_specprefill(self, report: SpecPrefillReport) -> None:
        """Set the report by the request and the settings. The engine's decision may follow."""
        self._specprefill = report

    def consider_speculation(self, request: ChatRequest) -> None:
        """Prepare the receipt that the request is due."""
        self._speculation.why_no_drafts = why_no_drafts(request, self._context.settings)
        if request.prediction is not None:
            self._job.usage.accepted_prediction_tokens = self._job.usage.rejected_prediction_tokens = 0

    def cut_short(self) -> None:
        """Record that the worker's memory holds no longer answer."""
        self._cut_short = True

    def speculated(self, verified: Speculated) -> None:
        """Record a draft that was verified."""
        self._speculation.record(verified)
        self._count_predicted()

    def _count_predicted(self) -> None:
        if self._job.usage.accepted_prediction_tokens is None:  # the request has no prediction
            return
        proposed, accepted = self._speculation.predicted
        self._job.usage.accepted_prediction_tokens = accepted
        self._job.usage.rejected_prediction_tokens = proposed - accepted

    def begin(self, event: Literal["started", "restarted", "resumed"], state: ResumeState) -> None:
        """Emit the first event of the attempt, and store the state that it leaves."""
        self._leave(state)
        self._job.mark("admission")
        settings = self._context.settings
        self._job.log.emit(
            event,
            model=settings.model_name,
            fingerprint=state.fingerprint,
            worker=settings.worker_name,
            seed=state.seed,
        )

    def resume(self, earlier: Delivered, state: ResumeState) -> None:
        """Emit the first event of an attempt that continues an answer, and count the output that earlier attempts
        delivered. Timings are of this attempt alone."""
        self.begin("resumed", state)
        self._specprefill = state.specprefill or self._specprefill
        self._job.usage.kept_tokens = self._specprefill.kept_tokens
        self._emitted.append(earlier.output)
        self._emitted_logprobs += earlier.logprobs
        self._job.usage.completion_tokens = len(earlier.tokens)

    def _leave(self, state: ResumeState) -> None:
        """Store the state for the next attempt with the next events."""
        self._state = state
        self._job.log.store(state.as_fields())

    def prefilled(self, done: int, total: int, cached: int) -> None:
        """Record the progress of the prefill, in tokens. `cached`: tokens found in the prefix cache."""
        self._prefilled_at = time.monotonic()
        self._job.prompt.advanced(done, cached)
        if not self._steps:  # else the row is recomputed after a failure, partly from KV state that it computed itself
            if done >= total and self._job.phases.phase != "decode":
                self._job.mark("decode")
            self._job.usage.cached_tokens = min(cached, self._job.usage.prompt_tokens)
        self.progress(Prefilled.phase, done, total)

    def progress(self, phase: Phase, done: int, total: int) -> None:
        """Emit a progress event, at most one every `_PROGRESS_EVERY_S` seconds, and none for the end of a phase. A load
        is reported once, when it begins, since the engine may sleep until it ends; the next event is later for it."""
        now, due_s = time.monotonic(), self._progress_at + _PROGRESS_EVERY_S
        if done < total and (now >= due_s or phase == "loading"):
            self._progress_at = max(now, due_s)
            self._job.log.emit("progress", phase=phase, done=done, total=total)

    def admitted(self, at: float) -> None:
        """Record that the engine has room for the row, at its beginning or again, since `at` of time.monotonic()."""
        self._job.mark("decode" if self._steps else "prefill", ago_s=time.monotonic() - at)

    def preempted(self) -> None:
        """Record that the row had to leave for others."""
        self._job.mark("preempted")

    def record_specprefill(self, outcome: SpecPrefillApplied | SpecPrefillSkipped) -> None:
        """Record which prompt tokens are computed. It is written with the next events, so before the first token."""
        self._specprefill = with_outcome(self._specprefill, outcome, self._context.fingerprint)
        self._job.usage.kept_tokens = self._specprefill.kept_tokens
        self._leave(self._state.model_copy(update={"specprefill": self._specprefill}))

    def sampled(self, step: Sampled, delta: OutputDelta, logprobs: Entry | None, rows: int, *, last: bool) -> None:
        """Record a token of the answer, or its end. `rows`: rows in the step. `last`: if True, gathered output is
        emitted at once."""
        now = time.monotonic()
        gap_s, self._last_at = now - self._last_at if self._steps else None, now
        if self._steps == 0:
            self._job.prompt.computed()
            self._record_first_token(now)
        self._rows, self._steps = self._rows + rows, self._steps + 1
        self._pending += delta
        self._job.made_progress()
        self._speculation.count(step)
        if step.accepted:
            self._count_predicted()
        if step.token is not None:
            self._ids.append(step.token)
            self._pace.count(now if step.at is None else step.at)
            self._job.usage.completion_tokens += 1
            self._metrics.token(self._job.claim.lane, gap_s)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if last or now - self._delta_at >= self._gather_s:
            self.emit_delta()

    def _record_first_token(self, now: float) -> None:
        self._first_at = now
        if self._job.phases.phase != "decode":  # no outcome has told of the end of the prompt
            self._job.mark("decode")
        self._job.mark("first_token")
        claim, seconds = self._job.claim, now - self._began_monotonic
        record = claim.record(queue_s=round(claim.age_s(self._began_at), 3), first_token_s=round(seconds, 3))
        logger.info("%s first token after %.3f s", claim.job_id, seconds, extra=record)
        self._metrics.first_token(
            self._job.claim.lane,
            ttft_s=self._job.claim.age_s(self._began_at) + now - self._began_monotonic,
            prefill_s=self._prefilled_at - self._began_monotonic,
            prompt_tokens=self._job.usage.prompt_tokens,
        )

    def warn(self, line: str) -> None:
        """Note what the client must know about the answer, for the result."""
        if len(self._warnings) < 16:  # a client's schemas decide how many there are
            self._warnings.append(line)

    def emit_delta(self) -> None:
        """Emit the gathered output as one delta event."""
        if self._ids or self._pending:
            logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
            self._job.log.emit("delta", token_ids=self._ids, **_fields(self._pending), **logprobs)
        if self._pending:
            self._emitted.append(self._pending)
        self._emitted_logprobs += map(dumps, self._logprobs)
        self._ids = []
        self._pending = _NOTHING
        self._logprobs = []
        self._delta_at = time.monotonic()

    def result(self, request: ChatRequest, seed: int, finish_reason: str, output: Output) -> JobResult:
        """Return the result of a finished job. `output`: the parser that has read the whole answer."""
        timings = self._timings()
        spent = f"{self._job.usage.completion_tokens} tokens in {timings['ttft_s'] + timings['decode_s']:.3f} s"
        rate = f", {timings['tokens_per_s']:.1f} tokens/s" if timings["tokens_per_s"] else ""
        record = self._job.claim.record(finish_reason=finish_reason, **self._job.usage.as_event(), **timings)
        logger.info("%s finished: %s, %s%s", self._job.claim.job_id, finish_reason, spent, rate, extra=record)
        said = concat(self._emitted)
        calls = message_tool_calls(said.tool_calls)
        faults = faulty_calls(request, calls, is_cut_off=finish_reason == "length")
        choice = {
            "index": 0,
            "message": _message(said, calls),
            "finish_reason": finish_reason,
            "logprobs": {"content": Items(self._emitted_logprobs), "refusal": None} if request.logprobs else None,
        }
        warnings = [
            *warnings_of(request, parses_tools=self._context.codec.parses_tools, left_out_calls=output.left_out_calls),
            *list(dict.fromkeys(message for _, message in faults))[:8],  # an answer may have any number
            *self._warnings,
            *output.warnings,
            *([_CUT_SHORT] if self._cut_short and finish_reason == "length" else []),
        ]
        extension = self._extension(request, seed, timings, output, warnings)
        return JobResult(
            finish_reason,
            timings,
            self._completion(request, choice, extension),
            output.stop_sequence,
            warnings=warnings,
            faulty_calls=tuple(fault for fault, _ in faults),
        )

    def _completion(
        self, request: ChatRequest, choice: dict[str, object], extension: dict[str, object]
    ) -> dict[str, object]:
        """Return the result in OpenAI's form; `logprobs` in it holds JSON items, so it is written by `json_bytes`."""
        context, usage = self._context, self._job.usage
        images = {} if usage.image_tokens is None else {"image_tokens": usage.image_tokens}
        return {
            "id": self._job.claim.job_id,
            "object": "chat.completion",
            "created": int(self._began_at),
            "model": context.settings.model_name,
            "system_fingerprint": context.fingerprint,
            "service_tier": _service_tier(request.service_tier, self._job.claim.lane),
            "choices": [choice],
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **images},
                **usage.completion_details,
            },
            "sluice": extension,
        }

    def _extension(
        self, request: ChatRequest, seed: int, timings: dict[str, float], output: Output, warnings: list[str]
    ) -> dict[str, object]:
        """Return the part of the result that OpenAI's form does not have."""
        claim, usage = self._job.claim, self._job.usage
        specprefill = as_result(self._specprefill, usage.prompt_tokens, timings["prefill_s"])
        speculation = self._speculation.as_result()
        return {
            "lane": claim.lane,
            "worker": self._context.settings.worker_name,
            "attempt": claim.attempt,
            "seed": seed,
            "fingerprint": self._context.fingerprint,
            "timings": timings,
            "stop_sequence": output.stop_sequence,
            "rows_mean": round(self._rows / max(self._steps, 1), 2),
            **({} if usage.kept_tokens is None else {"kept_tokens": usage.kept_tokens}),
            **({"specprefill": specprefill} if specprefill else {}),
            **({"speculation": speculation} if speculation else {}),
            **({"repaired": output.repaired} if output.repaired else {}),
            **({"warnings": warnings} if warnings else {}),
            **request.model_dump(include=_ECHOED, exclude_none=True),
        }

    def _timings(self) -> dict[str, float]:
        decode_s = self._last_at - self._first_at
        queue_s = self._job.claim.age_s(self._began_at)
        timings = {
            "queue_s": queue_s,
            "prefill_s": self._prefilled_at - self._began_monotonic,
            "ttft_s": self._first_at - self._began_monotonic,
            "decode_s": decode_s,
            "tokens_per_s": self._pace.tokens_per_s(),
            **({"load_s": self._load_s} if self._load_s else {}),
        }
        return {name: round(value, 6) for name, value in timings.items()}


def _fields(delta: OutputDelta) -> dict[str, object]:
    """Return the non-empty fields of a delta event."""
    fields = {"content": delta.content, "reasoning": delta.reasoning, "tool_calls": delta.tool_calls}
    return {name: value for name, value in fields.items() if value}
