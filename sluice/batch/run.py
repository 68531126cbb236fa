"""Runs a file of requests to its end. Repeated, it resumes the run; after the end it returns the final status."""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError

from sluice.batch.dispatcher import LineDispatcher
from sluice.batch.files import ResultFiles, RunState, StateFile, take_back
from sluice.batch.pace import Pace
from sluice.batch.registry import BatchRegistry, JobStores, RedisOf
from sluice.batch.source import (
    DEFAULT_WINDOW,
    FileScan,
    Line,
    RunOptions,
    RunPaths,
    Source,
    parse_window,
    sorted_for_reuse,
)
from sluice.batch.transitions import RunAction, RunEvent, run_step
from sluice.contract.batch import NO_LINES, Batch, BatchState, Problem, Problems, RequestCounts
from sluice.errors import BatchRefused, describe_served
from sluice.presence import Workers
from sluice.transport import Retries
from sluice.wording import counted

logger = logging.getLogger("sluice.batch")


def _difference(saved: RunState, options: RunOptions, sha256: str) -> str | None:
    """Return how the saved run differs from the requested one, as a noun phrase; None if it can be resumed."""
    if saved.sha256 not in ("", sha256):
        return "another input"
    # Without a digest the file had not been read to its end, so no line was queued under another mapping.
    if saved.sha256 and options.models is not None and dict(options.models) != dict(saved.models):
        names = ", ".join(f"{name}={served}" for name, served in saved.models.items())
        return f"other models ({names or 'those named in the file'})"
    return None


def _can_be_replaced(saved: RunState, paths: RunPaths) -> bool:
    """Return True if the saved run has not ended and has no results, so that replacing it loses nothing."""
    return not saved.batch.ended and not _has_lines(paths)


def _refused(saved: RunState, paths: RunPaths, difference: str) -> BatchRefused:
    """Return the error for a run that cannot be resumed."""
    files = ", ".join(str(path) for path in (*paths.results, paths.state) if path.exists())
    if saved.batch.ended:
        status = saved.batch.status
        rest = f"has ended ({status}) and was started with {difference}: name another output, or remove {files}"
    else:
        rest = f"was started with {difference}: use the same to resume it, or name another output"
    return BatchRefused(f"{paths.output} is the output of {saved.batch.id}, which {rest}")


def _replaced(batch: Batch, difference: str, now: float) -> Batch:
    """Return the status of a run that another replaces."""
    problem = Problem(
        "replaced", f"It was started with {difference}, and was replaced by another run before a line was answered."
    )
    return replace(batch, errors=Problems((problem,))).enter("failed", now)


def _has_lines(paths: RunPaths) -> bool:
    return any(path.exists() and path.stat().st_size for path in paths.results)


Remedy = Callable[[Mapping[str, str]], str]  # describes how to map names in the file, or "*" for all, to served models


def describe_unserved(
    models: Mapping[str, int], served: Collection[str], mapped: Mapping[str, str], remedy: Remedy
) -> str | None:
    """Return a message about the models without a worker, with a remedy; None if all are served.

    `models`: number of lines by served name, `mapped`: the mapping that led to these names.
    """
    missing = sorted(model for model in models if model not in served)
    if not missing:
        return None
    listed, unlisted = missing[:5], len(missing[5:])
    missing_text = ", ".join(f"{model} ({counted(models[model], 'line')})" for model in listed)
    more = f" and {counted(unlisted, 'more model')}" if unlisted else ""
    name = next(iter(served)) if len(served) == 1 else "NAME"
    names = [source for model in listed for source in _sources(model, mapped)]
    advice = remedy(dict.fromkeys(names, name))
    return f"no worker serves {missing_text}{more}, and {describe_served(served)}. Start one, or {advice}"


def give_options(models: Mapping[str, str]) -> str:
    """Return the remedy for a run that is started by a command."""
    options = (f"--model {name}" if source == "*" else f"--map {source}={name}" for source, name in models.items())
    return f"send the lines to another model: {' '.join(options)}"


