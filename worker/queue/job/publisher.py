"""Writes the events of jobs to Redis: one fenced call for all rows of a step."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys
from sluice.contract.refusals import reason_of
from worker.errors import OwnershipLost
from worker.json_bytes import dumps
from worker.queue.job.claims import Claim, cleanup_keys
from worker.queue.redis_server import ServerClock
from worker.queue.scripts import JOB_LIFE_MS, arguments, script
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

State = Literal["finished", "failed", "cancelled"]
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_MAX_UNWRITTEN = 20_000  # unwritten events; above it the engine is paused


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of a job, written with its final event."""

    state: State
    result: bytes  # as stored
    dead_letter: bytes  # the dead letter; empty unless the job is a poison job


@dataclass(slots=True)
class JobLog:
    """Events of one job, those of earlier attempts first. All stay in memory until the job has ended, so that a list
    that a failover has shortened can be completed."""

    claim: Claim
    clock: ServerClock
    on_change: Callable[[], None]
    on_lost: Callable[[], None]  # called when the fence shows that another attempt owns the job
    events: list[bytes] = field(default_factory=list)
    unwritten_fields: dict[str, str | int] = field(default_factory=dict)  # see `store`
    written: int = 0  # number of events in Redis
    ending: _Ending | None = None
    all_written: asyncio.Event = field(default_factory=asyncio.Event)
    fenced: bool = False
    on_abandoned: Callable[[], None] | None = None  # called after `disconnect_grace_s` without a subscriber
    abandoned_since: float | None = None  # monotonic seconds; None if the last event had a subscriber

    def emit(self, type: str, **content: object) -> None:
        """Add an event, which the publisher writes soon. Does not block."""
        event = {
            "id": self.claim.job_id,
            "seq": len(self.events),
            "attempt": self.claim.attempt,
            "type": type,
            "ts": round(self.clock.now(), 6),
            **content,
        }
        self.events.append(dumps(event))
        self.all_written.clear()
        self.on_change()

    def store(self, fields: Mapping[str, str | int]) -> None:
        """Set fields of the job's hash. They are written in one call with the next events, so not before an event."""
        self.unwritten_fields |= fields

    def load(self, events: list[bytes]) -> None:
        """Set the events of earlier attempts, which are in Redis. Events of this attempt follow them."""
        self.events, self.written = events, len(events)

    @property
    def pending(self) -> bool:
        """True if events must still be written."""
        return not self.fenced and self.written < len(self.events)

    def record_written(self, upto: int, sent: dict[str, str | int], *, alone: bool, grace_s: float) -> None:
        """Record that the first `upto` events and the fields `sent` are in Redis. Fields changed since stay.

        `alone`: the last event had no subscriber. After `grace_s` seconds of that, `on_abandoned` is called.
        """
        self.written = upto
        unwritten = self.unwritten_fields.items()
        self.unwritten_fields = {name: value for name, value in unwritten if sent.get(name) != value}
        if not alone or self.on_abandoned is None:
            self.abandoned_since = None
        elif self.abandoned_since is None:
            self.abandoned_since = time.monotonic()
        elif time.monotonic() - self.abandoned_since > grace_s:
            self.on_abandoned()


