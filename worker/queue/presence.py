"""Publishes a worker's presence, a hash with its model and limits which expires with its lease, and reads in it what
the worker is asked to do. Lets workers restart one after the other."""

import asyncio
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Protocol, get_origin

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from sluice.contract import keys
from sluice.contract.keys import LANES, Lane
from worker import __version__
from worker.errors import CannotStart
from worker.queue.fleet import FleetRecord
from worker.queue.job.claims import offline_rows
from worker.queue.redis_server import ServerClock
from worker.queue.scripts import script
from worker.queue.services import wait_first
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

# Groups: valid until, in Unix seconds, and running jobs by lane. Any client can write a field, so digits are bounded:
# int() refuses very long numbers.
_REPORT = re.compile(rb"(?:[\d.]+|%b) [\d.]+ (\d{1,15}) (\d{1,15}) (\d{1,15})" % keys.DRAINING.encode())
_PROCESS = ["host", "pid", "started_at"]  # fields that no two processes share

Asked = Literal["drain", "restart"]
_ASKED: tuple[Asked, ...] = ("drain", "restart")


Abilities = dict[str, str | int]  # fields of a worker's hash


def abilities(
    *,
    context_tokens: int = 0,
    max_output_tokens: int | None = None,
    images: bool = False,
    tools: bool = False,
    reasoning: bool = False,
) -> Abilities:
    """Return what the served model accepts and emits, as a worker publishes it. `context_tokens`: prompt and answer
    together; 0 if unknown. `max_output_tokens`: the most that an answer may ask for, if there is a limit."""
    numbers = {"context_tokens": context_tokens, "max_output_tokens": max_output_tokens}
    limits: Abilities = {name: number for name, number in numbers.items() if number}
    flags = {"images": images, "tools": tools, "reasoning": reasoning}
    return {**limits, **{name: "yes" if on else "no" for name, on in flags.items()}}


class _Running(Protocol):
    """The jobs that this worker runs."""

    def by_lane(self) -> Mapping[Lane, int]:
        """Return their number by lane."""

    def rows(self) -> int:
        """Return how many of them take a row."""

    def per_s(self) -> float:
        """Return how many end in a second."""


async def until_name_is_free(redis: Redis, settings: Settings, stopping: asyncio.Event | None = None) -> None:
    """Wait until no other worker has this name, or `stopping` is set: two would take each other's jobs for their own.
    One that crashed has its name until its lease expires, and one that drains until it has ended. Raises `CannotStart`
    if another worker renews its lease, and RedisError, OSError."""
    key, before_ms = keys.worker(settings.worker_name), 0
    while stopping is None or not stopping.is_set():
        try:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.pttl(key)
                pipe.hmget(key, ["state", "host", "pid"])
                left_ms, (state, host, pid) = await pipe.execute()
        except ResponseError:
            return  # a foreign value, which `Presence` replaces
        if left_ms <= 0:  # none, or a foreign value, which does not expire
            return
        process = f"process {(pid or b'?').decode()} on {(host or b'?').decode()}"
        if state != keys.DRAINING.encode() and 0 < before_ms < left_ms:
            raise CannotStart(
                f"SLUICE_WORKER_NAME={settings.worker_name}: a worker of this name is alive ({process}). Give each "
                "worker a name of its own, or leave the setting out."
            )
        if not before_ms:
            logger.warning("the name %s is in use (%s): waiting until it is free", settings.worker_name, process)
        before_ms = left_ms
        await asyncio.sleep(min(0.5, settings.lease_s / 10))  # a lease is renewed three times in its time


async def check_name_early(redis: Redis, settings: Settings) -> None:
    """Wait until the worker's name is free, while its model loads. Without an answer of Redis, it is checked later.
    Raises `CannotStart`."""
    with suppress(RedisError, OSError):
        await until_name_is_free(redis, settings)


