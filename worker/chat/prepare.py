"""Prepares a job's prompt: validates the request, and renders and tokenizes its messages with their images."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from schemas import ChatRequest
from worker.chat.context import WorkerContext
from worker.chat.images import images_digest
from worker.chat.request import output_tokens, read_request
from worker.chat.speculation import prediction_tokens
from worker.errors import CancelJob, JobFailure
from worker.queue.job.job import Job, JobResult
from worker.request import PromptImage
from worker.text.prompt.prompt import Prompt

logger = logging.getLogger("sluice.jobs")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt, and its images located in it."""

    text: Prompt
    images: tuple[PromptImage, ...] = ()
    images_digest: str = ""  # empty without images
    prediction: tuple[int, ...] = ()  # tokens of the predicted text


async def validate_request(job: Job, context: WorkerContext, body: Any) -> ChatRequest:
    """Validate the job's request on a thread if it is large, and apply its `on_disconnect`. Raises `JobFailure`."""
    settings, claim = context.settings, job.claim
    # An attempt that resumes SpecPrefill's earlier decision needs no draft model.
    decided = claim.resume_state is not None and claim.resume_state.specprefill is not None
    validate = partial(
        read_request,
        body,
        settings.model_name,
        max_parts=settings.max_content_parts,
        has_draft_model=settings.specprefill_draft_model is not None or decided,
    )
    request = await context.reader.run(validate, size=claim.body_bytes, lane=claim.lane, tenant=claim.tenant)
    if request.on_disconnect == "cancel":
        job.log.on_abandoned = partial(job.interrupt, CancelJob("disconnected"))
    return request


async def prepare(job: Job, context: WorkerContext, request: ChatRequest, attempt_id: str) -> PreparedPrompt:
    """Render and tokenize the prompt on the text threads, and count its tokens into the job's usage.

    The images' pixels stay in the budget of `attempt_id` until they are released. Raises `JobFailure`.
    """
    inputs, lane = context.images, job.claim.lane
    namespace = cache_namespace(request, context)
    processed = await inputs.process(request.messages, attempt_id, lane, namespace) if inputs else ()
    prompt = await context.codec.prompt(request, [image.text for image in processed], lane)
    job.usage.prompt_tokens = len(prompt.tokens)
    prediction = await prediction_tokens(request, context, job.claim)
    if not (inputs and processed):
        return PreparedPrompt(prompt, prediction=prediction)
    job.usage.image_tokens = sum(image.placeholders for image in processed)
    return PreparedPrompt(prompt, inputs.locate(prompt.tokens, processed), images_digest(processed), prediction)


def cache_namespace(request: ChatRequest, context: WorkerContext) -> str:
    """Return the cache namespace of the request: the tenant's, or the common one."""
    return (request.effective_tenant or "") if context.settings.prefix_cache_per_tenant else ""


@contextmanager
def deadline(job: Job, deadline_s: float | None) -> Iterator[None]:
    """Interrupt the job `deadline_s` seconds after its submission, queue time included. Raises `JobFailure` if that
    time has passed already."""
    if deadline_s is None:
        yield
        return
    left_s = job.claim.queued_at + deadline_s - job.log.clock.now()
    late = JobFailure("deadline", f"The job was not done {deadline_s:g} s after it was submitted.", retryable=True)
    if left_s <= 0:
        raise late
    timer = asyncio.get_running_loop().call_later(left_s, job.interrupt, late)
    try:
        yield
    finally:
        timer.cancel()


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
    logger.info("%s counted: %d prompt tokens in %.3f s", job.claim.job_id, job.usage.prompt_tokens, seconds)
    timings = {"queue_s": job.claim.age_s(began_at), "prefill_s": seconds, "ttft_s": 0.0, "decode_s": 0.0}
    rounded = {name: round(value, 6) for name, value in timings.items()}
    result = _result(job, context, int(began_at))
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


def _result(job: Job, context: WorkerContext, created: int) -> dict[str, object]:
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
