"""An offline run, from its file to its last line. Run again, it goes on; after its end it only says how it ended."""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError

from sluice.batch import rerun
from sluice.batch.dispatcher import LineDispatcher
from sluice.batch.files import ResultFiles
from sluice.batch.job_store import JobStore
from sluice.batch.options import DEFAULT_WINDOW, RunOptions, RunPaths, parse_window
from sluice.batch.registry import BatchRegistry
from sluice.batch.served import unserved, unused
from sluice.batch.source import Line, Scan, Source, sorted_for_reuse
from sluice.batch.state import RunState, StateFile
from sluice.batch.status import Batch, BatchDetails, Problem, Problems, RequestCounts, State
from sluice.errors import BatchRefused
from sluice.presence import Workers
from sluice.transport.retries import Retries

logger = logging.getLogger("sluice.batch")

Told = Callable[[Batch], None]

_PUT_S = 1.0
_TOUCH_S = 2.0
_TELL_S = 60.0
_LEAVE_S = 1.0  # that a run which is left waits for the server

_EARLY = {
    "expired": ("batch_expired", "The completion window ran out before this line was done."),
    "cancelled": ("batch_cancelled", "The run was cancelled before this line was done."),
}


def _nobody(_: Batch) -> None:
    """Ignore the status."""


async def run(redis: Redis, place: RunPaths, wish: RunOptions, told: Told = _nobody) -> Batch:
    """Run a file to its end. Raises `BatchRefused`, or OSError if a file cannot be written. Can be resumed after
    cancellation.

    `told` receives the status, a few times a second.
    """
    with Source(place.input, {}) as source:  # before a file is made for the run
        if not place.state.exists():
            place.refuse_to_overwrite()
        with StateFile(place.state) as state:
            await _check_wish(redis, place, wish, state, await asyncio.to_thread(source.sha256))
            return await _to_its_end(redis, place, wish, state, told)


async def _check_wish(redis: Redis, place: RunPaths, wish: RunOptions, state: StateFile, sha256: str) -> None:
    """Refuse files of another run, unless it has done nothing: then it makes room."""
    saved = state.load()
    if saved is None or saved.batch.status == "failed" or not (different := rerun.difference(saved, wish, sha256)):
        return
    if not rerun.may_begin_anew(saved, place):
        raise rerun.refused(saved, place, different)
    logger.warning(
        "%s had answered nothing, and was begun with %s: it is replaced by %s", saved.batch.id, different, wish.id
    )
    retries, old = patient(redis), rerun.replaced(saved.batch, different, time.time())
    await JobStore(redis, retries).withdraw(old.id, old.sluice.models)
    state.save(replace(saved, batch=old))
    await tell(retries, BatchRegistry(redis).announce, old)


async def _to_its_end(redis: Redis, place: RunPaths, wish: RunOptions, state: StateFile, told: Told) -> Batch:
    saved, board, retries = state.load(), BatchRegistry(redis), patient(redis)
    if saved and saved.batch.ended and saved.batch.status != "failed":
        await tell(retries, board.announce_late, saved.batch)
        return saved.batch
    batch = await Run(redis, place, wish, state, told).go()
    if batch.status == "failed":  # refused before a line of it was queued
        await tell(retries, board.withdraw, batch)
        state.remove()
    else:
        await tell(retries, board.announce, batch)
    return batch


def patient(redis: Redis) -> Retries:
    """Return retries without an outage limit, which also wait for memory on a full server."""
    return Retries(redis, None, waits_for=(OutOfMemoryError,), log=logger)


async def tell(retries: Retries, how: Callable[[Batch], Awaitable[None]], batch: Batch) -> None:
    """The files say it too, so a server that stays away, or is full, keeps no run from its end."""
    try:
        await retries.run_for(lambda: how(batch), _TELL_S)
    except (RedisError, OSError) as error:
        logger.error("%s is %s, and the server could not be told: %s", batch.id, batch.status, error)


def new_batch(place: RunPaths, wish: RunOptions) -> Batch:
    """Return the status of a run that starts now."""
    batch = Batch(
        id=wish.id,
        input_file_id=str(place.input),
        completion_window=DEFAULT_WINDOW,
        status="validating",
        created_at=int(time.time()),
    )
    return _as_wished(batch, place, wish)


def _as_wished(batch: Batch, place: RunPaths, wish: RunOptions) -> Batch:
    """A run may be given more time when it is gone on with, and elsewhere, if its files have moved."""
    given = wish.completion_window or batch.completion_window
    return replace(
        batch,
        input_file_id=str(place.input),
        output_file_id=str(place.output),
        sluice=replace(batch.sluice, host=socket.gethostname()),
        completion_window=given,
        expires_at=batch.created_at + parse_window(given),
        metadata=batch.metadata if wish.metadata is None else dict(wish.metadata),
    )


