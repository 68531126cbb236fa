"""Claims jobs under a lease for the rows that are free, and releases them."""

import asyncio
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from arq.constants import in_progress_key_prefix, job_key_prefix, retry_key_prefix
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from sluice.batch.times import Hours
from sluice.contract import keys
from sluice.contract.keys import Lane
from sluice.transport import blocking_client, follow_primary
from worker.monitoring.health import Heartbeat
from worker.queue.job.resume_state import ResumeState
from worker.queue.scripts import JOB_LIFE_MS, arguments, reply_fields, script, worker_source
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

MAX_COUNTS = 8  # token counts at once that take no row: they share the text threads with the prompts of chats


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this worker owns until its lease expires. `attempt` fences every write."""

    job_id: str
    lane: Lane
    attempt: int
    crashes: int
    cancelled: bool
    queued_at: float  # Unix seconds, never negative, by the producer's clock
    events: int  # number of events in the log, from earlier attempts
    body: bytes  # empty if it is missing or large (see `Claims.body`), or if the job's deadline has passed
    body_bytes: int
    tenant: str = ""  # empty if the producer gave none
    user: str = ""  # of the tenant; empty if the producer gave none
    lease_expirations: int = 0  # times that its lease expired while it ran, for any reason
    expired: bool = False  # its deadline has passed
    is_count: bool = False  # a token count of our submit, which takes no row
    left_at: float | None = None  # Unix seconds, by the server's clock; None: it was left to no better worker
    alias: str = ""  # the name that it was queued under, if that was an alias of the model
    traceparent: str = ""  # of the producer's span, in W3C's form, as it came; empty if there is none
    phases: bytes | None = field(default=None, repr=False)  # of earlier attempts, as `JobPhases` stores them
    # Left by an earlier attempt; None if another program wrote it.
    resume_state: ResumeState | None = field(default_factory=ResumeState)

    @property
    def computes(self) -> bool:
        """True if the job computes an answer, in a row."""
        return not self.is_count and not self.expired

    def record(self, **more: object) -> dict[str, object]:
        """Return the fields of a line of the log about this job, with `more`, for the log as JSON."""
        tenant = {"tenant": self.tenant} if self.tenant else {}
        return {"job": self.job_id, **tenant, "queue": self.lane, "attempt": self.attempt, **more}

    def age_s(self, now: float) -> float:
        """Seconds since it was queued; 0 if the producer's clock is ahead."""
        return max(0.0, now - self.queued_at)


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """The rows of a worker, as it tells the other workers of the model in its claims: they share jobs by them."""

    in_use: int
    max_rows: int
    free: Mapping[Lane, int]  # that each lane may still take
    step_times: tuple[float, ...] = ()  # seconds of decode steps by rows, see `StepTimes`: its speed

    def as_arguments(self) -> list[int]:
        """Return the numbers in the order in which share.lua reads them."""
        free = [max(0, self.free[lane]) for lane in keys.LANES]
        return [self.in_use, self.max_rows, *free, *(round(seconds * 1e6) for seconds in self.step_times)]


def free_rows(lane: Lane, running: Collection[Claim], settings: Settings, now: datetime) -> int:
    """Return the number of rows that the lane may still take; negative if it has more than it may have.

    Interactive jobs ignore offline rows: if rows are short, offline rows are preempted. Offline jobs leave
    `reserved_rows` free, so that the first interactive jobs need no preemption, and outside of `batch_hours` they take
    at most `batch_off_hours_rows`. `MAX_COUNTS` token counts take no row; further ones count as rows, so that a worker
    claims no more of them than of chats.
    """
    taken = _with_rows(running)
    rows, offline = len(taken), sum(claim.lane == "batch" for claim in taken)
    if lane == "interactive":
        return settings.max_rows - (rows - offline)
    free = settings.max_rows - rows
    return min(free - settings.reserved_rows, offline_rows(settings, now) - offline)


def worker_rows(
    running: Collection[Claim], settings: Settings, now: datetime, step_times: Sequence[float]
) -> WorkerRows:
    """Return the rows of this worker, as other workers need them to share jobs. `step_times`: see `WorkerRows`."""
    free = {lane: max(0, free_rows(lane, running, settings, now)) for lane in keys.LANES}
    return WorkerRows(len(_with_rows(running)), settings.max_rows, free, tuple(step_times))


