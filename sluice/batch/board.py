"""Where runs are told of in Redis: how each goes, that its end is wished for, and each change of its state."""

from collections.abc import Sequence

from redis.asyncio import Redis

from sluice import wire
from sluice.batch.status import Batch
from sluice.errors import UnknownBatch

_TOLD_S = 7 * 86_400  # after the last word on a run


class Board:
    """Raises redis-py's errors."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, batch: Batch) -> None:
        await self._redis.set(wire.batch_key(batch.id), batch.to_json(), ex=_TOLD_S)

    async def announce(self, batch: Batch) -> None:
        """To those who listen too."""
        said = batch.to_json()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(wire.batch_key(batch.id), said, ex=_TOLD_S)
            pipe.publish(wire.batch_channel(batch.id), said)
            if batch.ended:
                pipe.delete(wire.batch_cancel_key(batch.id))
            await pipe.execute()

    async def announce_late(self, batch: Batch) -> None:
        """Unless it is known: whoever came to this state may have died before a word of it."""
        if await self._redis.get(wire.batch_key(batch.id)) != batch.to_json().encode():
            await self.announce(batch)

    async def read(self, batch_id: str) -> Batch:
        """Raises `UnknownBatch`."""
        said: bytes | None = await self._redis.get(wire.batch_key(batch_id))
        if said is None:
            raise UnknownBatch(f"there is no offline run {batch_id!r}")
        return Batch.from_json(said)

    async def read_all(self, keys: Sequence[bytes]) -> list[Batch]:
        """Those of the given keys that are runs, oldest first."""
        names = [key for key in keys if not key.endswith(b":cancel")]
        stored: list[bytes | None] = await self._redis.mget(names) if names else []
        batches = [Batch.from_json(each) for each in stored if each is not None]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    async def ask_for_end(self, batch_id: str) -> None:
        """Whoever feeds the run sees it at its next look; a run that waits, when it is taken."""
        await self._redis.set(wire.batch_cancel_key(batch_id), "1", ex=_TOLD_S)

    async def end_is_wished(self, batch_id: str) -> bool:
        return bool(await self._redis.exists(wire.batch_cancel_key(batch_id)))