def set_mapping(models: Mapping[str, str]) -> str:
    """Return the remedy for a run in a worker's folder, which keeps the mapping that it was started with."""
    pairs = ",".join(f"{source}={name}" for source, name in models.items())
    return f"set {pairs} in the workers' SLUICE_BATCH_MODELS, cancel this run, and submit its file again"


def describe_unused(mapped: Mapping[str, str], named: Collection[str]) -> str | None:
    """Return a message about the names in the mapping that no line has; None if all occur."""
    names = [name for name in mapped if name != "*" and name not in named]
    if not names:
        return None
    maps = " ".join(f"--map {name}={mapped[name]}" for name in names[:5])
    unlisted = len(names[5:])
    more = f" and {unlisted:,} more" if unlisted else ""
    return f"{maps}{more}: no line of the file names this model"


def _sources(model: str, mapped: Mapping[str, str]) -> list[str]:
    """Return the names in the mapping that lead to `model`; `model` itself if there is none."""
    return [source for source, target in mapped.items() if target == model] or [model]


OnProgress = Callable[[Batch], None]

_EARLY_ENDINGS = {
    RunAction.EXPIRE_LINES: ("batch_expired", "The completion window ran out before this line was done."),
    RunAction.CANCEL_LINES: ("batch_cancelled", "The run was cancelled before this line was done."),
}


def _ignore(_: Batch) -> None:
    """Ignore the status."""


Held = Callable[[Batch], Awaitable[Collection[str]]]


async def _none(_: Batch) -> Collection[str]:
    """Let no model wait."""
    return ()


async def run_batch(
    redis: Redis,
    paths: RunPaths,
    options: RunOptions,
    on_progress: OnProgress = _ignore,
    redis_of: RedisOf | None = None,
) -> Batch:
    """Run a file to its end and return the final status. A cancelled run can be resumed.

    `on_progress` receives the status a few times a second. `redis_of`: the server of a model's jobs; by default
    `redis`, which has the status. Raises `BatchRefused` (`BatchTaken` if another process feeds
    the run), OSError if a file cannot be written, or redis-py's error if the server refuses a command.
    """
    with Source(paths.input, {}) as source:  # readable, before any file is created
        if not paths.state.exists():
            paths.refuse_to_overwrite()
        with StateFile(paths.state) as state:
            redis_of = redis_of or (lambda model: redis)
            await _check_options(redis, redis_of, paths, options, state, await asyncio.to_thread(source.sha256))
            return await _resume_or_start(redis, redis_of, paths, options, state, on_progress)


async def _check_options(
    redis: Redis, redis_of: RedisOf, paths: RunPaths, options: RunOptions, state: StateFile, sha256: str
) -> None:
    """Refuse the files of a different run, but replace one that has no results. Raises `BatchRefused`."""
    saved = state.load()
    if saved and saved.remote:
        raise BatchRefused(
            f"{paths.output} is the output of a run at {saved.remote}: give --url {saved.remote} to resume it, or name "
            "another output"
        )
    if saved is None or saved.batch.status == "failed" or not (different := _difference(saved, options, sha256)):
        return
    if not _can_be_replaced(saved, paths):
        raise _refused(saved, paths, different)
    logger.warning(
        "%s has no results, and was started with %s: it is replaced by %s", saved.batch.id, different, options.id
    )
    retries = endless_retries(redis)
    old = _replaced(saved.batch, different, time.time())
    await JobStores(redis_of, endless_retries).delete_run(old.id, old.sluice.models)
    state.save(replace(saved, batch=old))
    await publish(retries, BatchRegistry(redis).announce, old)


async def _resume_or_start(
    redis: Redis,
    redis_of: RedisOf,
    paths: RunPaths,
    options: RunOptions,
    state: StateFile,
    on_progress: OnProgress,
) -> Batch:
    saved = state.load()
    registry, retries = BatchRegistry(redis), endless_retries(redis)
    if saved and saved.batch.ended and saved.batch.status != "failed":
        await publish(retries, registry.announce_late, saved.batch)
        return saved.batch
    batch = await Run(redis, redis_of, paths, options, state, on_progress).run_to_end()
    if batch.status == "failed":  # refused, and no line was queued
        await publish(retries, registry.withdraw, batch)
        state.remove()
    else:
        await publish(retries, registry.announce, batch)
    return batch


