"""Interrupts the work for a request when its client disconnects, and completes submissions that are under way."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from sluice.gateway.errors import ApiError
from sluice.http_errors import ErrorForm
from sluice.transport.interruption import Interruption

DISCONNECT_WATCH = "disconnect_watch"  # the name in the state of a request
CONNECTION = "connection"  # likewise: receives messages without the time limit of a body

T = TypeVar("T")


class ClientDisconnected(ApiError):
    """The client closed its connection before the response began."""

    def __init__(self) -> None:
        super().__init__(ErrorForm.CANCELLED, "The client closed its connection.")
        self.args = ()


class DisconnectWatch:
    """Waits in one task for the client of a request to leave, through all stages of the request: a task for each stage
    would cost as much as the stage."""

    def __init__(self, receive: Receive) -> None:
        """`receive`: of a request whose body has been read, or is of no interest. It has no time limit: a client that
        does not send the body it has announced may leave at any time."""
        self._has_left = False
        self._block: Interruption | None = None
        self._task = asyncio.create_task(self._wait(receive))

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._interrupt()

    def _interrupt(self) -> None:
        block, self._block = self._block, None  # a second interruption would disturb the block's end
        if block is not None:
            block.interrupt(ClientDisconnected())

    async def interrupting(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work returns; cancel it when the client leaves. Raises `ClientDisconnected`."""
        with Interruption() as self._block:
            if self._has_left:  # the work is begun all the same: its end is what cancels the jobs
                asyncio.get_running_loop().call_soon(self._interrupt)
            try:
                return await work
            finally:
                self._block = None

    def close(self) -> None:
        """End the wait."""
        self._task.cancel()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; cancel it if the client disconnects first. Raises `ClientDisconnected`.

    What is left of the request's body is dropped. `Protection` ends the wait for the client at the end of the request.
    """
    state = request.scope.setdefault("state", {})
    if DISCONNECT_WATCH not in state:
        state[DISCONNECT_WATCH] = DisconnectWatch(state.get(CONNECTION, request.receive))
    watch: DisconnectWatch = state[DISCONNECT_WATCH]
    return await watch.interrupting(work)


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
