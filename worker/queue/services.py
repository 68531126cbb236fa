"""Runs coroutines together: services for as long as the worker runs, or several waits until one of them ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Service = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def running_services(*services: Service) -> AsyncIterator[None]:
    """Run endless coroutines while the block runs, and cancel them after it. If one of them raises, the block is
    cancelled and an ExceptionGroup with the error is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service()) for service in services]
        yield
        while any(not task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            # Before Python 3.12 a cancellation during asyncio.wait_for, which redis-py uses, may be lost.
            await asyncio.wait(tasks, timeout=0.1)


async def wait_first(*waits: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Wait for the first of them, or for the timeout, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
