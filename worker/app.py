"""Builds the worker, starts it, and shuts it down."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial

from arq.worker import func

from worker.batch_dir.directory import BatchDirectory
from worker.chat.context import WorkerContext
from worker.chat.images import ImageInputs
from worker.engine.device import memory_for_model
from worker.engine.model.load import Model, open_model
from worker.engine.prefill.draft import with_draft
from worker.engine.thread import EngineThread
from worker.engine.tokenizer import MLXTokenizer
from worker.jobs import chat
from worker.monitoring.health import Health
from worker.monitoring.metrics import Metrics
from worker.monitoring.probes import answer_probes
from worker.process.exit_timer import EXIT_FORCED, ExitTimer
from worker.process.garbage import collect_on_a_timer
from worker.process.log_lines import set_up_logging
from worker.queue.job.functions import JobFunctions
from worker.queue.server.connection import connect
from worker.queue.server.redis_server import RedisServer
from worker.queue.worker import QueueWorker, ServedModel
from worker.settings import Settings
from worker.text.codec import TextCodec

logger = logging.getLogger("sluice")

EXIT_ENGINE_DIED = 3

# After a second signal: jobs are requeued within milliseconds if Redis answers and the event loop is not blocked.
_FORCED_STOP_S = 2.0
# After the last job has ended: the results of remaining threads are no longer needed.
_THREADS_S = 1.0
# After an error: time for the engine's thread to end its step and release its memory.
_ENGINE_S = 3.0


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then the process ends, even if a thread does not. Raises `CannotStart`."""
    metrics = Metrics(settings.model_name)
    health = Health(settings.watchdog_s)
    ending = ExitTimer()
    with ending.after_error(_THREADS_S), answer_probes(settings.metrics_port, metrics.registry, health):
        async with connect(settings) as redis:
            await _serve(settings, RedisServer(redis, settings), metrics, health, ending)
    # Without it Python would wait for threads in native code: asyncio for its own, then the interpreter for all.
    ending.exit_after(_THREADS_S, 0)


async def _serve(settings: Settings, server: RedisServer, metrics: Metrics, health: Health, ending: ExitTimer) -> None:
    batches = BatchDirectory(settings.batch_dir, settings) if settings.batch_dir else None
    await server.check_early()
    engine = EngineThread(
        partial(_open, settings),
        step_s=settings.step_ms / 1000,
        rows=settings.max_rows,
        memory=memory_for_model(settings.memory_gb, settings.memory_headroom_gb),
        prefix_bytes=None if settings.prefix_cache_gb is None else int(settings.prefix_cache_gb * 1e9),
        on_failure=_die,
        on_step=metrics.record_step,
    )
    logger.info("loading %s", settings.model)
    async with _loaded(engine, ending) as model:
        with _image_inputs(settings, model) as images:
            context = _worker_context(settings, engine, model, images, metrics)
            await context.codec.try_template()
            worker = _queue_worker(server, engine, context, batches)
            health.set_checks({"event loop": worker.heartbeat, "engine": engine.heartbeat}, worker.readiness.parts())
            ending.when(worker.shutdown.force_stop, _FORCED_STOP_S, EXIT_FORCED)
            if await worker.connect():
                logger.info(
                    "%s serves %s (%s), %d row%s",
                    settings.worker_name, settings.model_name, model.fingerprint, settings.max_rows,
                    "s" * (settings.max_rows != 1),
                )  # fmt: skip
                await _work(worker, batches, ending)
    logger.info("stopped")


@asynccontextmanager
async def _loaded(engine: EngineThread, ending: ExitTimer) -> AsyncIterator[Model]:
    """Load the model, and stop the engine after the block. After an error the time for that is limited."""
    try:
        with ending.after_error(_ENGINE_S):
            yield await engine.start()
    finally:
        await engine.stop()


@contextmanager
def _image_inputs(settings: Settings, model: Model) -> Iterator[ImageInputs | None]:
    if model.vision is None:
        yield None
        return
    with closing(ImageInputs(settings, model.vision.image_processor)) as images:
        yield images


def _worker_context(
    settings: Settings, engine: EngineThread, model: Model, images: ImageInputs | None, metrics: Metrics
) -> WorkerContext:
    context_tokens = min(model.context, settings.context_tokens or model.context)
    codec = TextCodec(
        MLXTokenizer(model.tokenizer, model.vision.image_processor.marker if model.vision else ""),
        model.vocab,
        boundaries=settings.prefix_cache_gb != 0 and _needs_boundaries(model),
        droppable=model.draft is not None,
        control_tokens=settings.allow_control_tokens,
        context=context_tokens,
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
        metrics=metrics,
    )


def _queue_worker(
    server: RedisServer, engine: EngineThread, context: WorkerContext, batches: BatchDirectory | None
) -> QueueWorker:
    return QueueWorker(
        JobFunctions([func(chat, name="chat")], {"context": context}, context.reader),
        server=server,
        settings=context.settings,
        metrics=context.metrics,
        model=ServedModel(engine.set_paused, [engine.heartbeat], images=context.images is not None),
        crons=[batches.cron] if batches else [],
    )


async def _work(worker: QueueWorker, batches: BatchDirectory | None, ending: ExitTimer) -> None:
    """Run jobs, and the feeders of the batch folder, until both have ended."""
    stopping, force_stop = worker.shutdown.stopping, worker.shutdown.force_stop
    async with collect_on_a_timer(), asyncio.TaskGroup() as group:
        if batches:
            group.create_task(batches.run(stopping, force_stop))
        await worker.main()
        # No job is left to requeue, but the feeder and the engine may still need time to end.
        ending.when(force_stop, _THREADS_S, 0)


def _needs_boundaries(model: Model) -> bool:
    return model.stateful or (model.draft is not None and model.draft.stateful)


def _open(settings: Settings) -> Model:
    model = open_model(settings.model, vision=settings.vision == "auto", trusted=settings.trust_model_code)
    draft = settings.specprefill_draft_model
    return with_draft(model, draft) if draft else model


def _die() -> None:
    """End the process: without its engine a worker is useless, and others take its jobs when the leases expire."""
    os._exit(EXIT_ENGINE_DIED)


def run(settings: Settings) -> None:
    """Serve until the worker is stopped. Blocks. Raises `CannotStart`."""
    set_up_logging(settings.log_level)
    asyncio.run(serve(settings))
