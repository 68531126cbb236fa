"""Waiting for what a server or a worker is about to do."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(true: Callable[[], bool] | Callable[[], Awaitable[bool]], *, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while True:
        answer = true()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < deadline, f"not so within {within_s:g} s"
        await asyncio.sleep(0.005)
