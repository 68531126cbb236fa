"""The runs as stored in Redis: their status, published changes, and requested cancellations."""

import time
from collections.abc import Sequence

from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.batch import Batch
from sluice.errors import UnknownBatch

_STATUS_TTL_S = 7 * 86_400  # after the last report on a run
_PAUSED_AFTER_S = 10.0  # without a report; a feeder sends one every two seconds


class BatchRegistry:
    """Stores and reads the status of runs. Raises redis-py's errors."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, batch: Batch) -> None:
        """Store the status without publishing it."""
        await self._redis.set(keys.batch(batch.id), batch.to_json(), ex=_STATUS_TTL_S)

    async def touch(self, batch_id: str) -> None:
        """Reset the key's time to live, which shows that a process feeds the run. Works on a full server too."""
        await self._redis.expire(keys.batch(batch_id), _STATUS_TTL_S)

    async def announce(self, batch: Batch) -> None:
        """Store and publish the status."""
        status = batch.to_json()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(keys.batch(batch.id), status, ex=_STATUS_TTL_S)
            pipe.publish(keys.batch_channel(batch.id), status)
            if batch.ended:
                pipe.delete(keys.batch_cancel(batch.id))
            await pipe.execute()

    async def withdraw(self, batch: Batch) -> None:
        """Publish the end of a run that queued nothing, and delete its status."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.batch(batch.id), keys.batch_cancel(batch.id))
            pipe.publish(keys.batch_channel(batch.id), batch.to_json())
            await pipe.execute()

    async def announce_late(self, batch: Batch) -> None:
        """Announce the status unless it is already stored. The process that ended the run may have died before that."""
        if await self._redis.get(keys.batch(batch.id)) != batch.to_json().encode():
            await self.announce(batch)

    async def read(self, batch_id: str) -> Batch:
        """Return the status of a run. Raises `UnknownBatch`."""
        (found,) = await self._read([keys.batch(batch_id)])
        if found is None:
            raise UnknownBatch(f"there is no offline run {batch_id!r}")
        return found

    async def read_all(self, found: Sequence[bytes]) -> list[Batch]:
        """Return the runs among the given keys, oldest first."""
        statuses = await self._read([key for key in found if not key.endswith(b":cancel")])
        return sorted(filter(None, statuses), key=lambda batch: (batch.created_at, batch.id))

    async def _read(self, names: Sequence[str | bytes]) -> list[Batch | None]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(name)
                pipe.pttl(name)
            flat = await pipe.execute() if names else []
        return [_read(raw, left_ms) for raw, left_ms in zip(flat[::2], flat[1::2], strict=True)]

    async def request_cancel(self, batch_id: str) -> None:
        """Request the cancellation of a run. Its feeder checks for such requests, as does one that resumes it."""
        await self._redis.set(keys.batch_cancel(batch_id), "1", ex=_STATUS_TTL_S)

    async def is_cancel_requested(self, batch_id: str) -> bool:
        """Return True if the cancellation of the run is requested."""
        return bool(await self._redis.exists(keys.batch_cancel(batch_id)))


def _read(raw: bytes | None, left_ms: int) -> Batch | None:
    """Parse a status, and mark it as paused if the key's remaining life shows that its feeder has stopped reporting."""
    if raw is None:
        return None
    batch, silent_s = Batch.from_json(raw), _STATUS_TTL_S - left_ms / 1000
    return batch.paused(time.time() - silent_s) if silent_s > _PAUSED_AFTER_S else batch
