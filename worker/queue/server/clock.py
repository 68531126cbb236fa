"""Estimates the Redis server's clock."""

import time
from datetime import UTC, datetime

from redis.asyncio import Redis


class ServerClock:
    """Estimates the server's time, so that events of different workers have timestamps of one clock."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    async def sync(self, redis: Redis) -> None:
        """Measure how far the server's clock is ahead of ours. Raises RedisError, OSError."""
        before = time.time()
        seconds, microseconds = await redis.time()
        middle = (before + time.time()) / 2
        self._ahead_s = seconds + microseconds / 1e6 - middle

    def now(self) -> float:
        """Unix seconds by the server's clock."""
        return time.time() + self._ahead_s

    def utc(self) -> datetime:
        """UTC by the server's clock."""
        return datetime.fromtimestamp(self.now(), UTC)
