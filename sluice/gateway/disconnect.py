"""Notices that a client has left while its response is prepared."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

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


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
