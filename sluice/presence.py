"""The live workers, each of which keeps a hash about itself on the server."""

from typing import Any

from redis.asyncio import Redis

from sluice import wire
from sluice.transport.retries import Command, Retries


class Workers:
    """Reads what workers publish about themselves. Values of others under such a key are skipped."""

    def __init__(self, redis: Redis, retries: Retries, *, waits_out_outages: bool = False) -> None:
        self._redis, self._retries, self._waits_out_outages = redis, retries, waits_out_outages

    async def read_all(self) -> list[dict[str, str]]:
        """The fields of each live worker."""
        keys = await self._retries.scan(wire.WORKERS, waits_out_outages=self._waits_out_outages)
        found = [await self._read(key) for key in keys]
        return [worker for worker in found if worker]

    async def models(self) -> set[str]:
        """The models that are served."""
        return {worker["model"] for worker in await self.read_all() if "model" in worker}

    async def _read(self, key: bytes) -> dict[str, str]:
        """Nothing if the worker has just left, or if the key holds no hash."""
        if await self._send(lambda: self._redis.type(key)) != b"hash":
            return {}
        fields: dict[bytes, bytes] = await self._send(lambda: self._redis.hgetall(key))  # type: ignore[arg-type]
        return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()}

    async def _send(self, command: Command) -> Any:
        return await (self._retries.run_until_answered if self._waits_out_outages else self._retries.run)(command)
