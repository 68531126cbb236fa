"""Running jobs, and the wake-ups and requests to cancel that arrive by pub/sub: running jobs are interrupted at once,
waiting ones are cancelled in Redis in batches."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError

from sluice.contract import keys
from sluice.contract.keys import Lane
from sluice.contract.scripts import cancel_args, source
from sluice.transport import refuse_demoted
from worker.errors import CancelJob, OwnershipLost
from worker.monitoring.sink import MetricsSink
from worker.queue.fleet import FleetRecord
from worker.queue.job.claims import Claim
from worker.queue.job.job import Job, JobInterruption
from worker.queue.job.publisher import Publisher
from worker.queue.redis_server import Need, forbidden
from worker.queue.scripts import JOB_LIFE_MS, script
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

_RATE_OVER_S = 60.0


class RunningJobs:
    """Starts jobs, interrupts them, and forgets each when its task ends. Create it while the event loop runs.

    All methods are for the event loop's thread, except `claims` and `ownership_lost`.
    """

    def __init__(
        self,
        publisher: Publisher,
        metrics: MetricsSink,
        *,
        run: Callable[[Job], Coroutine[Any, Any, None]],
        wake: Callable[[], None],
        fleet: FleetRecord | None = None,
    ) -> None:
        """`run` brings a job to its ending, and does not raise. `wake` is called when a job may be claimed in place of
        one that has ended or has left its probation. `fleet` counts the prompts of the jobs."""
        self._publisher, self._metrics = publisher, metrics
        self._run, self._wake = run, wake
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[str, Job] = {}
        self._ended_at = deque[float]()  # monotonic, of the last `_RATE_OVER_S`

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def __getitem__(self, job_id: str) -> Job:
        return self._jobs[job_id]

    def start(self, claim: Claim) -> None:
        """Start the task of a claimed job. Its id must not be running."""

        def lost() -> None:
            self.interrupt(claim.job_id, OwnershipLost())

        log = self._publisher.open(claim, on_lost=lost)
        self._metrics.claimed(
            claim.lane, queue_s=claim.age_s(log.clock.now()), lease_expirations=claim.lease_expirations
        )
        on_probation = claim.lease_expirations > 0
        job = Job(claim, log, on_probation=on_probation, on_probation_end=self._wake)
        if self._fleet:
            job.prompt = self._fleet.prompt(claim.job_id, claim.tenant)
        self._jobs[claim.job_id] = job
        job.start(self._loop, self._run(job)).add_done_callback(partial(self._ended, claim.job_id))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        job = self._jobs.pop(job_id)
        self._publisher.close(job.log)
        self._metrics.released(job.claim.lane)
        self._ended_at.append(time.monotonic())
        if self._fleet:
            self._fleet.ended(job_id, had_row=job.claim.computes)
        self._wake()
        task.result()  # `run` does not raise; if it does, the loop's exception handler logs it

    def interrupt(self, job_id: str, why: JobInterruption) -> bool:
        """Interrupt a job. Returns False if it does not run here."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.interrupt(why)
        return job is not None

    def interrupt_all(self, why: Callable[[], JobInterruption]) -> None:
        """Interrupt every job, each with a reason of its own."""
        for job in list(self._jobs.values()):
            job.interrupt(why())

    def cancel(self, job_id: str) -> bool:
        """Interrupt a job whose client asked for it. Returns False if it does not run here."""
        return self.interrupt(job_id, CancelJob("requested"))

    def ownership_lost(self, claim: Claim) -> None:
        """Interrupt the job of a claim that another attempt has replaced. For any thread."""
        try:
            self._loop.call_soon_threadsafe(self._interrupt_lost, claim)
        except RuntimeError:
            pass  # the loop has closed: there is nothing left to stop

    def _interrupt_lost(self, claim: Claim) -> None:
        job = self._jobs.get(claim.job_id)
        if job is not None and job.claim is claim:
            job.interrupt(OwnershipLost())

    def ids(self) -> list[str]:
        """Return the ids of the running jobs."""
        return list(self._jobs)

    def claims(self) -> list[Claim]:
        """Return the claims of the running jobs. For any thread."""
        return [job.claim for job in list(self._jobs.values())]

    def by_lane(self) -> Counter[Lane]:
        """Return the number of running jobs by lane, token counts included."""
        return Counter(job.claim.lane for job in self._jobs.values())

    def rows(self) -> int:
        """Return the number of running jobs that take a row: all but token counts."""
        return sum(not job.claim.is_count for job in self._jobs.values())

    def suspects(self) -> int:
        """Return the number of running jobs that are on probation."""
        return sum(job.on_probation for job in self._jobs.values())

    def per_s(self) -> float:
        """Return the jobs that ended in a second, over the last minute; clients estimate from it how long a full queue
        takes to drain."""
        since = time.monotonic() - _RATE_OVER_S
        while self._ended_at and self._ended_at[0] < since:
            self._ended_at.popleft()
        return len(self._ended_at) / _RATE_OVER_S

    async def all_ended(self) -> None:
        """Wait until no job runs."""
        while tasks := [job.task for job in self._jobs.values() if job.task is not None]:
            await asyncio.wait(tasks)


