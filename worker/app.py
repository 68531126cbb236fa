"""Starts the worker, and shuts it down.

Most of a start is the import of mlx-lm. So it runs on a thread from the beginning, and what the jobs need is imported
while the model loads. `tests/end_to_end/test_imports_at_start.py` holds what may be imported before the first claim."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sluice.log_lines import set_up_logging
from sluice.service_status import serving
from sluice.tracing import Tracing, TracingError, open_tracing
from worker.environment import opentelemetry_variables
from worker.errors import CannotStart
from worker.host.watch import HostWatch
from worker.monitoring.health import Health
from worker.monitoring.sink import MetricsSink
from worker.process.daemon import (
    EXIT_FORCED,
    ExitTimer,
    collect_on_a_timer,
    default_signals,
    execute_again,
    pause_collections,
    resume_collections,
)
from worker.queue.presence import check_name_early
from worker.queue.redis_server import RedisServer, redis_from_settings
from worker.settings import Settings

if TYPE_CHECKING:
    from worker.batch_dir import BatchDirectory
    from worker.chat.context import WorkerContext
    from worker.chat.warm import WarmBody, Warmed
    from worker.engine.embedding import EmbeddingModel
    from worker.engine.model.load import Model, OnLoaded
    from worker.engine.thread import EngineThread
    from worker.queue.worker import QueueWorker

logger = logging.getLogger("sluice")

M = TypeVar("M")

EXIT_ENGINE_DIED = 3

# After the last job has ended: the results of remaining threads are no longer needed.
_THREADS_S = 1.0


async def serve_jobs(settings: Settings, on_loaded: "OnLoaded | None" = None) -> None:
    """Serve until SIGTERM or SIGINT; then the process ends, even if a thread does not. If it is asked to restart, it
    executes itself again instead. Raises `CannotStart`."""
    began = time.monotonic()
    health, ending = Health(settings.watchdog_s), ExitTimer()
    model, port = settings.model_name, settings.metrics_port
    with (
        ending.after_error(_THREADS_S),
        _tracing(settings) as tracing,
        served_metrics(model, port, health, tracing) as metrics,
    ):
        batches = _batch_directory(settings)
        engine_imported = asyncio.create_task(_import("worker.engine.thread"))
        async with redis_from_settings(settings) as redis:
            server = RedisServer(redis, settings)
            await server.check_early()
            await engine_imported
            if await _embeds(settings):
                worker = await _serve_embeddings(settings, server, batches, metrics, health, ending, on_loaded)
            else:
                worker = await _serve(settings, server, batches, metrics, health, ending, began, on_loaded)
    if worker.restarts:
        default_signals()
        await asyncio.sleep(0.01)  # for the handlers of earlier signals: such a process does not come back
        if worker.restarts:
            execute_again()
    # Without it Python would wait for threads in native code: asyncio for its own, then the interpreter for all.
    ending.exit_after(_THREADS_S, 0)


async def _import(module: str) -> None:
    """Import a module on a thread of its own, because a thread can clear its streams only once."""
    thread = ThreadPoolExecutor(1, "import")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, _import_on_thread, module)
    finally:
        thread.shutdown(wait=False)


def _import_on_thread(module: str) -> None:
    import_module(module)
    from worker.engine.upstream.streams import clear_streams

    clear_streams()


def _batch_directory(settings: Settings) -> "BatchDirectory | None":
    """Return the folder of offline batches, if one is set. Raises `CannotStart`."""
    if settings.batch_dir is None:
        return None
    from worker.batch_dir import BatchDirectory

    return BatchDirectory(settings.batch_dir, settings)


async def _serve(
    settings: Settings,
    server: RedisServer,
    batches: "BatchDirectory | None",
    metrics: MetricsSink,
    health: Health,
    ending: ExitTimer,
    began: float,
    on_loaded: "OnLoaded | None",
) -> "QueueWorker":
    to_warm = _to_warm(settings)
    engine = _engine(settings, metrics, on_loaded)
    logger.info("loading %s", settings.model)
    async with _loaded(engine, ending, check_name_early(server.client, settings)) as model:
        from worker import parts

        with parts.image_inputs(settings, model) as images:
            context = parts.worker_context(settings, engine, model, images, metrics, began)
            await context.codec.prepare()
            host = HostWatch(settings, metrics, engine.set_throttle)
            worker = parts.queue_worker(server, engine, context, [batches.cron] if batches else [], host)
            if await _is_connected(worker, engine, settings, model.fingerprint, health, ending):
                async with _warming(engine, context, to_warm):
                    await _work(worker, batches, ending)
    logger.info("stopped")
    return worker


async def _is_connected(
    worker: "QueueWorker",
    engine: "EngineThread[Any]",
    settings: Settings,
    fingerprint: str,
    health: Health,
    ending: ExitTimer,
) -> bool:
    """Let the worker wait for Redis, and log that it serves. Returns False if it is stopped first."""
    health.set_checks({"event loop": worker.heartbeat, "engine": engine.heartbeat}, worker.readiness.parts())
    # Jobs are requeued within milliseconds if Redis answers and the event loop is not blocked.
    ending.when(worker.force_stop, limit_s=2.0, code=EXIT_FORCED)
    resume_collections()
    if not await worker.connect():
        return False
    logger.info(
        "%s serves %s (%s), %d row%s",
        settings.worker_name, settings.model_name, fingerprint, settings.max_rows, "s" * (settings.max_rows != 1),
    )  # fmt: skip
    return True


async def _embeds(settings: Settings) -> bool:
    """Return True if the worker's model is an embedding model. Of a model on the hub, only what describes it is
    downloaded. Raises `CannotStart`."""
    from worker.engine.checkpoint import embeds
    from worker.engine.model.load import model_folder

    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        name, described = f"SLUICE_MODEL={settings.model}", ["*.json"]
        folder = await asyncio.to_thread(model_folder, settings.model, name=name, only=described)
    return embeds(folder, settings.model)


async def _serve_embeddings(
    settings: Settings,
    server: RedisServer,
    batches: "BatchDirectory | None",
    metrics: MetricsSink,
    health: Health,
    ending: ExitTimer,
    on_loaded: "OnLoaded | None",
) -> "QueueWorker":
    from worker.engine.device import memory_for_model
    from worker.engine.embedding import EmbeddingEngine
    from worker.engine.thread import EngineThread

    if settings.prefix_warm is not None:
        raise CannotStart(
            f"SLUICE_PREFIX_WARM: {settings.model} is an embedding model, without prefixes; leave it out."
        )
    memory = memory_for_model(settings.memory_gb, settings.memory_headroom_gb)
    engine = EngineThread(
        partial(_open_embeddings, settings, memory, on_loaded),
        settings.engine_options(memory),
        on_failure=_die,
        on_step=metrics.record_step,
        engine_of=partial(EmbeddingEngine, memory=memory),
    )
    logger.info("loading %s, an embedding model", settings.model)
    async with _loaded(engine, ending, check_name_early(server.client, settings)) as model:
        from worker import parts

        crons, host = [batches.cron] if batches else [], HostWatch(settings, metrics, engine.set_throttle)
        worker = parts.embedding_worker(server, engine, model, settings, metrics, crons, host)
        if await _is_connected(worker, engine, settings, model.fingerprint, health, ending):
            await _work(worker, batches, ending)
    logger.info("stopped")
    return worker


def _open_embeddings(settings: Settings, memory: int, on_loaded: "OnLoaded | None") -> "EmbeddingModel":
    from worker.engine.device import set_kernel_folder, set_memory_limits
    from worker.engine.embedding import open_embedding_model

    set_memory_limits(memory)
    set_kernel_folder()
    context, trusted = settings.context_tokens, settings.trust_model_code
    return open_embedding_model(settings.model, memory=memory, context=context, trusted=trusted, on_loaded=on_loaded)


def _to_warm(settings: Settings) -> "list[WarmBody]":
    """Return the requests whose prompts are computed at the start. Raises `CannotStart`."""
    if settings.prefix_warm is None:
        return []
    from worker.chat.warm import BadWarmFile, read_conversations

    try:
        return read_conversations(settings.prefix_warm)
    except BadWarmFile as error:
        raise CannotStart(f"SLUICE_PREFIX_WARM={settings.prefix_warm}: {error}") from None


@asynccontextmanager
async def _warming(
    engine: "EngineThread[Model]", context: "WorkerContext", bodies: "list[WarmBody]"
) -> AsyncIterator[None]:
    """Compute these prompts beside the block, until it ends."""
    if not bodies:
        yield
        return
    from worker.chat.warm import warm_and_log

    task = asyncio.create_task(warm_and_log(context, engine.store_prefix, bodies))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def warm_prefixes(settings: Settings, report: "Callable[[Warmed], object]") -> None:
    """Compute the prompts of the file `prefix_warm` and write them to disk, without a queue. `report` receives each
    result. Raises `CannotStart`."""
    ending, sink = ExitTimer(), MetricsSink()
    to_warm = _to_warm(settings)
    engine = _engine(settings, sink)
    async with _loaded(engine, ending) as model:
        from worker import parts
        from worker.chat.warm import warm_prompts

        context = parts.worker_context(settings, engine, model, None, sink)
        await context.codec.prepare()
        async for result in warm_prompts(context, engine.store_prefix, to_warm):
            report(result)


def _engine(settings: Settings, metrics: MetricsSink, on_loaded: "OnLoaded | None" = None) -> "EngineThread[Model]":
    from worker.engine.device import memory_for_model
    from worker.engine.thread import EngineThread

    memory = memory_for_model(settings.memory_gb, settings.memory_headroom_gb)
    return EngineThread(
        partial(_open, settings, memory, on_loaded),
        settings.engine_options(memory),
        on_failure=_die,
        on_step=metrics.record_step,
    )


@asynccontextmanager
async def _loaded(
    engine: "EngineThread[M]", ending: ExitTimer, *meanwhile: Coroutine[Any, Any, None]
) -> AsyncIterator[M]:
    """Load the model, importing what its jobs need meanwhile, and stop the engine after the block. After an error the
    time for that is limited."""
    try:
        with ending.after_error(limit_s=3.0):  # for the engine's thread to end its step and release its memory
            model, *_ = await asyncio.gather(engine.start(), _import("worker.parts"), *meanwhile)
            yield model
    finally:
        await engine.stop()


async def _work(worker: "QueueWorker", batches: "BatchDirectory | None", ending: ExitTimer) -> None:
    """Run jobs, and the feeders of the batch folder, until both have ended."""
    stopping, force_stop = worker.stopping, worker.force_stop
    async with serving(), collect_on_a_timer(), asyncio.TaskGroup() as group:
        if batches:
            group.create_task(batches.run(stopping, force_stop))
        await worker.main()
        # No job is left to requeue, but the feeder and the engine may still need time to end.
        ending.when(force_stop, _THREADS_S, 0)


def _open(settings: Settings, memory: int, on_loaded: "OnLoaded | None" = None) -> "Model":
    from worker.engine.device import set_kernel_folder, set_memory_limits
    from worker.engine.model.load import not_served, open_model, why_too_large

    set_memory_limits(memory)
    set_kernel_folder()
    vision, trusted = settings.vision == "auto", settings.trust_model_code
    model = open_model(settings.model, memory=memory, vision=vision, trusted=trusted, on_loaded=on_loaded)
    if settings.specprefill_draft_model is not None:
        from worker.engine.prefill.scoring import with_draft

        model = with_draft(model, settings.specprefill_draft_model, on_loaded)
    if settings.speculation == "auto":
        model = _with_drafts(model, settings, memory, on_loaded)
    if reason := why_too_large(model.costs, memory):  # as measured, and with draft models
        raise not_served(settings.model, [reason])
    return model


def _with_drafts(model: "Model", settings: Settings, memory: int, on_loaded: "OnLoaded | None") -> "Model":
    """Return the model with the networks that draft its answers: an MTP head, if there is one that fits or a setting
    names one, and a draft model."""
    from worker.engine.model.drafter import with_drafter, with_head
    from worker.engine.model.load import why_too_large

    headed = with_head(model, settings.model, settings.mtp_model, on_loaded)
    if settings.mtp_model is None and not why_too_large(model.costs, memory) and why_too_large(headed.costs, memory):
        logger.warning("the model's MTP head is not used: the model fits into memory only without it")
        headed = model
    if settings.draft_model is None:
        return headed
    return with_drafter(headed, settings.draft_model, settings.specprefill_draft_model, on_loaded)


@contextmanager
def _tracing(settings: Settings) -> Iterator[Tracing | None]:
    """Make spans of the jobs while the block runs, if OpenTelemetry's variables ask for them. Raises `CannotStart`."""
    try:
        tracing = open_tracing("sluice-worker", settings.worker_name, opentelemetry_variables(Settings))
    except TracingError as error:
        raise CannotStart(str(error)) from None
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


@contextmanager
def served_metrics(
    model_name: str, port: int | None, health: Health, tracing: Tracing | None = None
) -> Iterator[MetricsSink]:
    """Count metrics, and serve them and the probes at the port while the block runs. Without a port, count only what
    presence publishes. Raises `CannotStart` if the port cannot be opened."""
    if port is None:
        yield MetricsSink(tracing)
        return
    from worker.monitoring.metrics import Metrics
    from worker.monitoring.probes import answer_probes

    metrics = Metrics(model_name, tracing)
    with answer_probes(port, metrics.registry, health):
        yield metrics


def _die() -> None:
    """End the process: without its engine a worker is useless, and others take its jobs when the leases expire."""
    os._exit(EXIT_ENGINE_DIED)


def run_worker(settings: Settings, on_loaded: "OnLoaded | None" = None) -> None:
    """Serve until the worker is stopped. `on_loaded` receives the bytes of each part of the weights, on another thread.
    Blocks. Raises `CannotStart`."""
    names = {"worker": settings.worker_name, "model": settings.model_name}
    set_up_logging("sluice", settings.log_level, settings.log_format, **names)
    pause_collections()
    asyncio.run(serve_jobs(settings, on_loaded))