def _with_rows(running: Collection[Claim]) -> list[Claim]:
    """Return the claims that take a row."""
    counts = [claim for claim in running if claim.is_count]
    return [*(claim for claim in running if not claim.is_count), *counts[MAX_COUNTS:]]


def offline_rows(settings: Settings, now: datetime) -> int:
    """Return the number of rows that offline jobs may have at this time if there are no interactive jobs."""
    hours = settings.batch_hours
    inside = hours is None or now in Hours.read(hours)
    unreserved = settings.max_rows - settings.reserved_rows
    return unreserved if inside else min(unreserved, settings.batch_off_hours_rows)


def lease_key(job_id: str) -> str:
    """Return arq's in-progress key of the job, so that arq's `Job.status()` is right about our jobs."""
    return in_progress_key_prefix + job_id


def cleanup_keys(job_id: str) -> list[str]:
    """Return the keys to delete when the job ends: its cancel key, and arq's keys."""
    return [keys.cancel(job_id), job_key_prefix + job_id, lease_key(job_id), retry_key_prefix + job_id]


class _Fleet(Protocol):
    """How a worker tells the claims of others how busy it is and what it holds. `FleetRecord` has it."""

    def said(self, free_rows: int) -> tuple[str, str, int]:
        """Return the worker's id, its record, and when it will be done with its prompts, in Unix milliseconds; empty
        texts and 0 if jobs are to be claimed in turn. `free_rows`: that interactive jobs may still take."""

    def claimed(self, job_id: str, marks: str, bytes_: int, expected_tokens: int) -> None:
        """Count a claimed job. `marks`: as in its hash, of `bytes_`; `expected_tokens`: in the prefix cache."""

    def counted(
        self,
        *,
        cache: int,
        load: int,
        overruled_s: Sequence[float],
        left_s: Sequence[float],
        scanned: int,
        seconds: float,
    ) -> None:
        """Count a claim, which took `seconds` and looked at `scanned` jobs: jobs left to workers that hold more of them
        or have less to do, the age of each whose time for a better worker was over, and for how long each claimed one
        was left."""


# Jobs are left to other workers for this time, which is lost if one of them is dead or slow. An idle worker claims 1 to
# 3 ms after it is woken, and several of them on a busy machine within 8: `scripts/chaos burst`.
_LEFT_S = 0.008
_RESUME_FIELDS = tuple(ResumeState.model_fields)


