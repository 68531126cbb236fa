"""Run one job, a chat or a token count: job to request, request to generation request, outcomes to events. Read this
first."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from schemas import ChatRequest
from worker.chat.context import WorkerContext
from worker.chat.prepare import cache_namespace, deadline, prepare, validate_request
from worker.chat.recorder import JobRecorder
from worker.chat.request import output_tokens, sampling_of, seed_of
from worker.chat.resume import Restart, Resume, Start, resume_plan
from worker.chat.specprefill import specprefill_params
from worker.chat.speculation import draft_limit
from worker.errors import JobFailure
from worker.outcomes import (
    Admitted,
    CutShort,
    Outcome,
    Preempted,
    Prefilled,
    PromptProgress,
    Refused,
    RowFailed,
    Sampled,
    SpecPrefillApplied,
    SpecPrefillSkipped,
    Speculated,
)
from worker.queue.job.job import Job, JobResult
from worker.queue.job.resume_state import ResumeState
from worker.request import GenerationRequest, GrammarState, PromptImage
from worker.text.output.output import Output, OutputDelta
from worker.text.prompt.prompt import Prompt

logger = logging.getLogger("sluice.jobs")


async def chat(ctx: dict[Any, Any], body: Any) -> JobResult:
    """Run one attempt at a job: the arq function that producers enqueue. Raises `JobFailure` if it
    ends without an answer."""
    attempt = Chat(ctx["job"], ctx["context"])
    try:
        return await attempt.run(body)
    finally:
        attempt.release_images()


class Chat:
    """One attempt at a chat job."""

    def __init__(self, job: Job, context: WorkerContext) -> None:
        self._job = job
        self._context = context
        self._recorder = JobRecorder(job, context)
        # Ids are per attempt, so late outcomes of an old attempt are dropped.
        self._id = f"{job.claim.job_id}#{job.claim.attempt}"
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._grammar: GrammarState | None = None
        self._output: Output  # set before the first event
        self._images_digest = ""  # empty without images
        self._completed_before = False  # True if an earlier attempt completed the answer, except for its final event

    async def run(self, body: Any) -> JobResult:
        """Run the attempt to its end. Raises `JobFailure`; when cancelled, it frees the row first."""
        job, context = self._job, self._context
        request = await validate_request(job, context, body)
        with deadline(job, request.deadline_s):
            seed = seed_of(request, job.claim.job_id)
            job.log.store(request.model_dump(include={"prompt_cache_key"}, exclude_none=True))
            prepared = await prepare(job, context, request, self._id)
            prompt, self._images_digest = prepared.text, prepared.images_digest
            job.prompt.tokenized(len(prompt.tokens), is_text=not prepared.images)
            generation_request = replace(
                self._generation_request(request, prompt, prepared.images, seed),
                max_draft=draft_limit(request, context.settings),
                prediction=prepared.prediction,
            )
            self._recorder.consider_speculation(request)
            self._grammar = await context.codec.grammar(
                request,
                prompt,
                job.claim.lane,
                drafts=generation_request.max_draft != 0,
                resumes=bool(job.log.events),
                warn=self._recorder.warn,
            )
            self._grammar = context.codec.limited(request, prompt, self._grammar, loop_guard=self._loop_guard(request))
            generation_request = await self._begin(request, prompt, replace(generation_request, grammar=self._grammar))
            logger.info(
                "%s prepared: %d prompt tokens, lane %s", job.claim.job_id, len(prompt.tokens), job.claim.lane,
                extra=job.claim.record(prompt_tokens=len(prompt.tokens)),
            )  # fmt: skip
            try:
                if self._completed_before or len(generation_request.resume_tokens) >= generation_request.max_tokens:
                    self._finish_resumed(generation_request)
                else:
                    context.engine.submit(generation_request, self.on_outcome)
                finish_reason = await self._done
            finally:
                context.engine.remove(generation_request.id)
                self._recorder.emit_delta()
        return self._recorder.result(request, seed, finish_reason, self._output)

    def _loop_guard(self, request: ChatRequest) -> bool:
        return self._context.settings.loop_guard if request.loop_guard is None else request.loop_guard

    async def _begin(
        self, request: ChatRequest, prompt: Prompt, generation_request: GenerationRequest
    ) -> GenerationRequest:
        """Emit the first event of this attempt. Returns the request, with what is continued from earlier attempts."""
        new_output = partial(
            self._context.codec.output, request, prompt, self._job.claim.job_id, loop_guard=self._loop_guard(request)
        )
        state = ResumeState(
            fingerprint=self._context.fingerprint, seed=generation_request.sampling.seed, images=self._images_digest
        )
        self._output = new_output()
        match await self._resume_plan(state, new_output, len(prompt.tokens)):
            case Start():
                self._recorder.begin("started", state)
            case Restart(reason=reason):
                claim = self._job.claim
                logger.info("%s starts over: %s", claim.job_id, reason, extra=claim.record(reason=reason))
                self._recorder.begin("restarted", state)
            case Resume(delivered=earlier, output=output, ended=ended, state=left):
                self._output, self._completed_before = output, ended
                self._job.usage.reasoning_tokens = self._output.reasoning_tokens
                self._recorder.resume(earlier, left)
                return replace(generation_request, resume_tokens=earlier.tokens, kept_ranges=left.kept_ranges)
        return generation_request

    async def _resume_plan(
        self, state: ResumeState, new_output: Callable[[], Output], prompt_tokens: int
    ) -> Start | Resume | Restart:
        """Decide how this attempt begins, on a text thread, since the log may be long."""
        claim, log = self._job.claim, tuple(self._job.log.events)
        if not log:
            return Start()
        decide = partial(
            resume_plan, log, claim.resume_state, state, new_output,
            prompt_tokens=prompt_tokens, vocab_size=self._context.vocab_size,
        )  # fmt: skip
        return await self._context.codec.run(claim.lane, sum(map(len, log)), decide, claim.tenant)

    def _generation_request(
        self, request: ChatRequest, prompt: Prompt, images: tuple[PromptImage, ...], seed: int
    ) -> GenerationRequest:
        context, claim = self._context, self._job.claim
        limit = output_tokens(
            request,
            prompt=len(prompt.tokens),
            context=context.context_tokens,
            default=context.settings.default_max_tokens,
            limit=context.settings.max_output_tokens,
        )
        sampling = sampling_of(request, context.generation, context.vocab_size, seed, context.end_tokens)
        specprefill, report = specprefill_params(request, prompt, context.settings)
        self._recorder.consider_specprefill(report)
        top = (request.top_logprobs or 0) if request.logprobs else None
        return GenerationRequest(
            self._id,
            prompt.tokens,
            limit,
            sampling,
            claim.lane,
            top_logprobs=top,
            namespace=cache_namespace(request, context),
            boundaries=prompt.boundaries,
            specprefill=specprefill,
            images=images,
            marks=self._job.prompt.token_marks(),
            grows=request.output_limit is None and context.settings.default_max_tokens is None,
        )

    def _finish_resumed(self, generation_request: GenerationRequest) -> None:
        """Finish without the engine: the earlier worker died between the last token and the final event."""
        ran_out = len(generation_request.resume_tokens) >= generation_request.max_tokens and not self._output.stopped
        self._done.set_result(self._output.finish_reason("length" if ran_out else "stop"))

    def on_outcome(self, outcome: Outcome, rows: int) -> None:
        """Process one outcome of the engine for this row, on the event loop. `rows`: rows in that step."""
        if self._done.done():
            return
        try:
            self._handle(outcome, rows)
        except Exception as error:  # ends this job only: the other rows of the step still get their outcomes
            self._done.set_exception(error)

    def release_images(self) -> None:
        """Release our share of the pixel budget: from a row's first outcome on, the engine counts its images."""
        if self._context.images:
            self._context.images.release(self._id)

    def _handle(self, outcome: Outcome, rows: int) -> None:
        self.release_images()
        match outcome:
            case Sampled():  # first, since it is by far the most frequent
                self._sampled(outcome, rows)
            case Prefilled(done=done, total=total, cached=cached):
                self._recorder.prefilled(done, total, cached)
            case PromptProgress(phase=phase, done=done, total=total):
                self._recorder.progress(phase, done, total)
            case Admitted(at=at):
                self._recorder.admitted(at)
            case Preempted():
                self._recorder.preempted()
            case Speculated():
                self._recorder.speculated(outcome)
            case SpecPrefillApplied() | SpecPrefillSkipped():
                self._recorder.record_specprefill(outcome)
            case CutShort():
                self._recorder.cut_short()
            case Refused(message=message):
                self._done.set_exception(JobFailure("too_large", message))
            case RowFailed():
                message = "The engine failed on this row; the worker's log says why."
                self._done.set_exception(JobFailure("internal", message, retryable=True))

    def _sampled(self, step: Sampled, rows: int) -> None:
        delta = OutputDelta() if step.token is None else self._output.feed(step.token)
        if step.finish_reason and not self._output.stopped:
            delta += self._output.flush(step.finish_reason)
        ended = "stop" if self._output.stopped else step.finish_reason
        self._job.usage.reasoning_tokens = self._output.reasoning_tokens
        self._recorder.sampled(step, delta, self._logprobs(step), rows, last=ended is not None)
        if self._grammar and (error := self._grammar.error):
            if error.internal:
                raise RuntimeError(f"the sampled token violates the grammar: {error.reason}")
            raise JobFailure("invalid_request", f"The request's schema cannot be enforced: {error.reason}")
        if ended:
            self._done.set_result(self._output.finish_reason(ended))

    def _logprobs(self, step: Sampled) -> dict[str, Any] | None:
        if step.token is None or step.logprobs is None:
            return None
        return self._context.codec.logprobs(step.token, step.logprobs)