_BATCH = 500  # ids in one call of the script: about 1 ms of the server's time
_MAX_PENDING = 10_000  # further ids are dropped: a job among them ends when it is claimed, by its key `sluice:cancel`


class CancelRequests:
    """Ends the jobs of one model that a client, or arq's `Job.abort`, asks to end.

    A cancel key is set before the message on the channel, which may be late or lost: `check` finds it. Any client may
    publish ids, and most jobs run elsewhere, so `add` does not call Redis.
    """

    def __init__(self, redis: Redis, settings: Settings, jobs: RunningJobs) -> None:
        self._redis, self._jobs = redis, jobs
        self._queues = [keys.queue(settings.model_name, lane) for lane in keys.LANES]
        self._find_waiting = script(redis, "waiting")
        self._cancel = redis.register_script(source("cancel"))
        self._find_aborted = script(redis, "aborted")
        self._lives_ms = JOB_LIFE_MS, settings.log_ttl_s * 1000, settings.result_ttl_s * 1000
        self._pending: dict[str, None] = {}  # in order of arrival
        self._added = asyncio.Event()

    async def check_running(self) -> None:
        """Interrupt the running jobs that have a cancel key. Raises RedisError, OSError."""
        await self.check(self._jobs.ids())

    async def check(self, job_ids: Sequence[str]) -> None:
        """Interrupt those of the jobs that have a cancel key. Raises RedisError, OSError."""
        if not job_ids:
            return
        values = await self._redis.mget([keys.cancel(job_id) for job_id in job_ids])
        for job_id, value in zip(job_ids, values, strict=True):
            if value is not None:
                self._jobs.cancel(job_id)

    def add(self, job_id: str) -> None:
        """Interrupt the job if it runs here; else store its id for `run`. Drops ids that break the contract."""
        if self._jobs.cancel(job_id) or not keys.is_job_id(job_id) or len(self._pending) >= _MAX_PENDING:
            return
        self._pending[job_id] = None
        self._added.set()

    async def add_aborted(self) -> None:
        """Add the jobs in the model's queues that arq's `Job.abort` asks to end; they may be running, here or on
        another worker. Raises RedisError, OSError."""
        self._add_all(_ids(await self._find_aborted(keys=self._queues)))

    async def run(self) -> None:
        """Cancel stored jobs that wait in the queue, until this task is cancelled."""
        while True:
            await self._added.wait()
            ids = self._next_batch()
            try:
                for job_id in await self.find_waiting(ids):
                    if await self.cancel_waiting(job_id):
                        logger.info("job %s cancelled in the queue", job_id, extra={"job": job_id})
            except (RedisError, OSError):
                self._add_all(ids)
                await asyncio.sleep(0.2)

    def _next_batch(self) -> list[str]:
        """Remove up to `_BATCH` ids from those stored. Interrupts jobs that run here now, and returns the other ids."""
        ids = list(islice(self._pending, _BATCH))
        for job_id in ids:
            del self._pending[job_id]
        if not self._pending:
            self._added.clear()
        return [job_id for job_id in ids if not self._jobs.cancel(job_id)]

    def _add_all(self, ids: Iterable[str]) -> None:
        for job_id in ids:
            self.add(job_id)

    async def find_waiting(self, job_ids: Collection[str]) -> list[str]:
        """Return the ids that are in one of the model's queues; their jobs may be running, here or on another worker.
        Raises RedisError, OSError."""
        return _ids(await self._find_waiting(keys=self._queues, args=list(job_ids))) if job_ids else []

    async def cancel_waiting(self, job_id: str) -> bool:
        """Cancel a job that waits in one of the model's queues. Returns False if it does not wait there. Raises
        RedisError, OSError."""
        (outcome,) = await self._cancel(
            keys=self._queues,
            args=cancel_args(job_id, lives_ms=self._lives_ms),
        )
        return bool(outcome == b"cancelled")


def _ids(found: Iterable[bytes]) -> list[str]:
    return [job_id.decode("utf-8", "surrogateescape") for job_id in found]