class Claims:
    """Claims and releases jobs of the queues of one model."""

    def __init__(self, redis: Redis, settings: Settings, fleet: _Fleet | None = None) -> None:
        """`fleet`: by which jobs are left to workers that are done with them sooner; None: they are claimed in turn."""
        self._model, self._worker = settings.model_name, settings.worker_name
        self._fleet = fleet if settings.has_affinity else None
        self._per_tenant = settings.prefix_cache_per_tenant
        self._lease_ms, self._max_bytes = int(settings.lease_s * 1000), settings.max_request_bytes
        self._redis = redis
        # Bodies up to this size come with the claim. Larger ones would delay the other jobs of the same reply, and
        # block the server while it builds the reply.
        self._inline_bytes = min(65_536, self._max_bytes)
        self._reply_lost, self._claim_lock = set[Lane](), asyncio.Lock()
        self._unreconciled = set[Lane]()
        self._due_at = dict.fromkeys(keys.LANES, math.inf)  # monotonic
        self._again_at = dict.fromkeys(keys.LANES, math.inf)  # of a job that was left to a better worker
        # Jobs left to others by rows, by lane: the monotonic time at which they have been left for long enough, and the
        # server's time in milliseconds until which they were queued.
        self._left: dict[Lane, deque[tuple[float, int]]] = {lane: deque() for lane in keys.LANES}
        self._told_rows: tuple[WorkerRows, float] | None = None  # and the monotonic time
        self._queues = [keys.queue(self._model, lane) for lane in keys.LANES]
        self._wake_channel = keys.wake(self._model)
        self._claim = script(redis, "claim")
        self._release = script(redis, "release")
        self._forward = script(redis, "forward")

    async def take(
        self,
        lane: Lane,
        limit: int,
        *,
        running: Collection[Claim] = (),
        counts: int = 0,
        suspects: int = 0,
        takeover: bool = True,
        rows: WorkerRows | None = None,
        wake: bool = False,
    ) -> list[Claim]:
        """Claim up to `limit` jobs, and in addition up to `counts` token counts and jobs whose deadline has passed.

        `running`: the claims that this worker runs now, for fairness between tenants and between users. `suspects`: the
        number of them that are on probation. If `takeover` is False, jobs of other workers whose leases expired are not
        claimed. `rows`: of this worker, by which it shares jobs with other workers of the model; None: it shares none.
        `wake`: wake the workers that jobs are left to, since nothing else has woken them for these jobs. Raises
        RedisError, OSError.
        """
        async with self._claim_lock:
            lost = lane in self._reply_lost
            known = [claim.job_id for claim in running] if lost else []
            self._reply_lost.add(lane)  # until this reply has arrived
            free = rows.free["interactive"] if rows else limit
            wid, record, ready_ms = self._fleet.said(free) if self._fleet else ("", "", 0)
            began = time.monotonic()
            reply = await self._claim(
                keys=[keys.queue(self._model, lane)],
                args=arguments(
                    want=limit,
                    counts=counts,
                    lease_ms=self._lease_ms,
                    worker=self._worker,
                    lane=lane,
                    life_ms=JOB_LIFE_MS,
                    max_body_bytes=self._inline_bytes,
                    takeover=int(takeover),
                    suspects=suspects,
                    reply_lost=int(lost),
                    running=known,
                    rows=_names(claim for claim in running if not claim.is_count),
                    resume_fields=(*_RESUME_FIELDS, "alias", "left_at", "traceparent", "phases"),
                    count_rows=_names(claim for claim in running if claim.is_count),
                    left_at=self._left_at(lane),
                    wake=self._wake_channel if wake else "",
                    rows_changed=int(self._must_tell(rows)),
                    wid=wid,
                    record=record,
                    ready_ms=ready_ms,
                    per_tenant=int(self._per_tenant),
                    worker_rows=rows.as_arguments() if rows else [],
                ),
            )
            self._reply_lost.discard(lane)
        claims = self._read(lane, reply_fields(reply), time.monotonic() - began)
        if claims:  # the script has counted their rows
            self._told_rows = None
        elif rows and self._must_tell(rows):
            self._told_rows = rows, time.monotonic()
        return claims

    def _left_at(self, lane: Lane) -> int:
        """Return the server's time in milliseconds until which jobs were queued that other workers have not taken in
        time; 0 if there are none."""
        left, left_at = self._left[lane], 0
        while left and left[0][0] <= time.monotonic():
            left_at = left.popleft()[1]
        return left_at

    def _must_tell(self, rows: WorkerRows | None) -> bool:
        """True if other workers do not know these rows, or will have forgotten them before long."""
        if rows is None or self._told_rows is None:
            return rows is not None
        told, at = self._told_rows
        return rows != told or time.monotonic() - at > self._lease_ms / 3000

    def _read(self, lane: Lane, reply: dict[str, Any], call_s: float) -> list[Claim]:
        now = time.monotonic()
        self._due_at[lane] = now + reply["next_due_ms"] / 1000 if reply["next_due_ms"] else math.inf
        self._again_at[lane] = now + reply["again_ms"] / 1000 if reply["again_ms"] else math.inf
        if reply["left"]:
            self._left[lane].append((time.monotonic() + _LEFT_S, reply["now"]))
        else:
            self._left[lane].clear()
        (self._unreconciled.add if reply["more"] else self._unreconciled.discard)(lane)
        for found in reply["foreign"]:
            logger.warning("deleted a foreign value: %s", found.decode("utf-8", "backslashreplace"))
        read = [reply_fields(claim) for claim in reply["claims"]]
        claims = [_read_claim(lane, values) for values in read]
        if self._fleet:
            self._tell(self._fleet, reply, claims, read, call_s)
        return claims

    def _tell(
        self, fleet: _Fleet, reply: dict[str, Any], claims: list[Claim], read: list[dict[str, Any]], call_s: float
    ) -> None:
        fleet.counted(
            cache=reply["cache"],
            load=reply["load"],
            overruled_s=[waited_ms / 1000 for waited_ms in reply["overruled"]],
            left_s=[reply["now"] / 1000 - each.left_at for each in claims if each.left_at and each.attempt == 1],
            scanned=reply["scanned"],
            seconds=call_s,
        )
        for claim, values in zip(claims, read, strict=True):
            if claim.computes:
                marks = values["marks"].decode("utf-8", "replace")
                fleet.claimed(claim.job_id, marks, values["bytes"], values["expected_tokens"])

    def needs_reconcile(self, lane: Lane) -> bool:
        """True if the lane's index does not match its queue yet: claim again at once, even if no row is free."""
        return lane in self._unreconciled

    def next_at(self, lane: Lane) -> float:
        """Return when to claim next, by the monotonic clock, as the last claim found, which left a row free: a job will
        be due then, or has been left to other workers for long enough. Infinite if there is no such job."""
        left_at = self._left[lane][0][0] if self._left[lane] else math.inf
        return min(self._due_at[lane], self._again_at[lane], left_at)

    async def body(self, claim: Claim) -> bytes:
        """Return the job's body; empty if it is missing or above `max_request_bytes`. Raises RedisError, OSError."""
        if claim.body or not 0 < claim.body_bytes <= self._max_bytes:
            return claim.body
        try:
            found = await self._redis.get(job_key_prefix + claim.job_id)
        except ResponseError:  # the key holds a foreign value now
            return b""
        return bytes(found or b"")

    async def forward(self, *, takeover: bool) -> bool:
        """Move jobs that were queued under an alias of the model into its queues. Returns True if there were any.
        `takeover`: as in `take`. Raises RedisError, OSError."""
        moved: int = await self._forward(args=[self._model, JOB_LIFE_MS, int(takeover)])
        return moved > 0

    async def release(self, claim: Claim) -> None:
        """Return the job to its queue and wake the workers. Does nothing if another attempt owns the job. Raises
        RedisError, OSError."""
        await self._release(
            keys=[keys.job(claim.job_id), lease_key(claim.job_id), keys.queue(self._model, claim.lane)],
            args=[claim.attempt, self._wake_channel],
        )


