"""The runs as stored in Redis: their status, requested cancellations, and published changes."""

import time
from collections.abc import Sequence

from redis.asyncio import Redis

from sluice import wire
from sluice.batch.status import Batch
from sluice.errors import UnknownBatch

_TOLD_S = 7 * 86_400  # after the last word on a run
_SILENT_S = 10.0  # after it nobody feeds the run: a feeder is heard of every two seconds


class BatchRegistry:
    """Stores and reads the status of runs. Raises redis-py's errors."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, batch: Batch) -> None:
        """Store the status without publishing it."""
        await self._redis.set(wire.batch_key(batch.id), batch.to_json(), ex=_TOLD_S)

    async def touch(self, batch_id: str) -> None:
        """Extend the life of the status, to show that a process feeds the run. Works on a full server too."""
        await self._redis.expire(wire.batch_key(batch_id), _TOLD_S)

    async def announce(self, batch: Batch) -> None:
        """Store and publish the status."""
        said = batch.to_json()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(wire.batch_key(batch.id), said, ex=_TOLD_S)
            pipe.publish(wire.batch_channel(batch.id), said)
            if batch.ended:
                pipe.delete(wire.batch_cancel_key(batch.id))
            await pipe.execute()

    async def withdraw(self, batch: Batch) -> None:
        """Publish the end of a run that queued nothing, and keep nothing of it."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(wire.batch_key(batch.id), wire.batch_cancel_key(batch.id))
            pipe.publish(wire.batch_channel(batch.id), batch.to_json())
            await pipe.execute()

    async def announce_late(self, batch: Batch) -> None:
        """Announce the status unless it is stored: the process that reached it may have died before announcing."""
        if await self._redis.get(wire.batch_key(batch.id)) != batch.to_json().encode():
            await self.announce(batch)

    async def read(self, batch_id: str) -> Batch:
        """Return the status of a run. Raises `UnknownBatch`."""
        (found,) = await self._read([wire.batch_key(batch_id)])
        if found is None:
            raise UnknownBatch(f"there is no offline run {batch_id!r}")
        return found

    async def read_all(self, keys: Sequence[bytes]) -> list[Batch]:
        """Return the runs among the given keys, oldest first."""
        found = await self._read([key for key in keys if not key.endswith(b":cancel")])
        return sorted(filter(None, found), key=lambda batch: (batch.created_at, batch.id))

    async def _read(self, names: Sequence[str | bytes]) -> list[Batch | None]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(name)
                pipe.pttl(name)
            flat = await pipe.execute() if names else []
        return [_read(said, left_ms) for said, left_ms in zip(flat[::2], flat[1::2], strict=True)]

    async def request_cancel(self, batch_id: str) -> None:
        """Request cancellation. The process that feeds the run checks for it, or the next one to start it."""
        await self._redis.set(wire.batch_cancel_key(batch_id), "1", ex=_TOLD_S)

    async def end_is_wished(self, batch_id: str) -> bool:
        """True if cancellation is requested."""
        return bool(await self._redis.exists(wire.batch_cancel_key(batch_id)))


def _read(said: bytes | None, left_ms: int) -> Batch | None:
    """Parse a status. The key's remaining life tells, by the server's clock, when the feeder last reported."""
    if said is None:
        return None
    batch, silent_s = Batch.from_json(said), _TOLD_S - left_ms / 1000
    return batch.paused(time.time() - silent_s) if silent_s > _SILENT_S else batch
