"""Runs coroutines together: services for as long as the worker runs, or several waits until one of them ends."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

Service = Callable[[], Coroutine[Any, Any, None]]


async def run_with_services(work: Coroutine[Any, Any, None], *services: Service) -> None:
    """Run endless coroutines until the work has ended, and cancel them then. If one of them raises, the work is
    cancelled too. Raises an ExceptionGroup with the errors of all."""
    work_task = asyncio.create_task(work)
    tasks = [work_task, *(asyncio.create_task(service()) for service in services)]
    try:
        while not work_task.done() and not _errors(tasks):
            running = [task for task in tasks if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(tasks)
    if errors := _errors(tasks):
        raise ExceptionGroup("the worker or one of its services failed", errors)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel the tasks and wait for their ends."""
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        # Before Python 3.12 a cancellation during asyncio.wait_for, which redis-py uses, may be lost.
        await asyncio.wait(running, timeout=0.1)


def _errors(tasks: Iterable[asyncio.Task[None]]) -> list[Exception]:
    ended = [task for task in tasks if task.done() and not task.cancelled()]
    return [error for task in ended if isinstance(error := task.exception(), Exception)]


async def wait_first(*waits: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Wait for the first of them, or for the timeout, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