class Publisher:
    """The only writer of events. Each call can safely be sent again, so an outage delays events and loses none."""

    def __init__(
        self, redis: Redis, clock: ServerClock, settings: Settings, set_paused: Callable[[bool], None] = lambda on: None
    ) -> None:
        """`set_paused` receives True to pause the engine while too many events wait, and False to continue."""
        self._clock = clock
        self._settings = settings
        self._set_paused = set_paused
        self._append, self._final = script(redis, "append"), script(redis, "final")
        self._logs: dict[str, JobLog] = {}
        self._changed = asyncio.Event()
        self._failures, self._paused = 0, False

    def open(self, claim: Claim, *, on_lost: Callable[[], None]) -> JobLog:
        """Return a log that is written until `close`. `on_lost` is called if another attempt owns the job."""
        log = JobLog(claim, self._clock, self._changed.set, on_lost)
        self._logs[claim.job_id] = log
        return log

    def close(self, log: JobLog) -> None:
        """Forget a log, because its attempt has ended."""
        del self._logs[log.claim.job_id]

    async def until_written(self, log: JobLog) -> None:
        """Wait until all events of the log are in Redis. Raises `OwnershipLost`."""
        while log.pending:
            await log.all_written.wait()
        if log.fenced:
            raise OwnershipLost

    async def finish(
        self, log: JobLog, state: State, result: bytes | None = None, *, dead_letter: bytes = b"", **content: object
    ) -> None:
        """Write the final event with the job's result and state, and wait for it. Without a result, the event itself
        is stored as the result. Raises `OwnershipLost`."""
        log.emit(state, **content)
        log.ending = _Ending(state, log.events[-1] if result is None else result, dead_letter)
        await self.until_written(log)

    @property
    def num_unwritten(self) -> int:
        """Number of events that are not in Redis yet."""
        return sum(len(log.events) - log.written for log in self._logs.values() if not log.fenced)

    async def run(self) -> None:
        """Write pending events, and retry after outages, until this task is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write()
            except (RedisError, OSError) as error:
                await self._wait_out(error)
            else:
                self._end_outage()

    async def _wait_out(self, error: Exception) -> None:
        self._changed.set()
        if self._failures == 0:
            logger.warning(
                "redis does not accept %d events (%s): keeping them until it does",
                self.num_unwritten,
                reason_of(error) or error,
            )
        self._pause_engine(self.num_unwritten > _MAX_UNWRITTEN)
        for log in self._logs.values():
            log.abandoned_since = None  # subscribers have to reconnect too
        await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])
        self._failures += 1

    def _end_outage(self) -> None:
        if self._failures:
            logger.warning("redis accepts events again: all kept events are written")
            self._pause_engine(False)
        self._failures = 0

    def _pause_engine(self, on: bool) -> None:
        if on != self._paused:
            self._paused = on
            self._set_paused(on)

    async def _write(self) -> None:
        pending = [log for log in self._logs.values() if log.pending]
        # A reader of many streams handles the first message first, so a first token waits for no stream that has begun.
        pending.sort(key=lambda log: log.written)
        if running := [log for log in pending if log.ending is None]:
            await self._write_running(running)
        for log in pending:
            if log.ending is not None:
                await self._write_final(log, log.ending)

    async def _write_running(self, logs: list[JobLog]) -> None:
        sent = [(len(log.events), log.unwritten_fields.copy()) for log in logs]
        args: list[bytes | str | int] = [JOB_LIFE_MS]
        for log in logs:
            args += _packed(log)
        answer = await self._append(keys=[keys.job(log.claim.job_id) for log in logs], args=args)
        verdicts = dict(zip(answer[::2], answer[1::2], strict=True))
        for row, log in enumerate(logs):
            self._settle_row(log, sent[row], verdicts.get(row + 1))

    async def _write_final(self, log: JobLog, ending: _Ending) -> None:
        job_id, sent = log.claim.job_id, (len(log.events), log.unwritten_fields.copy())
        model, settings = self._settings.model_name, self._settings
        verdict = await self._final(
            keys=[
                keys.job(job_id),
                keys.log(job_id),
                keys.channel(job_id),
                keys.result(job_id),
                keys.queue(model, log.claim.lane),
                *cleanup_keys(job_id),
            ],
            args=arguments(
                life_ms=JOB_LIFE_MS,
                attempt=log.claim.attempt,
                seq=log.written,
                state=ending.state,
                result=ending.result,
                log_ttl_ms=settings.log_ttl_s * 1000,
                result_ttl_ms=settings.result_ttl_s * 1000,
                dead_letter=ending.dead_letter,
                events=log.events[log.written :],
                fields=[str(part) for pair in sent[1].items() for part in pair],
            ),
        )
        self._settle_row(log, sent, None if verdict == b"done" else verdict)

    def _settle_row(self, log: JobLog, sent: tuple[int, dict[str, str | int]], verdict: int | bytes | None) -> None:
        if isinstance(verdict, int):  # the list has lost events: write again from this length on
            log.written = verdict
            self._changed.set()
        elif verdict == b"fenced":
            log.fenced = True
            log.on_lost()
        else:
            log.record_written(*sent, alone=verdict == b"alone", grace_s=self._settings.disconnect_grace_s)
        if not log.pending:
            log.all_written.set()


def _packed(log: JobLog) -> list[bytes | str | int]:
    events, watch = log.events[log.written :], int(log.on_abandoned is not None)
    header = f"{log.claim.attempt} {log.written} {watch} {len(events)} {len(log.unwritten_fields)}"
    return [header, *events, *(part for pair in log.unwritten_fields.items() for part in pair)]