def endless_retries(redis: Redis) -> Retries:
    """Return retries without an outage limit, which also wait for memory on a full server."""
    return Retries(redis, None, waits_for=(OutOfMemoryError,), log=logger)


async def publish(
    retries: Retries, method: Callable[[Batch], Awaitable[None]], batch: Batch, *, for_s: float = 60.0
) -> bool:
    """Send the status with a method of `BatchRegistry`. If that fails for `for_s` seconds, log it and return False.

    The files hold the result, so a server that is down or full must not block the end of a run.
    """
    try:
        await retries.run_for(lambda: method(batch), for_s)
    except (RedisError, OSError) as error:
        logger.error("%s is %s, but the server could not be informed: %s", batch.id, batch.status, error)
        return False
    return True


def new_batch(paths: RunPaths, options: RunOptions) -> Batch:
    """Return the status of a run that starts now."""
    batch = Batch(
        id=options.id,
        input_file_id=str(paths.input),
        completion_window=DEFAULT_WINDOW,
        status="validating",
        created_at=int(time.time()),
        request_counts=NO_LINES,
    )
    return _with_options(batch, paths, options)


def _with_options(batch: Batch, paths: RunPaths, options: RunOptions) -> Batch:
    """Return the status with the options applied: a resumed run may get more time, or have its files elsewhere."""
    window = options.completion_window or batch.completion_window
    expires_at = batch.expires_at
    if options.completion_window is not None or expires_at is None:
        expires_at = (batch.sluice.rerun_at or batch.created_at) + parse_window(window)
    return replace(
        batch,
        input_file_id=str(paths.input),
        output_file_id=str(paths.output),
        sluice=replace(
            batch.sluice,
            host=socket.gethostname(),
            tenant=options.tenant or batch.sluice.tenant,
            retry=batch.sluice.retry if options.retry is None else dict(options.retry),
            not_before=batch.sluice.not_before if options.not_before is None else int(options.not_before),
            priority=options.priority or batch.sluice.priority,
        ),
        completion_window=window,
        expires_at=expires_at,
        metadata=batch.metadata if options.metadata is None else dict(options.metadata),
    )


