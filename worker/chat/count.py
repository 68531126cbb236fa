"""Counts the prompt tokens of a request, without the engine: the job kind `count`."""

import logging
import time
from typing import Any

from worker.chat.context import WorkerContext
from worker.chat.prepare import deadline, prepare, read
from worker.chat.request import output_tokens
from worker.queue.job.job import Job, JobResult

logger = logging.getLogger("sluice.jobs")


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
    request = await read(job, context, body)
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
