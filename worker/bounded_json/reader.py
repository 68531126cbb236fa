"""Parses bodies of clients without blocking the event loop, or holding the interpreter's lock for long.

A small body is parsed at once. A large one is parsed on a thread of its lane, so that interactive jobs do not wait for
offline ones, and tenants take turns there. `json.loads` never releases the interpreter's lock, so an expensive body is
parsed by a child process. It counts the values first, and returns an error, or the values in a form that loads fast.
"""

import asyncio
import logging
import marshal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sluice.contract.keys import LANES, Lane
from worker.bounded_json.strict import NotJson, is_expensive, limits, loads
from worker.errors import JobFailure
from worker.process.child import ChildCrashed, ChildFailed, Children
from worker.process.frames import LimitExceeded
from worker.turns import Turns

logger = logging.getLogger("sluice.reading")

SMALL_BYTES = 16_384  # parsed and validated in at most 5 ms
_T = TypeVar("_T")


class BodyReader:
    """Parses bodies; a worker has one. Uses at most one thread and one child process for each lane."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, _Lane] = {}
        self._children = Children("worker.bounded_json.strict", len(LANES))

    async def parse(self, body: bytes, lane: Lane, tenant: str = "") -> Any:
        """Return the JSON value of a body. Raises `JobFailure`."""
        if len(body) <= SMALL_BYTES:
            return _parsed(body)
        expensive = await self.run(is_expensive, body, size=len(body), lane=lane, tenant=tenant)
        if not expensive:
            return await self.run(_parsed, body, size=len(body), lane=lane, tenant=tenant)
        async with self._lane(lane).child.slot(lane, tenant):
            return await self._parsed_by_child(body)

    async def run(self, function: Callable[..., _T], *args: object, size: int, lane: Lane, tenant: str = "") -> _T:
        """Call a function that handles a body of `size` bytes, on the lane's thread if that is large."""
        if size <= SMALL_BYTES:
            return function(*args)
        return await self._lane(lane).call(lane, tenant, partial(function, *args))

    async def _parsed_by_child(self, body: bytes) -> Any:
        try:
            return marshal.loads((await self._children.ask(None, body, limits(len(body)))).body)
        except (LimitExceeded, ChildCrashed):
            raise JobFailure(
                "too_large", "The request takes too long to parse: split it, or shorten its lists and objects."
            ) from None
        except (ChildFailed, TimeoutError) as error:
            logger.error("parsing a body of %d bytes: %r", len(body), error)
            raise JobFailure(
                "overloaded",
                "The server has no resources to parse a request of this size now; try again later.",
                retryable=True,
            ) from None

    def _lane(self, lane: Lane) -> "_Lane":
        return self._lanes.setdefault(lane, _Lane(lane))


class _Lane:
    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"read-{name}")  # starts when it is first used
        self._turns, self.child = Turns(1), Turns(1)

    async def call(self, lane: Lane, tenant: str, work: Callable[[], _T]) -> _T:
        await self._turns.take(lane, tenant)
        loop = asyncio.get_running_loop()
        running = self._thread.submit(work)
        # The slot is free when the thread is, which may be after the job has ended.
        running.add_done_callback(partial(self._freed, loop))
        return await asyncio.wrap_future(running)

    def _freed(self, loop: asyncio.AbstractEventLoop, _: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has closed: no job waits
            loop.call_soon_threadsafe(self._turns.give_back)


def _parsed(body: bytes) -> Any:
    try:
        return loads(body)
    except NotJson as why:
        raise JobFailure("invalid_request", str(why)) from None
