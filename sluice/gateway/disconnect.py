"""Notices that a client has left while its response is prepared, and completes what cannot be left half done."""

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

from starlette.requests import Request

from sluice.gateway.errors import ApiError

_STATUS = 499  # the status that proxies log for a disconnected client

T = TypeVar("T")


class ClientLeft(ApiError):
    """The client closed its connection before the response began."""

    def __init__(self) -> None:
        super().__init__(_STATUS, "The client closed its connection.", code="cancelled")


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """Return what the work returns; cancel it if the client disconnects first. Raises `ClientLeft`.

    The request's body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def until_ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until all tasks have ended. A caller that is cancelled waits for them all the same: they must be short."""
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        await asyncio.wait(tasks)
        for task in tasks:
            error_of(task)  # retrieved, or asyncio logs it
        raise


def error_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return what a task raised, its cancellation included; None if it has not ended, or without an error."""
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() if task.done() else None


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