class Takeover:
    """Forbids takeovers for one lease after an outage: no worker could renew its leases meanwhile, so those of live
    workers expired too, and these must have time to renew them."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._answered_at = self._allowed_from = time.monotonic()

    def record_first_answer(self, server_up_s: float) -> None:
        """Record the first answer of the server. An uptime of less than a lease counts as an outage."""
        self._answered_at = time.monotonic()
        if server_up_s < self._lease_s:
            self._allowed_from = self._answered_at + self._lease_s

    def record_answer(self) -> None:
        """Record an answer of the server."""
        self._answered_at = time.monotonic()

    def allowed(self) -> bool:
        """True if takeovers are allowed. Call it before each claim: half a lease without an answer is an outage."""
        now = time.monotonic()
        if now - self._answered_at > self._lease_s / 2:
            self._allowed_from = now + self._lease_s
        return now >= self._allowed_from


def _names(claims: Iterable[Claim]) -> list[str]:
    """Return the tenant and the user of each claim."""
    return [name for claim in claims for name in (claim.tenant, claim.user)]


def _read_claim(lane: Lane, values: dict[str, Any]) -> Claim:
    *resume_state, alias, left_at, traceparent, phases = values["resume_state"]
    latest_ms = 1e15  # year 33658: finite, so that it can be compared with any clock
    return Claim(
        job_id=values["job_id"].decode("utf-8", "surrogateescape"),
        lane=lane,
        attempt=values["attempt"],
        crashes=values["crashes"],
        cancelled=bool(values["cancelled"]),
        queued_at=min(max(0.0, float(values["queued_ms"])), latest_ms) / 1000,  # a score may be infinite
        events=values["events"],
        body=values["body"],
        body_bytes=values["body_bytes"],
        tenant=values["tenant"].decode("utf-8", "replace"),
        user=values["user"].decode("utf-8", "replace"),
        lease_expirations=values["lease_expirations"],
        expired=bool(values["expired"]),
        is_count=bool(values["is_count"]),
        left_at=float(left_at) if re.fullmatch(rb"\d{1,12}\.\d{3}", left_at or b"") else None,
        alias=(alias or b"").decode("utf-8", "replace"),
        traceparent=(traceparent or b"").decode("utf-8", "replace"),
        phases=phases,
        resume_state=ResumeState.load(dict(zip(_RESUME_FIELDS, resume_state, strict=True))),
    )


EXIT_STALLED = 4


class LeaseKeeper:
    """Renews the leases of running jobs three times per lease, on a thread and a connection of its own: a busy event
    loop or a garbage collection costs no lease, and only a dead worker loses its jobs."""

    def __init__(
        self,
        settings: Settings,
        claims: Callable[[], Iterable[Claim]],
        on_lost: Callable[[Claim], None],
        heartbeats: Iterable[Heartbeat],
        on_stall: Callable[[], None] = lambda: os._exit(EXIT_STALLED),
    ) -> None:
        """`claims` returns the running claims, `on_lost` receives each claim that this worker no longer owns, and
        `on_stall` ends the process. All are called on the keeper's thread."""
        self._settings = settings
        self._claims = claims
        self._on_lost = on_lost
        self._on_stall = on_stall
        self._heartbeats = tuple(heartbeats)
        self._every_s = settings.lease_s / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._redis = blocking_client(
            settings.redis_url, socket_timeout=self._every_s, socket_connect_timeout=self._every_s
        )
        self._renew = self._redis.register_script(worker_source("renew"))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing. Returns at once; a renewal in progress is fenced, so it cannot harm a later attempt."""
        self._stop.set()

    def _run(self) -> None:
        """Renew until stopped. Any other end of this thread ends the process: its jobs would be taken over anyway."""
        try:
            self._renew_until_stopped()
        finally:
            if not self._stop.is_set():
                logger.critical("the thread that renews leases has ended: ending the process")
                self._on_stall()

    def _renew_until_stopped(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            slept_through = time.monotonic() - due > self._every_s
            due = time.monotonic() + self._every_s
            self._renew_all()
            if slept_through:  # the whole process was suspended, so old heartbeats mean nothing
                for heartbeat in self._heartbeats:
                    heartbeat.refresh()
            self._check_heartbeats()

    def _renew_all(self) -> None:
        claims = list(self._claims())
        if not claims:
            return
        try:
            for claim in self._renew_leases(claims):
                self._on_lost(claim)
        except (RedisError, OSError):
            pass  # retried in a third of a lease; after an outage the same call sets expired leases again
        except Exception:  # the border of this thread: a failed round does not prevent the next one
            logger.exception("leases were not renewed: trying again in %.1f s", self._every_s)

    def _renew_leases(self, claims: list[Claim]) -> list[Claim]:
        """Renew the leases. Returns the claims that this worker no longer owns."""
        names = [_as_bytes(name) for claim in claims for name in _keys_of(claim.job_id)]
        follow_primary(self._redis)
        lease_ms, name = int(self._settings.lease_s * 1000), self._settings.worker_name
        answer = self._renew(keys=names, args=[lease_ms, JOB_LIFE_MS, name, *(c.attempt for c in claims)])
        return [claims[i - 1] for i in answer]

    def _check_heartbeats(self) -> None:
        """End the process if a heartbeat has stalled for longer than `watchdog_s`."""
        for heartbeat in self._heartbeats:
            if heartbeat.stalled_s() > self._settings.watchdog_s:
                logger.critical("the %s has hung for %.0f s: ending the process", heartbeat.name, heartbeat.stalled_s())
                self._on_stall()


def _keys_of(job_id: str) -> tuple[str, str, str]:
    return keys.job(job_id), lease_key(job_id), keys.log(job_id)


def _as_bytes(key: str) -> bytes:
    """Encode a key whose id may not be UTF-8. redis-py's blocking client ignores `encoding_errors` with hiredis."""
    return key.encode("utf-8", "surrogateescape")
