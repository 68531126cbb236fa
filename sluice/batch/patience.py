"""A run outlives its server's outages: what is asked of the server is asked until it answers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

logger = logging.getLogger("sluice.batch")

T = TypeVar("T")

_ANSWER_S = 30.0  # then a connection is taken for dead
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0


async def patiently(ask: Callable[[], Awaitable[T]], *, at_most_s: float = float("inf")) -> T:
    """Asks again after an error, so asking twice must be as good as once. Raises the last error in the end."""
    began, wait_s = time.monotonic(), _FIRST_WAIT_S
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await ask()
        except (RedisError, OSError) as error:
            if time.monotonic() - began >= at_most_s:
                raise
            if wait_s == _FIRST_WAIT_S:
                why = str(error) or f"not a word in {_ANSWER_S:.0f} s"
                logger.warning("the server does not answer (%s); going on as soon as it does", why)
        else:
            if wait_s != _FIRST_WAIT_S:
                logger.warning("the server answers again, after %.1f s", time.monotonic() - began)
            return answer
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
