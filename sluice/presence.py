"""The live workers; each publishes a hash about itself on the server."""

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from sluice import wire
from sluice.transport.retries import Command, Retries


def serves(worker: Mapping[str, str]) -> bool:
    """Return True if the worker of these fields takes jobs: one that drains ends its own, and no more."""
    return worker.get("state") != "draining"


class Workers:
    """Reads the hashes that workers publish. Foreign values under such a key are skipped."""

    def __init__(self, redis: Redis, retries: Retries, *, waits_out_outages: bool = False) -> None:
        self._redis = redis
        self._retries = retries
        self._waits_out_outages = waits_out_outages

    async def read_all(self) -> list[dict[str, str]]:
        """Return the fields of each live worker."""
        keys = await self._retries.scan(wire.WORKERS, waits_out_outages=self._waits_out_outages)
        workers = [await self._read(key) for key in keys]
        return [worker for worker in workers if worker]

    async def models(self) -> set[str]:
        """Return the models that have a live worker which takes jobs."""
        return {worker["model"] for worker in await self.read_all() if "model" in worker and serves(worker)}

    async def _read(self, key: bytes) -> dict[str, str]:
        """Return the fields of one worker; empty if it has just exited, or if the key is not a hash."""
        if await self._send(lambda: self._redis.type(key)) != b"hash":
            return {}
        fields: dict[bytes, bytes] = await self._send(lambda: self._redis.hgetall(key))  # type: ignore[arg-type]
        return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in fields.items()}

    async def _send(self, command: Command) -> Any:
        return await (self._retries.run_until_answered if self._waits_out_outages else self._retries.run)(command)


def mapping_pair(name: str, mapped: Mapping[str, str]) -> str | None:
    """Return the left side of the pair that decides the served name for a name in a request: the name itself, else the
    longest beginning of it that is followed by `*`. None if no pair fits."""
    if name in mapped:
        return name
    fitting = (pair for pair in mapped if pair.endswith("*") and name.startswith(pair[:-1]))
    return max(fitting, key=len, default=None)


def mapped_name(name: str, mapped: Mapping[str, str]) -> str:
    """Return the served name for a name in a request, which is that name if no pair fits."""
    pair = mapping_pair(name, mapped)
    return name if pair is None else mapped[pair]
