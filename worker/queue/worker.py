"""The queue worker: claims the jobs of one model while rows are free, and brings each to exactly one ending."""

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from signal import Signals

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from sluice.contract import keys
from sluice.contract.keys import Lane
from worker.errors import OwnershipLost, Requeue
from worker.host.watch import HostWatch
from worker.monitoring.health import Heartbeat
from worker.monitoring.sink import MetricsSink
from worker.queue.cron import Cron
from worker.queue.fleet import EnginePrompts, FleetRecord
from worker.queue.job.claims import MAX_COUNTS, Claim, Claims, LeaseKeeper, Takeover, WorkerRows, worker_rows
from worker.queue.job.publisher import Publisher
from worker.queue.job.runner import JobFunctions, JobRunner
from worker.queue.presence import Abilities, Asked, Presence, RestartTurn, abilities
from worker.queue.redis_server import Readiness, RedisServer, until_redis_answers
from worker.queue.running import CancelRequests, ControlListener, RunningJobs
from worker.queue.services import run_with_services, wait_first
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")


async def log_unclaimed_queues(redis: Redis, model: str, *, every_s: float = 10.0) -> None:
    """Log each queue that no worker reads once, until this task is cancelled: walk over the keys of the server, a
    bounded part every `every_s` seconds. A user without SCAN looks for none. `model`: the one that this worker
    serves."""
    cursor, logged = 0, set[str]()
    most = 100  # queues, since any client can create them
    while True:
        try:
            # As many keys of the server take about 1 ms of its time.
            cursor, found = await redis.scan(cursor, match=keys.QUEUES, count=2000)
            for name in found[:most]:
                key = name.decode("utf-8", "replace")
                if key in logged or len(logged) >= most:
                    continue
                problem = keys.queue_problem(key) or await _unserved(redis, model, key)
                if problem and (jobs := await _length(redis, name)):
                    logged.add(key)
                    logger.warning("no worker takes the %d jobs in %s: %s", jobs, key[:200], problem)
        except NoPermissionError:
            logger.debug("the server denies SCAN: queues without a worker are not looked for")
            await asyncio.Event().wait()
        except (RedisError, OSError):
            pass  # the claim loop logs an outage
        await asyncio.sleep(every_s)


async def _unserved(redis: Redis, own_model: str, key: str) -> str | None:
    model = key.split(":")[2]
    if model == own_model or await redis.exists(keys.model(model)):
        return None
    if await redis.hget(keys.ALIASES, model):  # type: ignore[misc]
        return None  # the workers of the model that it stands for take these jobs
    remedy = f"start one, correct the name in the producer, or run sluice queue purge {model}"
    return f"no worker serves {model!r}; {remedy}"


async def _length(redis: Redis, name: bytes) -> int:
    """Return the jobs in a queue; 0 for a key of another type."""
    if await redis.type(name) != b"zset":
        return 0
    return int(await redis.zcard(name))


