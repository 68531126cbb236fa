"""Estimates the Redis server's clock."""

import time
from datetime import UTC, datetime

from redis.asyncio import Redis


class ServerClock:
    """Estimates the server's time, so that events of different workers have timestamps of one clock."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    async def sync(self, redis: Redis) -> None:
        """Correct the estimate if the server's clock contradicts it. An answer that took long tells little, so it
        hardly moves the estimate. Raises RedisError, OSError."""
        before = time.time()
        seconds, microseconds = await redis.time()
        at = seconds + microseconds / 1e6
        self._ahead_s = min(max(self._ahead_s, at - time.time()), at - before)

    def now(self) -> float:
        """Unix seconds by the server's clock."""
        return time.time() + self._ahead_s

    def utc(self) -> datetime:
        """UTC by the server's clock."""
        return datetime.fromtimestamp(self.now(), UTC)