class Presence:
    """Publishes that this worker is alive, for one lease at a time, and if it is draining."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        clock: ServerClock,
        accepted: Abilities | None = None,
        stopping: asyncio.Event | None = None,
        *,
        measured: Callable[[], Mapping[str, float | str]] = dict,
        on_asked: Callable[[Asked], None] = lambda asked: None,
        fleet: FleetRecord | None = None,
    ) -> None:
        """`accepted`: what `abilities` returns; None: those of a model of text without tools. `stopping`: set when the
        worker begins to drain. `measured`: returns what its metrics say. `on_asked` receives what this process is asked
        to do. `fleet` is published with it."""
        self._clock, self._settings = clock, settings
        self._stopping, self._measured = stopping or asyncio.Event(), measured
        self._asked, self._on_asked = b"", on_asked
        self._fleet = fleet
        self._told = asyncio.Event()
        self._warned_at = float("-inf")
        self._has_name = False
        self._redis, self._key = redis, keys.worker(settings.worker_name)
        self._model_key = keys.model(settings.model_name)
        self._queues = [keys.queue(settings.model_name, lane) for lane in LANES]
        self._lease_ms = int(settings.lease_s * 1000)
        self._fields: dict[str, str | int | float] = {
            "name": settings.worker_name,
            "model": settings.model_name,
            "max_rows": settings.max_rows,
            "queue_limit": settings.queue_limit,
            **(accepted or abilities()),
            "version": __version__,
            "protocol": 1,  # the version of the contract
            "checkpoints": json.dumps(_checkpoints(settings)),
            "packages": json.dumps(_packages()),
            "settings": json.dumps(_public_settings(settings)),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": round(time.time(), 3),
        }

    async def take_name(self, running: _Running) -> None:
        """Wait until the worker's name is free, and publish its presence; once. Raises `CannotStart`, and RedisError,
        OSError."""
        if not self._has_name:
            await until_name_is_free(self._redis, self._settings, self._stopping)
            if not self._stopping.is_set():
                await self.publish(running)
                self._has_name = True

    async def run(self, running: _Running, on_waiting: Callable[[Lane, int], None]) -> None:
        """Publish, and synchronize the clock, three times per lease until this task is cancelled. `on_waiting` receives
        the waiting jobs of each lane."""
        while True:
            with suppress(RedisError, OSError):  # the publisher and the claim loop log an outage
                for lane, jobs in (await self.publish(running)).items():
                    on_waiting(lane, jobs)
            with suppress(RedisError, OSError):  # a full server refuses the presence, but forgets marks
                if self._fleet:
                    await self._fleet.publish()
                await self._clock.sync(self._redis)
            await self._next_turn()

    def told(self) -> None:
        """Publish soon: this worker is asked for something, a message says. Any client can send it."""
        self._told.set()

    async def _next_turn(self) -> None:
        """Wait for a third of a lease, or until the worker begins to drain or is told."""
        began = [] if self._stopping.is_set() else [self._stopping.wait()]
        await wait_first(self._told.wait(), *began, timeout_s=self._lease_ms / 1000 / 3)
        if self._told.is_set():
            await asyncio.sleep(0.05)  # of a flood of messages, all that come meanwhile are one
            self._told.clear()

    async def publish(self, running: _Running) -> dict[Lane, int]:
        """Publish this worker's state, valid for one lease.

        Returns the waiting jobs by lane, computed from the reports of all workers of the model. Raises RedisError,
        OSError.
        """
        try:
            return await self._publish(running)
        except ResponseError:
            await self._delete_foreign()
            raise

    async def _delete_foreign(self) -> None:
        """Delete values of other types from our keys: other programs wrote them, and they hide the worker."""
        for key in (self._key, self._model_key):
            if (kind := await self._redis.type(key)) not in (b"hash", b"none"):
                logger.warning("deleted a foreign value: %s held a %s", key, kind.decode())
                await self._redis.delete(key)

    async def _publish(self, running: _Running) -> dict[Lane, int]:
        rate, now = round(running.per_s(), 3), self._clock.now()
        jobs = running.by_lane()
        offline = offline_rows(self._settings, self._clock.utc())
        draining = self._stopping.is_set()
        state = keys.DRAINING if draining else "running"
        # Interactive jobs are claimed as if offline ones had no rows: those preempt these, which then wait.
        rows = min(running.rows(), self._settings.max_rows)
        load = {"state": state, "rows": rows, "offline_rows": offline, "jobs_per_s": rate}
        counts = " ".join(str(jobs[lane]) for lane in LANES)
        # Without a limit, submissions do not count the worker, which takes no more jobs.
        limit = keys.DRAINING if draining else self._settings.queue_limit
        report = f"{limit} {rate} {self._valid_until():.0f} {counts}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(self._key, [*_PROCESS, "asked"])
            pipe.hset(self._key, mapping={**self._fields, **load, **self._measured()})
            pipe.pexpire(self._key, self._lease_ms)
            pipe.hset(self._model_key, self._settings.worker_name, report)
            pipe.pexpire(self._model_key, self._lease_ms)
            pipe.hvals(self._model_key)
            for queue in self._queues:
                pipe.zcount(queue, "-inf", now * 1000)
            (*written_by, asked), *_, workers, interactive, batch = await pipe.execute()
        self._warn_of_another(written_by)
        self._pass_on(asked or b"")
        return _waiting(dict(zip(LANES, (interactive, batch), strict=True)), workers, now)

    def _pass_on(self, asked: bytes) -> None:
        """Pass on what this process is asked to do, once. What another process of this name was asked is not meant."""
        if asked != self._asked:
            self._asked = asked
            for each in _ASKED:
                if asked == f"{each} {self._fields['started_at']}".encode():
                    self._on_asked(each)

    def _warn_of_another(self, written_by: list[bytes | None]) -> None:
        """Log that another process publishes itself under this name, if it does; once a minute."""
        if None in written_by or written_by == [str(self._fields[name]).encode() for name in _PROCESS]:
            return
        if time.monotonic() - self._warned_at >= 60.0:
            self._warned_at = time.monotonic()
            host, pid, _ = (value.decode(errors="replace") for value in written_by if value is not None)
            logger.error(
                "SLUICE_WORKER_NAME=%s: another worker of this name is alive (process %s on %s), and takes this one's "
                "jobs for its own; stop one of them", self._settings.worker_name, pid, host,
            )  # fmt: skip

    def _valid_until(self) -> float:
        return self._clock.now() + self._lease_ms / 1000 + 1

    async def remove(self) -> None:
        """Delete this worker's presence. If Redis does not answer, it expires."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._key)
                pipe.hdel(self._model_key, self._settings.worker_name)
                pipe.hdel(keys.rows(self._settings.model_name), self._settings.worker_name)  # which claims write
                await pipe.execute()
            if self._fleet:
                await self._fleet.remove()
        except (RedisError, OSError):
            logger.info("redis does not answer: the worker's presence expires with its lease")