class Run:
    """One run whose state file this process has locked."""

    def __init__(self, redis: Redis, place: RunPaths, wish: RunOptions, state: StateFile, told: Told = _nobody) -> None:
        self._redis, self._place, self._wish, self._state, self._told = redis, place, wish, state, told
        self._retries = patient(redis)
        self._board, self._children = BatchRegistry(redis), JobStore(redis, self._retries)
        self._saved = self._begun()
        self._now: Callable[[], Batch] = lambda: self._saved.batch
        self._put_at = 0.0

    async def go(self) -> Batch:
        """Run to the end and return the final status, which the caller announces."""
        keeping = asyncio.create_task(self._keep_touched())
        try:
            return await self._go()
        except asyncio.CancelledError:
            await self._tell_pause()
            raise
        finally:
            keeping.cancel()

    async def _go(self) -> Batch:
        with Source(self._place.input, self._saved.models) as source:
            self._save(self._saved.batch)
            await tell(self._retries, self._board.announce, self._saved.batch)
            scan = await asyncio.to_thread(source.scan)
            if self._saved.sha256 not in ("", scan.sha256):
                raise BatchRefused(f"{self._place.input} is not the file that {self._saved.batch.id} began with")
            self._saved = replace(self._saved, sha256=scan.sha256)
            self._report_unused(scan)
            if problems := scan.named() or await self._unserved(scan):
                self.fail(problems)
            else:
                with closing(await asyncio.to_thread(ResultFiles, self._place.output, self._place.errors)) as answers:
                    await self._feed(source, scan.lines, answers)
        return self._saved.batch

    def _report_unused(self, scan: Scan) -> None:
        if self._wish.names_expected and not scan.problems and (said := unused(self._saved.models, scan.asked)):
            logger.warning("%s", said)

    async def _unserved(self, scan: Scan) -> tuple[Problem, ...]:
        """Why the file is refused for a model that nobody serves; what is not refused is told before it is queued."""
        served = await Workers(self._redis, self._retries, waits_out_outages=True).models()
        mapped = {name: to for name, to in self._saved.models.items() if name == "*" or name in scan.asked}
        said = unserved(Counter(line.model for line in scan.lines), served, mapped)
        if said and served and self._wish.served_only and self._saved.batch.status == "validating":
            return (Problem("unserved_model", f"{said}."),)
        if said:
            logger.warning("%s. Until then they wait", said)
        return ()

    async def _keep_touched(self) -> None:
        """Until it is cancelled. Reading a large file, and waiting for room, take longer than a run may be silent."""
        while True:
            await asyncio.sleep(_TOUCH_S)
            with suppress(RedisError, OSError):
                await self._board.touch(self._saved.batch.id)

    async def _tell_pause(self) -> None:
        """If it is not told, the server finds out by itself."""
        with suppress(RedisError, OSError):
            async with asyncio.timeout(_LEAVE_S):
                await self._board.put(self._now().paused(time.time()))

    def fail(self, problems: Sequence[Problem]) -> Batch:
        """Fail the run before its first line, or if it cannot be resumed."""
        output = str(self._place.output) if self._place.output.exists() else None
        batch = replace(self._saved.batch, errors=Problems(tuple(problems)), output_file_id=output)
        self._save(batch.enter("failed", time.time()))
        return self._saved.batch

    def _begun(self) -> RunState:
        """As it was left, or new."""
        saved, models = self._state.load(), self._wish.models
        if saved is None or saved.batch.status == "failed":
            self._place.refuse_to_overwrite()
            return RunState(new_batch(self._place, self._wish), "", models or {})
        batch = _as_wished(saved.batch, self._place, self._wish)
        return RunState(batch, saved.sha256, saved.models if models is None else models)

    async def _feed(self, source: Source, lines: list[Line], answers: ResultFiles) -> None:
        left = sorted_for_reuse([line for line in lines if line.digest not in answers.done])
        feeder = LineDispatcher(self._saved.batch.id, source, left, self._children, answers, self._wish.window)
        since = self._saved.batch.in_progress_at or time.time()
        models = Counter(line.model for line in lines)

        def now(state: State | None = None) -> Batch:
            batch = self._saved.batch if state is None else self._saved.batch.enter(state, time.time())
            return _counted(batch, answers, models, time.time() - since)

        self._now = now
        begun = self._saved.batch.status != "validating"
        await self._announce(now() if begun else now("in_progress"))
        ending = await self._until_done(feeder, now)
        if ending == "completed":
            await self._announce(now("finalizing"))
        else:
            if ending == "cancelled":
                await self._announce(now("cancelling"))
            await feeder.end(*_EARLY[ending])
        self._save(now(ending))

    async def _until_done(
        self, feeder: LineDispatcher, now: Callable[[], Batch]
    ) -> Literal["completed", "expired", "cancelled"]:
        batch = self._saved.batch
        while not feeder.done:
            if batch.status == "cancelling" or await self._end_is_wished():
                return "cancelled"
            if batch.expires_at and time.time() >= batch.expires_at:
                return "expired"
            wait_s = await feeder.step()
            await self._tell(now())
            await asyncio.sleep(wait_s)
        return "completed"

    async def _end_is_wished(self) -> bool:
        batch_id = self._saved.batch.id
        return bool(await self._retries.run_until_answered(lambda: self._board.end_is_wished(batch_id)))

    async def _tell(self, batch: Batch) -> None:
        self._told(batch)
        if time.monotonic() - self._put_at >= _PUT_S:
            with suppress(RedisError, OSError):  # a second later there is more to say
                await self._retries.run_for(lambda: self._board.put(batch), 0.0)
            self._put_at = time.monotonic()

    async def _announce(self, batch: Batch) -> None:
        self._save(batch)
        self._told(batch)
        await tell(self._retries, self._board.announce, batch)

    def _save(self, batch: Batch) -> None:
        self._saved = replace(self._saved, batch=batch)
        self._state.save(self._saved)


def _counted(batch: Batch, answers: ResultFiles, models: Counter[str], seconds: float) -> Batch:
    tally = answers.tally
    return replace(
        batch,
        model=next(iter(models)) if len(models) == 1 else None,
        error_file_id=str(answers.errors_path) if answers.errors_path else None,
        request_counts=RequestCounts(models.total(), tally.completed, tally.failed),
        usage=tally.usage,
        sluice=BatchDetails(
            host=batch.sluice.host,
            seconds=round(seconds, 3),
            models=dict(models),
            retried=tally.retried,
            failures=dict(tally.failures),
        ),
    )
