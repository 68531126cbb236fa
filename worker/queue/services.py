"""Tasks that run as long as the worker does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Service = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def running_services(*services: Service) -> AsyncIterator[None]:
    """Run endless coroutines beside the block, and cancel them after it. If one of them raises, the block is
    cancelled and the error comes out as an ExceptionGroup."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service()) for service in services]
        yield
        while any(not task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            # Until Python 3.12 a cancellation that hits asyncio.wait_for, and so redis-py, may be lost.
            await asyncio.wait(tasks, timeout=0.1)