_QUIET_S = 5.0  # silence after which a ping is sent; without an answer for as long again, the connection is lost


class ControlListener:
    """Calls `wake` when there may be work, `cancel` with each id to cancel, and `on_reconnect` on each new connection,
    since messages may have been lost before it."""

    def __init__(
        self,
        redis: Redis,
        model: str,
        *,
        keyspace_events: bool,
        wake: Callable[[], None],
        cancel: Callable[[str], None],
        on_reconnect: Callable[[], Awaitable[None]],
        worker: str = "",
        told: Callable[[], None] = lambda: None,
        wid: Callable[[], str] = str,
    ) -> None:
        """`told` is called when `worker`, this one, is asked for something, which its hash says. `wid` returns the id
        by which submits wake it alone, or an empty one: then it wakes for all jobs."""
        self._redis = redis
        self._told, self._told_by = told, f"worker {worker}"
        self._model, self._wid = model, wid
        self._keyspace_events = keyspace_events
        self._wake = wake
        self._cancel = cancel
        self._on_reconnect = on_reconnect

    async def run(self) -> None:
        """Listen, and reconnect after errors, until this task is cancelled."""
        while True:
            try:
                await self._listen()
            except (RedisError, OSError):
                await asyncio.sleep(0.2)

    async def _listen(self) -> None:
        channels = [keys.wake(self._model), keys.CONTROL]
        if self._keyspace_events:
            await allow_keyspace_events(self._redis)
            channels += await self._keyspace_channels()
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(*channels)
            # A flood of messages leaves most of the event loop's time to streams: 32 take some 2 ms.
            pace = _Pace(rounds=32, window_s=0.01)
            async for message in _messages(pubsub):
                await self._handle(message["type"], message["channel"], message["data"])
                await pace.keep()

    async def _keyspace_channels(self) -> list[str]:
        """Return the channels that our user may subscribe to: the server refuses SUBSCRIBE if one channel is denied."""
        db = self._redis.connection_pool.connection_kwargs.get("db", 0)
        channels = [f"__keyspace@{db}__:{keys.queue(self._model, lane)}" for lane in keys.LANES]
        denied = await forbidden(self._redis, [Need("SUBSCRIBE", (channel,), channel) for channel in channels])
        return [channel for channel in channels if channel not in {need.name for need in denied}]

    async def _handle(self, type: str, channel: bytes, data: bytes) -> None:
        if type == "subscribe":  # also after redis-py has reconnected by itself
            self._wake()
            if channel == keys.CONTROL.encode():
                await self._on_reconnect()
        elif channel == keys.CONTROL.encode():
            text = data.decode("utf-8", "surrogateescape")
            if text == self._told_by:
                self._told()
            else:
                self._cancel(text)
        elif channel != keys.wake(self._model).encode():
            if data == b"zadd":
                self._wake()
        elif not data or not (own := self._wid()) or data == own.encode():
            self._wake()


class _Pace:
    """Limits a loop to some rounds in each window of time. Messages wait on the server meanwhile, which closes the
    connection if they take too much memory; what they asked for is then found by the poll and the cancel keys."""

    def __init__(self, rounds: int, window_s: float) -> None:
        self._rounds, self._window_s = rounds, window_s
        self._left, self._ends = rounds, 0.0  # rounds of this window, and its end by the monotonic clock

    async def keep(self) -> None:
        """Count a round, and wait for the end of the window if it was the last one."""
        self._left -= 1
        if not self._left:
            await asyncio.sleep(max(0.0, self._ends - time.monotonic()))
            self._left, self._ends = self._rounds, time.monotonic() + self._window_s


async def _messages(pubsub: PubSub) -> AsyncIterator[dict[str, Any]]:
    """Yield messages, and send a ping when none arrive: `PubSub.listen` would drop a quiet connection after
    `socket_timeout`, and messages before the next connection would be lost."""
    asked = False
    while True:
        message = await pubsub.get_message(timeout=_QUIET_S)
        if message is None and asked:
            raise ConnectionLost("no answer to a ping")
        if asked := message is None:
            await pubsub.ping()
            await refuse_demoted(pubsub)
        else:
            yield message


async def allow_keyspace_events(redis: Redis) -> None:
    """Add "Kz" to the server's notify-keyspace-events if the server permits it. Other flags are kept."""
    try:
        flags = (await redis.config_get("notify-keyspace-events")).get("notify-keyspace-events", "")
        if "K" not in flags or not {"z", "A"} & set(flags):
            await redis.config_set("notify-keyspace-events", flags + "Kz")
    except ResponseError as refused:
        logger.debug("notify-keyspace-events cannot be set: %s", refused)
