"""Cancellation of jobs: immediate while a job is queued, through its worker when it runs."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Literal

from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.refusals import is_full, reason_of
from sluice.contract.scripts import cancel_args, source
from sluice.errors import CancelNotStored
from sluice.transport import MAX_CALLS, Retries

CancelOutcome = Literal["cancelled", "requested", "ended"]


class Cancellation:
    """Cancels jobs with the script `cancel.lua`."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._script = redis.register_script(source("cancel"))

    async def cancel(self, job_id: str) -> CancelOutcome:
        """Cancel one job; the outcomes are those of `Client.cancel`. Raises `CancelNotStored`."""
        call_id = _new_call_id()
        outcome, error = await self._cancel(job_id, [], call_id)
        if outcome == b"lost":  # queued by a plain producer: its state does not name the queue
            outcome, error = await self._search(job_id, error, call_id)
        if error is not None and is_full(error):
            raise CancelNotStored(f"the request to cancel {job_id!r} was not stored: {reason_of(error)}") from error
        if error is not None:
            raise error
        return _parse_outcome(outcome)

    async def cancel_all(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs that `Submission` queued, riding out an outage. A server out of memory stores no request for
        running jobs; their workers receive it all the same."""
        for start in range(0, len(job_ids), MAX_CALLS):
            await self._retries.run_until_answered(partial(self._cancel_some, job_ids[start : start + MAX_CALLS]))

    async def _cancel_some(self, job_ids: Sequence[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                await self._script(keys=[], args=_kept(job_id), client=pipe)
            for answer in await pipe.execute(raise_on_error=False):
                if isinstance(answer, Exception) and not is_full(answer):
                    raise answer

    async def end_waiting(self, queue: str, job_ids: Sequence[bytes]) -> int:
        """Cancel the given jobs that wait in this queue; others are unchanged. Returns the number of jobs cancelled."""
        ended, call_id = 0, _new_call_id()
        for start in range(0, len(job_ids), MAX_CALLS):
            chunk = job_ids[start : start + MAX_CALLS]
            ended += await self._retries.run(partial(self._end_some, queue, chunk, call_id))
        return ended

    async def _end_some(self, queue: str, job_ids: Sequence[bytes], call_id: str) -> int:
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                await self._script(keys=[queue], args=cancel_args(job_id, call_id=call_id), client=pipe)
            answers: list[list[bytes]] = await pipe.execute()
        return sum(answer[0] == b"cancelled" for answer in answers)

    async def _search(self, job_id: str, error: Exception | None, call_id: str) -> tuple[bytes, Exception | None]:
        queues = sorted(await self._retries.scan(keys.QUEUES))
        for start in range(0, len(queues), MAX_CALLS):
            outcome, error = await self._cancel(job_id, queues[start : start + MAX_CALLS], call_id)
            if outcome == b"ended":
                break  # a worker has received the request in the meantime
            if outcome != b"lost":
                return outcome, error
        return b"requested", error

    async def _cancel(self, job_id: str, queues: Sequence[bytes], call_id: str) -> tuple[bytes, Exception | None]:
        args = _kept(job_id, call_id)
        outcome, *errors = await self._retries.run(lambda: self._script(keys=list(queues), args=args))
        return outcome, errors[0] if errors else None


def _kept(job_id: str, call_id: str = "") -> list[str | bytes | int]:
    """Return the arguments of a request to cancel that is stored for an hour, if the job does not end at once."""
    return cancel_args(job_id, keep_ms=3_600_000, call_id=call_id)


def _new_call_id() -> str:
    """Return an id that the script stores with the jobs it ends, so that a resent call recognizes them."""
    return uuid.uuid4().hex


def _parse_outcome(outcome: bytes) -> CancelOutcome:
    match outcome:
        case b"cancelled":
            return "cancelled"
        case b"ended":
            return "ended"
    return "requested"