def _checkpoints(settings: Settings) -> list[str]:
    """Return the models that this worker opens: hub ids, and the whole paths of folders."""
    named = (settings.model, settings.mtp_model, settings.draft_model, settings.specprefill_draft_model)
    paths = {each: Path(each).expanduser() for each in named if each}
    return [str(path.resolve()) if path.is_dir() else each for each, path in paths.items()]


def _packages() -> dict[str, str]:
    """Return the versions of the packages that compute answers."""
    found = dict[str, str]()
    for name in ("mlx", "mlx-lm", "mlx-vlm", "mlx-embeddings"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _public_settings(settings: Settings) -> dict[str, str | bool | float]:
    """Return the settings that were given, of those that are numbers, switches or one of a few words: a text may be a
    password, a key, or the path of somebody's folder."""
    fields = type(settings).model_fields
    given = {name: getattr(settings, name) for name in sorted(settings.model_fields_set)}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float) or (value and get_origin(fields[name].annotation) is Literal)
    }


class RestartTurn:
    """Lets the workers of a model restart one after the other: the next begins when the one before is back.

    The key of the turn holds a worker's name, which its process keeps when it executes itself again."""

    def __init__(self, redis: Redis, settings: Settings, begin: Callable[[], None]) -> None:
        """`begin` is called when this worker's turn to restart has come."""
        self._redis, self._script = redis, script(redis, "restart")
        self._key, self._name = keys.restart(settings.model_name), settings.worker_name
        # For the drain, and for the load of a model from a slow disk: after that, the worker counts as lost.
        self._turn_ms = int((settings.grace_s + 600.0) * 1000)
        self._begin, self._asked = begin, asyncio.Event()

    def ask(self) -> None:
        """Restart when no other worker of the model does."""
        self._asked.set()

    def withdraw(self) -> None:
        """Do not restart, unless the turn has come already."""
        self._asked.clear()

    async def run(self) -> None:
        """Wait for the turn whenever the worker is asked to restart, until this task is cancelled."""
        before = ""
        while True:
            await self._asked.wait()
            try:
                holder = await self._take(self._turn_ms)
                if holder != self._name:
                    if before != holder:
                        logger.info("restarts when %s is back", holder)
                    before = holder
                elif before and not await self._redis.exists(keys.worker(before)):
                    await self._give_up(before)
                    before = ""
                elif self._asked.is_set():
                    self._asked.clear()
                    self._begin()
            except (RedisError, OSError):
                pass  # the publisher and the claim loop log an outage
            await asyncio.sleep(0.5)

    async def _give_up(self, missing: str) -> None:
        logger.error("does not restart: %s did not come back after its restart; find out why in its log", missing)
        self._asked.clear()
        await self._redis.hdel(keys.worker(self._name), "asked")  # type: ignore[misc]
        await self.end()

    async def end(self) -> None:
        """End the turn, if this worker has it: it is back, or leaves. Raises RedisError, OSError."""
        await self._take(0)

    async def _take(self, turn_ms: int) -> str:
        holder: bytes = await self._script(keys=[self._key], args=[self._name, turn_ms])
        return holder.decode("utf-8", "replace")


def _waiting(due: Mapping[Lane, int], workers: Iterable[bytes], now: float) -> dict[Lane, int]:
    """Waiting jobs by lane: due jobs minus running jobs of live workers, since running jobs stay in the queue."""
    reports = [match.groups() for worker in workers if (match := _REPORT.fullmatch(worker))]
    alive = [running for until, *running in reports if int(until) > now]
    return {lane: max(0, due[lane] - sum(int(running[i]) for running in alive)) for i, lane in enumerate(LANES)}