class Run:
    """One run whose state file this process has locked."""

    def __init__(
        self,
        redis: Redis,
        redis_of: RedisOf,
        paths: RunPaths,
        options: RunOptions,
        state: StateFile,
        on_progress: OnProgress = _ignore,
        held: Held = _none,
    ) -> None:
        """`held`: the models whose lines have to wait for those of other runs."""
        self._redis_of, self._held = redis_of, held
        self._paths = paths
        self._options = options
        self._state = state
        self._on_progress = on_progress
        self._retries = endless_retries(redis)
        self._registry, self._jobs = BatchRegistry(redis), JobStores(redis_of, endless_retries)
        self._saved = self._initial_state()
        self._counts: _LineCounts | None = None  # once the input has been read
        self._pace = Pace(options.hours)
        self._ends_at: int | None = None
        self._left: Mapping[str, int] = {}
        self._put_at = 0.0

    async def run_to_end(self) -> Batch:
        """Run to the end and return the final status, which the caller announces."""
        touching = asyncio.create_task(self._keep_touching())
        try:
            return await self._run()
        except asyncio.CancelledError:
            await self._report_pause()
            raise
        finally:
            touching.cancel()

    async def _run(self) -> Batch:
        batch = self._saved.batch
        # Over HTTP the endpoint was given before the file was read.
        url = batch.endpoint if batch.sluice.input_file is not None else None
        with Source(self._paths.input, self._saved.models, batch.sluice.allowed_models, url) as source:
            self._save(self._saved.batch)
            await publish(self._retries, self._registry.announce, self._saved.batch)
            scan = await asyncio.to_thread(source.scan)
            if self._saved.sha256 not in ("", scan.sha256):
                raise BatchRefused(f"{self._paths.input} is not the file that {self._saved.batch.id} was started with")
            batch = self._saved.batch
            endpoint = scan.endpoint.url if scan.endpoint else batch.endpoint
            self._saved = replace(self._saved, sha256=scan.sha256, batch=replace(batch, endpoint=endpoint))
            self._report_unused(scan)
            if problems := scan.listed_problems() or await self._check_served(scan):
                self.fail(problems)
            else:
                await self._take_back()
                with closing(await asyncio.to_thread(ResultFiles, self._paths.output, self._paths.errors)) as results:
                    await self._feed(source, scan.lines, results)
        return self._saved.batch

    async def _take_back(self) -> None:
        """Take back the lines that are to be run again. A run that stopped meanwhile does it once more."""
        if kinds := self._saved.rerun:
            await asyncio.to_thread(take_back, self._paths.output, self._paths.errors, kinds)
            self._saved = replace(self._saved, rerun=())
            self._save(self._saved.batch)

    def _report_unused(self, scan: FileScan) -> None:
        if (
            not self._options.models_from_setting
            and not scan.problems
            and (message := describe_unused(self._saved.models, scan.named_models))
        ):
            logger.warning("%s", message)

    async def _check_served(self, scan: FileScan) -> tuple[Problem, ...]:
        """Return a problem if the file is to be refused for a model without a worker; otherwise only log a warning."""
        served = set[str]()
        for redis in {self._redis_of(line.model) for line in scan.lines}:
            served |= await Workers(redis, endless_retries(redis), waits_out_outages=True).models()
        mapped = {name: to for name, to in self._saved.models.items() if name == "*" or name in scan.named_models}
        remedy = set_mapping if self._options.models_from_setting else give_options
        message = describe_unserved(Counter(line.model for line in scan.lines), served, mapped, remedy)
        if message and served and self._options.served_only and self._saved.batch.status == "validating":
            return (Problem("unserved_model", f"{message}."),)
        if message:
            logger.warning("%s. Until then the lines wait", message)
        return ()

    async def _keep_touching(self) -> None:
        """Touch the status every two seconds until cancelled. Reading a large file, or waiting for a full server, takes
        longer than the ten seconds after which a run counts as paused."""
        while True:
            await asyncio.sleep(2.0)
            with suppress(RedisError, OSError):
                await self._registry.touch(self._saved.batch.id)

    async def _report_pause(self) -> None:
        """Mark the run as paused, if the server answers; otherwise readers notice after ten seconds."""
        with suppress(RedisError, OSError):
            async with asyncio.timeout(1.0):  # the run is interrupted
                await self._registry.put(self._status().paused(time.time()))

    def fail(self, problems: Sequence[Problem]) -> Batch:
        """Save the run as failed, and return its status. For a run that queued no line, or cannot be resumed."""
        output = str(self._paths.output) if self._paths.output.exists() else None
        batch = replace(self._saved.batch, errors=Problems(tuple(problems)), output_file_id=output)
        self._save(batch.enter(run_step(batch.status, RunEvent.REFUSED)[0], time.time()))
        return self._saved.batch

    def _initial_state(self) -> RunState:
        """Return the saved state with the options applied, or a new one. Raises `BatchRefused`."""
        saved, models = self._state.load(), self._options.models
        if saved is None or saved.batch.status == "failed":
            self._paths.refuse_to_overwrite()
            return RunState(new_batch(self._paths, self._options), "", models or {})
        batch = _with_options(saved.batch, self._paths, self._options)
        if self._options.models_from_setting and not saved.sha256:  # handed over, and begins now
            expires_at = int(time.time()) + parse_window(batch.completion_window)
            batch = replace(batch, expires_at=expires_at)
            models = saved.models if "*" in saved.models else {**(models or {}), **saved.models}
        return replace(saved, batch=batch, models=saved.models if models is None else models)

    async def _feed(self, source: Source, lines: list[Line], results: ResultFiles) -> None:
        batch = self._saved.batch
        unfinished = sorted_for_reuse([line for line in lines if line.digest not in results.done])
        dispatcher = LineDispatcher(batch, source, unfinished, self._jobs, results, self._options.window)
        models = Counter(line.model for line in lines)
        since = batch.sluice.rerun_at or batch.in_progress_at or time.time()
        self._counts = _LineCounts(results, models, since - self._saved.earlier_s)
        state, action = run_step(batch.status, RunEvent.ACCEPTED)
        while action is not RunAction.END:
            await self._announce(self._in_state(state))
            state, action = run_step(state, await self._perform(action, dispatcher))
        self._save(self._in_state(state))

    async def _perform(self, action: RunAction, dispatcher: LineDispatcher) -> RunEvent:
        if action is RunAction.FEED:
            event = await self._until_event(dispatcher)
            self._ends_at = None
            self._left = {}
            return event
        await dispatcher.end(*_EARLY_ENDINGS[action])
        return RunEvent.LINES_CLOSED

    async def _until_event(self, dispatcher: LineDispatcher) -> RunEvent:
        expires_at = self._saved.batch.expires_at
        while not dispatcher.done:
            if await self._is_cancel_requested():
                return RunEvent.CANCEL_REQUESTED
            if expires_at and time.time() >= expires_at:
                return RunEvent.WINDOW_OVER
            wait_s = await dispatcher.step(await self._held(self._saved.batch))
            now, self._left = time.time(), dispatcher.left()
            self._pace.add(now, self._left)
            self._ends_at = self._pace.end(now, self._left)
            await self._report(self._status())
            await asyncio.sleep(wait_s)
        return RunEvent.LINES_DONE

    def _status(self) -> Batch:
        """Return the saved status with the present counts."""
        batch = self._saved.batch
        return self._counts.added_to(batch, self._ends_at, self._left) if self._counts else batch

    def _in_state(self, state: BatchState) -> Batch:
        """Return the present status in this state. The time at which a state was entered is kept on resuming."""
        batch = self._status()
        return batch if batch.status == state else batch.enter(state, time.time())

    async def _is_cancel_requested(self) -> bool:
        batch_id = self._saved.batch.id
        return bool(await self._retries.run_until_answered(lambda: self._registry.is_cancel_requested(batch_id)))

    async def _report(self, batch: Batch) -> None:
        self._on_progress(batch)
        if time.monotonic() - self._put_at >= 1.0:
            with suppress(RedisError, OSError):  # the next report follows within a second
                await self._retries.run_for(lambda: self._registry.put(batch), 0.0)
            self._put_at = time.monotonic()

    async def _announce(self, batch: Batch) -> None:
        self._save(batch)
        self._on_progress(batch)
        await publish(self._retries, self._registry.announce, batch)

    def _save(self, batch: Batch) -> None:
        self._saved = replace(self._saved, batch=batch)
        self._state.save(self._saved)


@dataclass(frozen=True, slots=True)
class _LineCounts:
    """Counts of a run's lines, for its status."""

    results: ResultFiles
    models: Counter[str]  # number of lines by served model
    since: float  # when the first line was queued, in Unix seconds; later by the time between the end and a rerun

    def added_to(self, batch: Batch, ends_at: int | None, left: Mapping[str, int]) -> Batch:
        """Return the status with the present counts. `left`: unfinished lines by model."""
        counts = self.results.counts
        return replace(
            batch,
            model=next(iter(self.models)) if len(self.models) == 1 else None,
            error_file_id=str(self.results.errors_path) if self.results.errors_path else None,
            request_counts=RequestCounts(self.models.total(), counts.completed, counts.failures.total()),
            usage=counts.usage,
            sluice=replace(
                batch.sluice,
                seconds=round(time.time() - self.since, 3),
                models=dict(self.models),
                retried=counts.retried,
                failures=dict(counts.failures),
                cut_off=counts.cut_off,
                paused_at=None,
                kinds=counts.kinds,
                slowest=counts.slowest,
                estimated_end_at=ends_at,
                left={model: lines for model, lines in left.items() if lines},
            ),
        )
