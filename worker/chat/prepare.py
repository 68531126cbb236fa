"""Prepares a job's prompt: validates the request, and renders and tokenizes its messages with their images."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from schemas import ChatRequest
from worker.chat.context import WorkerContext
from worker.chat.request import read_request
from worker.chat.speculation import prediction_tokens
from worker.errors import CancelJob, JobFailure
from worker.images.conversation import images_digest
from worker.queue.job.job import Job
from worker.request import PromptImage
from worker.text.prompt.prompt import Prompt


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
        alias=claim.alias,
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
