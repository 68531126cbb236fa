"""Redis calls that outlast an outage."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

logger = logging.getLogger("sluice.queue")

_RETRY_S = 0.2


async def until_redis_answers(call: Callable[[], Awaitable[None]], stopping: asyncio.Event) -> bool:
    """Repeat the call until Redis answers it. Returns False if `stopping` is set before that."""
    waited = False
    while not stopping.is_set():
        try:
            await call()
        except (RedisError, OSError) as error:
            if not waited:
                logger.warning("waiting for redis: %s", error)
            waited = True
            await asyncio.sleep(_RETRY_S)
        else:
            if waited:
                logger.warning("redis is back")
            return True
    return False
