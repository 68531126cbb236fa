"""Repeats Redis calls during an outage."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from sluice.contract.refusals import reason_of

logger = logging.getLogger("sluice.queue")

_RETRY_S = 0.2
REMIND_S = 30.0  # between two log lines about one outage


async def until_redis_answers(
    call: Callable[[], Awaitable[None]], stopping: asyncio.Event, *, remind_s: float = REMIND_S
) -> bool:
    """Repeat the call until Redis answers it. Logs an outage when it begins and every `remind_s` seconds. Returns False
    if `stopping` is set before Redis answers."""
    outage: _Outage | None = None
    while not stopping.is_set():
        try:
            await call()
        except (RedisError, OSError) as error:
            outage = outage or _Outage(remind_s)
            outage.note(error)
            await asyncio.sleep(_RETRY_S)
        else:
            if outage:
                logger.warning("redis is back after %.0f s", outage.lasted_s)
            return True
    return False


class _Outage:
    def __init__(self, remind_s: float) -> None:
        self._began = time.monotonic()
        self._remind_s, self._next_s = remind_s, 0.0

    @property
    def lasted_s(self) -> float:
        return time.monotonic() - self._began

    def note(self, error: Exception) -> None:
        """Log the error if it is the first, or if `remind_s` seconds have passed since the last line."""
        if self.lasted_s < self._next_s:
            return
        since = f" for {self.lasted_s:.0f} s" if self._next_s else ""
        logger.warning("waiting for redis%s: %s", since, reason_of(error) or error)
        self._next_s = self.lasted_s + self._remind_s
