"""Run one job of an embedding model: job to tokens, tokens to vectors, vectors to result. Its only event is the final
one; after a crash it is computed again."""

import asyncio
import base64
import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import hypot
from typing import Any, Protocol

from pydantic import ValidationError

from schemas import EmbeddingRequest, explain, field_of
from worker.bounded_json.reader import BodyReader
from worker.chat.prepare import deadline
from worker.chat.request import refuse_other_model
from worker.errors import JobFailure
from worker.json_bytes import Items, dumps
from worker.monitoring.sink import MetricsSink
from worker.outcomes import Embedded, Outcome, OutcomeListener, RowFailed
from worker.queue.job.job import Job, JobResult
from worker.request import EmbeddingInputs
from worker.settings import Settings
from worker.text.threads import Check, TextThreads

logger = logging.getLogger("sluice.jobs")


class _Engine(Protocol):
    """The engine thread's interface for jobs."""

    def submit(self, request: EmbeddingInputs, listener: OutcomeListener) -> None: ...

    def remove(self, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class EmbeddingContext:
    """Objects and figures that all jobs of an embedding worker share."""

    settings: Settings
    engine: _Engine
    encode: Callable[[str], Sequence[int]]  # the tokens of a text, those included that begin and end an input
    fingerprint: str
    context_tokens: int
    vocab_size: int
    dimensions: int
    metrics: MetricsSink
    reader: BodyReader = field(default_factory=BodyReader)
    threads: TextThreads = field(default_factory=partial(TextThreads, "input"))


async def embed(ctx: dict[Any, Any], body: Any) -> JobResult:
    """Run one attempt at a job: the arq function that producers enqueue. Raises `JobFailure`."""
    job: Job = ctx["job"]
    context: EmbeddingContext = ctx["context"]
    claim = job.claim
    began_at, began = job.log.clock.now(), time.monotonic()
    read = partial(_read, body, context, claim.alias)
    request = await context.reader.run(read, size=claim.body_bytes, lane=claim.lane, tenant=claim.tenant)
    with deadline(job, request.deadline_s):
        encode = partial(_tokens, request, context)
        tokens = await context.threads.run(claim.lane, claim.body_bytes, encode, claim.tenant)
        job.usage.prompt_tokens = sum(map(len, tokens))
        vectors = await _vectors(job, context, tokens)
        write = partial(_data, request, vectors)
        data = await context.threads.run(claim.lane, sum(map(len, vectors)), write, claim.tenant)
    seconds = time.monotonic() - began
    count = job.usage.prompt_tokens
    logger.info(
        "%s embedded: %d inputs, %d tokens in %.3f s", claim.job_id, len(tokens), count, seconds,
        extra=claim.record(inputs=len(tokens), prompt_tokens=count, seconds=round(seconds, 3)),
    )  # fmt: skip
    ttft_s = claim.age_s(job.log.clock.now())  # from the submission
    context.metrics.first_token(claim.lane, ttft_s=ttft_s, prefill_s=seconds, prompt_tokens=count)
    timings = {"queue_s": claim.age_s(began_at), "prefill_s": seconds, "ttft_s": 0.0, "decode_s": 0.0}
    timings = {name: round(value, 6) for name, value in timings.items()} | {"tokens_per_s": 0.0}
    return JobResult("stop", timings, _result(job, context, request, data, int(began_at), timings))


def _read(body: Any, context: EmbeddingContext, alias: str = "") -> EmbeddingRequest:
    """Validate a job's body. `alias`: the name that the job was queued under, if an alias. Raises `JobFailure`,
    which names the field."""
    try:
        request = EmbeddingRequest.model_validate(body)
    except ValidationError as error:
        raise JobFailure("invalid_request", explain(error), param=field_of(error)) from None
    refuse_other_model(request.model, context.settings.model_name, alias)
    most = context.dimensions
    if request.dimensions is not None and request.dimensions > most:
        message = f"dimensions: {request.dimensions} is too large; the model's vectors have {most}."
        raise JobFailure("invalid_request", message, param="dimensions")
    # JSON writes a double in 17 digits, with sign, point, exponent and comma: 24 bytes at most; base64 one in 16 / 3.
    number_bytes = 16 / 3 if request.encoding_format == "base64" else 24
    vector_bytes, limit = (request.dimensions or most) * number_bytes, context.settings.max_request_bytes
    if len(request.inputs) * vector_bytes > limit:
        raise JobFailure(
            "too_large",
            f"input: {len(request.inputs):,} inputs make an answer of more than {limit:,} bytes; send at most "
            f"{max(1, int(limit / vector_bytes)):,} of them, or ask for base64 or fewer dimensions.",
            param="input",
        )
    return request


def _tokens(request: EmbeddingRequest, context: EmbeddingContext, check: Check) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each input. Raises `JobFailure` for inputs that are too long, or no tokens of the model."""
    found, total = list[tuple[int, ...]](), 0
    most_characters = max(1_000_000, 16 * context.context_tokens)  # far more than any text of so many tokens
    several = isinstance(request.input, list) and not isinstance(request.input[0], int)
    for index, each in enumerate(request.inputs):
        check()
        place = f"input[{index}]" if several else "input"
        if isinstance(each, str) and len(each) > most_characters:
            message = f"{place}: the text has {len(each):,} characters; at most {most_characters:,} are read."
            raise JobFailure("too_large", message, param=place)
        tokens: tuple[int, ...] = tuple(context.encode(each) if isinstance(each, str) else each)
        if not tokens:
            raise JobFailure("invalid_request", f"{place}: the text has no tokens; leave it out.", param=place)
        if len(tokens) > context.context_tokens:
            raise JobFailure(
                "too_large",
                f"{place}: This model's maximum context length is {context.context_tokens} tokens. However, the input "
                f"has {len(tokens)} tokens. Please shorten it, or split it into several inputs.",
                param=place,
            )
        if (wrong := max(tokens)) >= context.vocab_size:
            message = f"{place}: the model has no token {wrong}; its ids are below {context.vocab_size}."
            raise JobFailure("invalid_request", message, param=place)
        found.append(tokens)
        total += len(tokens)
    most = 300_000  # as OpenAI's
    if total > max(most, context.context_tokens):
        message = f"input: the inputs have {total:,} tokens together; at most {most:,} are taken. Send fewer of them."
        raise JobFailure("too_large", message, param="input")
    return tuple(found)


async def _vectors(job: Job, context: EmbeddingContext, tokens: tuple[tuple[int, ...], ...]) -> list[bytes]:
    """Return the vector of each input, as the engine computes it. When cancelled, it takes the rest from the engine."""
    vectors, left = [b""] * len(tokens), len(tokens)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def listen(outcome: Outcome, rows: int) -> None:
        nonlocal left
        match outcome:
            case Embedded(index=index, vector=vector):
                vectors[index] = vector
                left -= 1
                if not left and not done.done():
                    done.set_result(None)
            case RowFailed() if not done.done():
                message = "The engine failed on an input; the worker's log says why."
                done.set_exception(JobFailure("internal", message, retryable=True))

    claim = job.claim
    # Ids are per attempt, so late outcomes of an old attempt are dropped.
    inputs = EmbeddingInputs(f"{claim.job_id}#{claim.attempt}", tokens, claim.lane, claim.tenant)
    job.mark("prefill")
    context.engine.submit(inputs, listen)
    try:
        await done
    finally:
        context.engine.remove(inputs.id)
    return vectors


def _data(request: EmbeddingRequest, vectors: Sequence[bytes], check: Check) -> list[bytes]:
    """Return the entries of the result's `data`, each as JSON text."""
    entries = []
    for index, vector in enumerate(vectors):
        check()
        vector = shortened(vector, request.dimensions)
        is_base64 = request.encoding_format == "base64"
        embedding = base64.b64encode(vector).decode() if is_base64 else _numbers(vector)
        entries.append(dumps({"object": "embedding", "index": index, "embedding": embedding}))
    return entries


def shortened(vector: bytes, dimensions: int | None) -> bytes:
    """Return the first `dimensions` numbers of a vector, scaled to the length 1; None: all, as they are."""
    if dimensions is None or 4 * dimensions == len(vector):
        return vector
    first = _numbers(vector)[:dimensions]
    length = hypot(*first) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in first))


def _numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _result(
    job: Job, context: EmbeddingContext, request: EmbeddingRequest, data: Sequence[bytes], created: int,
    timings: dict[str, float],
) -> dict[str, object]:  # fmt: skip
    claim = job.claim
    echoed = request.model_dump(include={"safety_identifier", "user", "metadata"}, exclude_none=True)
    tenant = request.tenant or request.safety_identifier or request.user
    return {
        "id": claim.job_id,
        "object": "list",
        "created": created,
        "model": context.settings.model_name,
        "data": Items(data),
        "usage": {"prompt_tokens": job.usage.prompt_tokens, "total_tokens": job.usage.prompt_tokens},
        "sluice": {
            "lane": claim.lane,
            "worker": context.settings.worker_name,
            "attempt": claim.attempt,
            "fingerprint": context.fingerprint,
            "timings": timings,
            **({"tenant": tenant} if tenant else {}),
            **echoed,
        },
    }