async def count(ctx: dict[Any, Any], body: Any) -> JobResult:
    """Count the tokens that `chat` would compute or find cached for the same request: the arq function that producers
    enqueue. Raises the `JobFailure` that `chat` raises for a prompt that is invalid or too long."""
    job: Job = ctx["job"]
    context: WorkerContext = ctx["context"]
    attempt_id = f"{job.claim.job_id}#{job.claim.attempt}"
    began_at, began = job.log.clock.now(), time.monotonic()
    try:
        await _count(job, context, body, attempt_id)
    finally:
        if context.images:
            context.images.release(attempt_id)
    seconds = time.monotonic() - began
    logger.info(
        "%s counted: %d prompt tokens in %.3f s", job.claim.job_id, job.usage.prompt_tokens, seconds,
        extra=job.claim.record(prompt_tokens=job.usage.prompt_tokens, seconds=round(seconds, 3)),
    )  # fmt: skip
    timings = {"queue_s": job.claim.age_s(began_at), "prefill_s": seconds, "ttft_s": 0.0, "decode_s": 0.0}
    rounded = {name: round(value, 6) for name, value in timings.items()}
    result = _count_result(job, context, int(began_at))
    return JobResult("stop", {**rounded, "tokens_per_s": 0.0}, result, is_answer=False)


async def _count(job: Job, context: WorkerContext, body: Any, attempt_id: str) -> None:
    request = await validate_request(job, context, body)
    with deadline(job, request.deadline_s):
        prompt = await prepare(job, context, request, attempt_id)
    output_tokens(
        request,
        prompt=len(prompt.text.tokens),
        context=context.context_tokens,
        default=context.settings.default_max_tokens,
        limit=context.settings.max_output_tokens,
    )


def _count_result(job: Job, context: WorkerContext, created: int) -> dict[str, object]:
    images = {} if job.usage.image_tokens is None else {"image_tokens": job.usage.image_tokens}
    return {
        "id": job.claim.job_id,
        "object": "token_count",
        "created": created,
        "model": context.settings.model_name,
        "usage": {
            "prompt_tokens": job.usage.prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": job.usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": 0, **images},
        },
    }
