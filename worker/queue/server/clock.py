"""The server's clock, as this machine knows it."""

import time
from datetime import UTC, datetime

from redis.asyncio import Redis


class ServerClock:
    """Events of different workers are ordered by one clock, whatever the machines think the time is."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    async def sync(self, redis: Redis) -> None:
        before = time.time()
        seconds, microseconds = await redis.time()
        middle = (before + time.time()) / 2
        self._ahead_s = seconds + microseconds / 1e6 - middle

    def now(self) -> float:
        """Unix seconds."""
        return time.time() + self._ahead_s

    def utc(self) -> datetime:
        return datetime.fromtimestamp(self.now(), UTC)
