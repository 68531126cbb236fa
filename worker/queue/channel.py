"""What a job says, from the worker to Redis: one fenced call for all rows of a step."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from arq.constants import job_key_prefix, retry_key_prefix
from redis.asyncio import Redis
from redis.exceptions import RedisError

from schemas import keys
from worker.errors import OwnershipLost
from worker.queue.claims import Claim, lease_key
from worker.queue.clock import ServerClock
from worker.queue.scripts import JOB_LIFE_MS, dumps, script

logger = logging.getLogger("sluice.queue")

State = Literal["finished", "failed", "cancelled"]
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Ending:
    state: State
    result: bytes


@dataclass(slots=True)
class JobLog:
    """The events of one claim. All of them are kept until the job has ended, so that a list which a failover
    shortened can be filled again."""

    claim: Claim
    clock: ServerClock
    changed: Callable[[], None]
    lost: Callable[[], None]  # called when the fence shows that another attempt owns the job
    events: list[bytes] = field(default_factory=list)
    fields: dict[str, str | int] = field(default_factory=dict)  # for the job's hash, with the next events
    written: int = 0
    ending: Ending | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    fenced: bool = False

    def say(self, type: str, **content: object) -> None:
        event = {
            "id": self.claim.job_id,
            "seq": self.claim.events + len(self.events),
            "attempt": self.claim.attempt,
            "type": type,
            "ts": round(self.clock.now(), 6),
            **content,
        }
        self.events.append(dumps(event))
        self.settled.clear()
        self.changed()

    @property
    def pending(self) -> bool:
        return not self.fenced and self.written < len(self.events)


class Publisher:
    """The only writer of events. Everything is safely sent again, so an outage costs time and nothing else."""

    def __init__(
        self,
        redis: Redis,
        clock: ServerClock,
        model: str,
        *,
        log_ttl_s: int,
        result_ttl_s: int,
    ) -> None:
        self._clock, self._model = clock, model
        self._log_ttl_ms, self._result_ttl_ms = log_ttl_s * 1000, result_ttl_s * 1000
        self._append, self._final = script(redis, "append"), script(redis, "final")
        self._logs: dict[str, JobLog] = {}
        self._changed = asyncio.Event()

    def open(self, claim: Claim, *, lost: Callable[[], None]) -> JobLog:
        log = JobLog(claim, self._clock, self._changed.set, lost)
        self._logs[claim.job_id] = log
        return log

    def close(self, log: JobLog) -> None:
        del self._logs[log.claim.job_id]

    async def settle(self, log: JobLog) -> None:
        """Until everything said so far is in Redis. Raises `OwnershipLost`."""
        while log.pending:
            await log.settled.wait()
        if log.fenced:
            raise OwnershipLost

    async def finish(self, log: JobLog, state: State, result: bytes | None = None, **content: object) -> None:
        """The final event with the result and the state; without a result, the event is the result."""
        log.say(state, **content)
        log.ending = Ending(state, log.events[-1] if result is None else result)
        await self.settle(log)

    async def run(self) -> None:
        failures = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._write()
            except (RedisError, OSError) as error:
                self._changed.set()
                self._say_waiting(failures, error)
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            else:
                if failures:
                    logger.warning("redis is back, everything held has been written")
                failures = 0

    def _say_waiting(self, failures: int, error: Exception) -> None:
        if failures == 0:
            held = sum(len(log.events) - log.written for log in self._logs.values())
            logger.warning("waiting for redis (%s): holding %d events", type(error).__name__, held)

    async def _write(self) -> None:
        pending = [log for log in self._logs.values() if log.pending]
        if running := [log for log in pending if log.ending is None]:
            await self._append_step(running)
        for log in pending:
            if log.ending is not None:
                await self._append_final(log, log.ending)

    async def _append_step(self, logs: list[JobLog]) -> None:
        upto = [len(log.events) for log in logs]
        args: list[bytes | str | int] = [JOB_LIFE_MS]
        for log in logs:
            args += _row(log)
        answer = await self._append(keys=[keys.job(log.claim.job_id) for log in logs], args=args)
        verdicts = dict(zip(answer[::2], answer[1::2], strict=True))
        for row, log in enumerate(logs):
            self._settle_row(log, upto[row], verdicts.get(row + 1))

    async def _append_final(self, log: JobLog, ending: Ending) -> None:
        job_id, upto = log.claim.job_id, len(log.events)
        doomed = [keys.cancel(job_id), job_key_prefix + job_id, lease_key(job_id), retry_key_prefix + job_id]
        verdict = await self._final(
            keys=[
                keys.job(job_id), keys.log(job_id), keys.channel(job_id), keys.result(job_id),
                keys.queue(self._model, log.claim.lane), *doomed,
            ],
            args=[
                JOB_LIFE_MS, log.claim.attempt, log.claim.events + log.written, ending.state, ending.result,
                self._log_ttl_ms, self._result_ttl_ms, *log.events[log.written :],
            ],
        )  # fmt: skip
        self._settle_row(log, upto, None if verdict == b"done" else verdict)

    def _settle_row(self, log: JobLog, upto: int, verdict: int | bytes | None) -> None:
        if isinstance(verdict, int):  # the list is shorter than we left it: fill it again from there
            log.written = verdict - log.claim.events
            if log.written >= 0:
                self._changed.set()
                return
        if verdict is not None:
            log.fenced = True
            log.lost()
        else:
            log.written, log.fields = upto, {}
        if not log.pending:
            log.settled.set()


def _row(log: JobLog) -> list[bytes | str | int]:
    events = log.events[log.written :]
    header = f"{log.claim.attempt} {log.claim.events + log.written} {len(events)} {len(log.fields)}"
    return [header, *events, *(part for pair in log.fields.items() for part in pair)]
