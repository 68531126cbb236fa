"""Builds the parts of a worker around its loaded model."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from arq.worker import func

from worker.chat.context import WorkerContext
from worker.embed import EmbeddingContext, embed
from worker.engine.model.load import Model
from worker.engine.thread import EngineThread
from worker.engine.tokenizer import MLXTokenizer
from worker.host.watch import HostWatch
from worker.images.conversation import ImageInputs
from worker.jobs import chat, count
from worker.monitoring.sink import MetricsSink
from worker.queue.cron import Cron
from worker.queue.job.runner import JobFunctions
from worker.queue.presence import abilities
from worker.queue.redis_server import RedisServer
from worker.queue.worker import QueueWorker, ServedModel
from worker.settings import Settings
from worker.text.codec import TextCodec

if TYPE_CHECKING:
    from worker.engine.embedding import EmbeddingModel


@contextmanager
def image_inputs(settings: Settings, model: Model) -> Iterator[ImageInputs | None]:
    """Yield what prepares images, and close it after the block; None for a text model."""
    if model.vision is None:
        yield None
        return
    with closing(ImageInputs(settings, model.vision.image_processor)) as images:
        yield images


def worker_context(
    settings: Settings,
    engine: EngineThread[Model],
    model: Model,
    images: ImageInputs | None,
    metrics: MetricsSink,
    began: float | None = None,
) -> WorkerContext:
    """Return what the jobs use, once the model is loaded. `began`: monotonic seconds of the worker's start."""
    context_tokens = min(model.context, settings.context_tokens or model.context)
    tokenizer = MLXTokenizer(model.tokenizer, model.vision.image_processor.marker if model.vision else "")
    codec = TextCodec(
        tokenizer,
        model.vocab,
        boundaries=settings.prefix_cache_gb != 0 and _needs_boundaries(model),
        droppable=model.draft is not None,
        control_tokens=settings.allow_control_tokens,
        context=context_tokens,
        hold_calls=settings.tool_grammar,
    )
    return WorkerContext(
        settings=settings,
        engine=engine,
        codec=codec,
        images=images,
        fingerprint=model.fingerprint,
        context_tokens=context_tokens,
        vocab_size=model.vocab,
        generation=model.generation,
        end_tokens=tokenizer.eos_token_ids,
        metrics=metrics,
        loading=(time.monotonic() if began is None else began, time.monotonic()),
    )


def _needs_boundaries(model: Model) -> bool:
    return model.stateful or (model.draft is not None and model.draft.stateful)


def queue_worker(
    server: RedisServer,
    engine: EngineThread[Model],
    context: WorkerContext,
    crons: Sequence[Cron],
    host: HostWatch | None = None,
) -> QueueWorker:
    """Return the queue worker, which runs the jobs and the `crons`. `host`: see `ServedModel`."""
    known = abilities(
        context_tokens=context.context_tokens,
        max_output_tokens=context.settings.max_output_tokens,
        images=context.images is not None,
        tools=context.codec.parses_tools,
        reasoning=context.codec.parses_thoughts,
    )
    return QueueWorker(
        JobFunctions([func(chat, name="chat"), func(count, name="count")], {"context": context}, context.reader),
        server=server,
        settings=context.settings,
        metrics=context.metrics,
        model=ServedModel(engine.set_paused, [engine.heartbeat], known, engine.step_times, engine, host),
        crons=crons,
    )


def embedding_worker(
    server: RedisServer,
    engine: "EngineThread[EmbeddingModel]",
    model: "EmbeddingModel",
    settings: Settings,
    metrics: MetricsSink,
    crons: Sequence[Cron],
    host: HostWatch | None = None,
) -> QueueWorker:
    """Return the queue worker of an embedding model, which runs its jobs and the `crons`."""
    context = EmbeddingContext(
        settings, engine, model.tokenizer.encode, model.fingerprint, model.context, model.vocab, model.dimensions,
        metrics,
    )  # fmt: skip
    known = abilities(context_tokens=model.context) | {"embeddings": "yes"}
    settings = settings.model_copy(update={"affinity": False})  # no worker holds anything of an input
    return QueueWorker(
        JobFunctions([func(embed, name="embed")], {"context": context}, context.reader),
        server=server,
        settings=settings,
        metrics=metrics,
        model=ServedModel(engine.set_paused, [engine.heartbeat], known, host=host),
        crons=crons,
    )