_LAST_WRITES_S = 5.0  # for the last writes of a stopping worker, if Redis does not answer at once


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the jobs run on, as far as the queue is concerned."""

    set_paused: Callable[[bool], None] = lambda on: None  # pauses it while too many events wait, see `Publisher`
    heartbeats: Sequence[Heartbeat] = ()  # of its threads; the process ends if one stalls
    abilities: Abilities = field(default_factory=abilities)
    step_times: Callable[[], Sequence[float]] = tuple  # as `StepTimes.seconds` returns them
    prompts: EnginePrompts | None = None  # for the record of this worker
    host: HostWatch | None = None  # tells what it leaves to others on its machine


class QueueWorker:
    """Reads the queues of plain arq producers and of `sluice.Client`, and owns the loop that claims from them.

    Of arq it has the format of jobs, and the functions that they name. In place of arq's retries, timeouts and results
    stand a lease, an attempt number that fences every write, and one final script. Its parts:

    - `Claims` takes jobs from the queues; `RunningJobs` owns those that run here, `JobRunner` brings each to its ending
    - `ControlListener` receives wake-ups, and cancellations for `CancelRequests`
    - `Publisher` writes events and endings
    - `LeaseKeeper` renews the leases, `Takeover` forbids taking others over after an outage
    - `Presence` publishes that the worker is alive, `log_unclaimed_queues` logs queues that no worker reads
    - `RestartTurn` lets the workers of a model restart one after the other

    `stopping` is set by the first signal: no more jobs are claimed. `force_stop` is set by the second one: the grace
    period of the running jobs ends early. `restarts` is True while the process shall execute itself again once it has
    drained.
    """

    def __init__(
        self,
        functions: JobFunctions,
        *,
        server: RedisServer,
        settings: Settings,
        metrics: MetricsSink,
        model: ServedModel | None = None,
        crons: Sequence[Cron] = (),
    ) -> None:
        """Create it in the event loop's thread: from then on SIGINT and SIGTERM stop it, and SIGHUP restarts it.
        `crons` are not jobs: they take no row, and no client can enqueue one."""
        model = model or ServedModel()
        redis = server.client
        self._server, self._settings = server, settings
        self._host = model.host
        self._crons, self._step_times = tuple(crons), model.step_times
        self.stopping, self.force_stop = asyncio.Event(), asyncio.Event()
        self.restarts, self._on_terminal = False, _on_terminal()
        self._woken, self._connected = asyncio.Event(), False
        # Much shorter than a lease, so that a dead worker's jobs wait hardly longer than for their leases.
        self._sweep_s = min(settings.poll_s, max(0.1, settings.lease_s / 20))
        self._swept_at, self._next_at = 0.0, math.inf  # monotonic; the second: of a poll that a claim asked for
        self.readiness = Readiness(self._sweep_s)

        self._fleet = FleetRecord(redis, settings, server.clock, metrics, model.prompts, stopping=self.stopping)
        self._claims, self._takeover = Claims(redis, settings, self._fleet), Takeover(settings.lease_s)
        publisher = Publisher(redis, server.clock, settings, model.set_paused)
        runner = JobRunner(
            redis, functions, self._claims, publisher, metrics, settings=settings, stopping=self.stopping
        )
        self.jobs = RunningJobs(publisher, metrics, run=runner.run, wake=self.wake, fleet=self._fleet)
        self._cancels = CancelRequests(redis, settings, self.jobs)
        self._turn = RestartTurn(redis, settings, self._begin_restart)
        self._presence = Presence(
            redis, settings, server.clock, model.abilities, self.stopping, measured=metrics.measured,
            on_asked=self._on_asked, fleet=self._fleet,
        )  # fmt: skip
        listener = ControlListener(
            redis,
            settings.model_name,
            keyspace_events=settings.keyspace_events,
            wake=self.wake,
            cancel=self._cancels.add,
            on_reconnect=self._cancels.check_running,
            worker=settings.worker_name, told=self._presence.told, wid=lambda: self._fleet.wid,
        )  # fmt: skip
        self.heartbeat = Heartbeat("event loop")
        heartbeats = [self.heartbeat, *model.heartbeats]
        self._leases = LeaseKeeper(settings, self.jobs.claims, self.jobs.ownership_lost, heartbeats)
        self._services = (
            publisher.run,
            listener.run,
            self._cancels.run,
            partial(self._presence.run, self.jobs, metrics.set_waiting),
            self._turn.run,
            self.heartbeat.keep_beating,
            partial(log_unclaimed_queues, redis, settings.model_name),
        )
        self._handle_signals(asyncio.get_running_loop())

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.on_signal, signum)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    async def main(self) -> None:
        """Run until a signal, give running jobs `grace_s` seconds to end, requeue the rest. Raises `CannotStart`."""
        if not await self.connect():
            return
        self._leases.start()
        try:
            watch = [partial(self._host.run, self.jobs.by_lane)] if self._host else []
            await run_with_services(self._run_jobs(), *self._services, *watch)
        finally:
            self._leases.stop()
        await self._presence.remove()
        if not self.restarts:
            with suppress(RedisError, OSError):  # then the turn expires
                await self._turn.end()

    async def connect(self) -> bool:
        """Wait for Redis, check it, and take the worker's name. Returns False if the worker is stopped first. Raises
        `CannotStart`."""
        if not self._connected:
            self._connected = await self._until_answered(self._check_server)
        return self._connected and await self._until_answered(self._take_name)

    async def _take_name(self) -> None:
        await self._presence.take_name(self.jobs)
        await self._turn.end()

    async def _check_server(self) -> None:
        self._takeover.record_first_answer(await self._server.connect())
        self.readiness.record_answer()

    async def _until_answered(self, call: Callable[[], Awaitable[None]]) -> bool:
        """Repeat a call of Redis until it answers. Returns False if the worker is stopped first."""
        return await until_redis_answers(partial(self.readiness.watch, call), self.stopping)

    async def _run_jobs(self) -> None:
        await self.claim_jobs()
        await self.requeue_lost_claims()
        await self.drain()

    async def claim_jobs(self) -> None:
        """Poll when the worker is woken, when its last claims asked for it, and at least once per sweep, until the
        worker is stopped."""
        while not self.stopping.is_set():
            self._woken.clear()
            await self._until_answered(self.poll)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._sweep_s, self._next_at - time.monotonic())):
                    await self._woken.wait()

    async def poll(self) -> None:
        """Claim a job for every free row, or this worker's share of fewer jobs.

        Once per sweep it also claims jobs past their deadline, finds the cancel keys of running jobs and the jobs that
        arq aborts, and begins the crons that are due. Raises RedisError, OSError."""
        is_sweep = time.monotonic() - self._swept_at >= self._sweep_s
        self._next_at = math.inf
        for lane in keys.LANES:
            await self._poll_lane(lane, is_sweep=is_sweep)
        if is_sweep:
            if not self.stopping.is_set() and await self._claims.forward(takeover=self._takeover.allowed()):
                self.wake()
            await self._cancels.check_running()
            await self._cancels.add_aborted()
            self._swept_at = time.monotonic()
            for cron in self._crons:
                await cron.begin_if_due(self._server.client, self._settings.worker_name, self._server.clock.utc())

    async def _poll_lane(self, lane: Lane, *, is_sweep: bool) -> None:
        if self.stopping.is_set():  # it may have been set since the poll began
            return
        rows = worker_rows(self.jobs.claims(), self._settings, self._server.clock.utc(), self._step_times())
        if self._host:
            interactive = rows.max_rows - rows.free["interactive"]  # offline ones do not end while they wait for memory
            rows = replace(rows, free=self._host.reclaim.free_rows(rows.free, interactive))
        limit = rows.free[lane]
        if limit or is_sweep or self._claims.needs_reconcile(lane):
            counts = MAX_COUNTS - sum(claim.is_count for claim in self.jobs.claims())
            # A job that only this poll has found woke no worker that it may be left to.
            claimed = await self._take(lane, limit, rows, counts=max(0, counts), wake=is_sweep)
            self._next_at = min(self._next_at, self._claims.next_at(lane))
            self._takeover.record_answer()
            self.readiness.record_answer()
            await self._start_all(claimed)
            # A cancellation that arrived before the claim's reply found no job to interrupt.
            await self._cancels.check([claim.job_id for claim in claimed])
        if self._claims.needs_reconcile(lane):
            self.wake()

    async def _take(
        self, lane: Lane, limit: int, rows: WorkerRows, *, counts: int = 0, wake: bool = False
    ) -> list[Claim]:
        return await self._claims.take(
            lane,
            limit,
            counts=counts,
            running=self.jobs.claims(),
            suspects=self.jobs.suspects(),
            takeover=self._takeover.allowed(),
            rows=rows,
            wake=wake,
        )

    async def _start_all(self, claims: list[Claim]) -> None:
        for claim in claims:
            if claim.job_id in self.jobs:
                # Our own job, claimed again after its lease had expired: the running attempt has lost it.
                self.jobs.interrupt(claim.job_id, OwnershipLost())
                await self._requeue(claim)
            elif self.stopping.is_set() and not claim.expired:  # set while the claim was under way
                await self._requeue(claim)
            else:
                self.jobs.start(claim)

    async def _requeue(self, claim: Claim) -> None:
        if claim.job_id not in self.jobs:
            self._fleet.ended(claim.job_id, had_row=False)
        with suppress(RedisError, OSError):  # then its lease expires
            await self._claims.release(claim)

    def wake(self) -> None:
        """Claim jobs at once instead of at the next poll."""
        self._woken.set()

    def on_signal(self, signum: Signals) -> None:
        """Start the drain at the first signal; end its grace period at the second."""
        name, running = Signals(signum).name, len(self.jobs)
        if not self.stopping.is_set() or self.restarts:
            self._drain(f"{name}: stopping")
        elif not self.force_stop.is_set():
            logger.info("%s again: requeueing %s", name, _jobs(running))
            self.force_stop.set()

    def _drain(self, why: str, *, restarts: bool = False) -> None:
        logger.info("%s; %s", why, _plan(len(self.jobs), self._settings.grace_s))
        self.restarts = restarts
        self._turn.withdraw()
        self.stopping.set()
        self.readiness.drain()
        self.wake()

    def _on_asked(self, asked: Asked) -> None:
        """Leave or restart, as an operator has asked this process by its hash."""
        if asked == "restart":
            self._turn.ask()
        elif not self.stopping.is_set() or self.restarts:
            self._drain("asked to drain: stopping")

    def _on_hangup(self) -> None:
        """Restart; or stop, if SIGHUP says that the worker's terminal was closed."""
        if self._on_terminal and not _on_terminal():
            self.on_signal(signal.SIGHUP)
        elif not self.stopping.is_set():
            logger.info("SIGHUP: restarting when no other worker of %s does", self._settings.model_name)
            self._turn.ask()

    def _begin_restart(self) -> None:
        if not self.stopping.is_set():
            self._drain("restarting", restarts=True)

    def stop(self) -> None:
        """Start the drain, as at SIGTERM."""
        self.on_signal(signal.SIGTERM)

    async def requeue_lost_claims(self) -> None:
        """Requeue claims whose reply was lost; their jobs would wait for their leases, and then count as suspects. And
        tell the other workers to leave no more jobs to this one."""
        no_rows = WorkerRows(len(self.jobs), self._settings.max_rows, dict.fromkeys(keys.LANES, 0))
        with suppress(RedisError, OSError):  # then the leases expire
            for lane in keys.LANES:
                # A claim for no row requeues them, and returns only jobs past their deadline.
                await self._start_all(await self._take(lane, 0, no_rows))

    async def drain(self) -> None:
        """Wait for the running jobs until the grace period ends, requeue the rest, and wait for the last writes."""
        await wait_first(self.jobs.all_ended(), self.force_stop.wait(), timeout_s=self._settings.grace_s)
        self.jobs.interrupt_all(Requeue)
        await wait_first(self.jobs.all_ended(), timeout_s=_LAST_WRITES_S)
        if left := len(self.jobs):
            logger.error("%d jobs could not be requeued: other workers take them over when their leases expire", left)


def _on_terminal() -> bool:
    return any(map(os.isatty, range(3)))


def _plan(running: int, grace_s: float) -> str:
    """Return the log text for the first signal: which jobs the worker waits for, and the effect of a second signal."""
    if not running:
        return "no job is running"
    if not grace_s:
        return f"requeueing {_jobs(running)}"
    return f"waiting up to {grace_s:g} s for {_jobs(running)}; a second signal requeues them at once"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"
