"""Finds out if the events or the result of an answer are still stored, and how long they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from redis.asyncio import Redis

from sluice import wire
from sluice.transport.retries import Retries

_SAMPLE = 8  # events, whose mean length is taken for that of all


class Available(Enum):
    """What the server still has of a job that was queued. A job with events may have a result, too."""

    EVENTS = auto()
    RESULT = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What the server has of an answer: `available` is that of its first job, the bytes are those of all jobs together.
    Those of events are their number by the mean length of the last ones. `is_lost`: the first job has failed or was
    cancelled."""

    available: Available
    result_bytes: int
    event_bytes: int
    is_lost: bool


async def read_stored(redis: Redis, retries: Retries, job_ids: Sequence[str]) -> StoredAnswer:
    """Return what the server has of the answer that these jobs make, in one round trip."""
    first = job_ids[0]

    async def read() -> list[Any]:
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hget(wire.job_key(first), "state")
            pipe.exists(wire.body_key(first))
            for job_id in job_ids:
                pipe.strlen(wire.result_key(job_id))
                pipe.llen(wire.log_key(job_id))
                pipe.lrange(wire.log_key(job_id), -_SAMPLE, -1)
            return await pipe.execute()

    state, has_body, *sizes = await retries.run(read)
    event_bytes = sum(map(_event_bytes, sizes[1::3], sizes[2::3]))
    if sizes[1] or state in (b"queued", b"running") or (has_body and state is None):
        available = Available.EVENTS
    else:
        available = Available.NOTHING if state is None else Available.RESULT
    return StoredAnswer(available, sum(sizes[::3]), event_bytes, state in (b"failed", b"cancelled"))


def _event_bytes(number: int, last: Sequence[bytes]) -> int:
    return number * sum(map(len, last)) // max(1, len(last))
