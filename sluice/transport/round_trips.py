"""Sends the calls of many tasks in few round trips."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_MAX_CALLS = 100  # in one round trip, since an answer may be a long list of events
_MAX_WAIT_S = 0.05  # for the round trip before: a longer one is an outage, or has a long answer

C = TypeVar("C")
A = TypeVar("A")


@dataclass(slots=True)
class _Trip(Generic[C, A]):
    calls: list[C] = field(default_factory=list)
    task: "asyncio.Task[Sequence[A | Exception]] | None" = None


class RoundTrips(Generic[C, A]):
    """Joins calls: those that come while a round trip is under way share the next one.

    A command costs redis-py some 0.2 ms of CPU time, and one of a pipeline a fifth of that, so this decides how long
    many requests that arrive together wait. A single call is sent at once.
    """

    def __init__(self, send: Callable[[Sequence[C]], Awaitable[Sequence[A | Exception]]]) -> None:
        """`send`: sends calls in one round trip. It returns an answer for each, or the error to raise for it."""
        self._send = send
        self._filling: _Trip[C, A] | None = None  # takes further calls
        self._last: asyncio.Task[Sequence[A | Exception]] | None = None

    async def call(self, call: C) -> A:
        """Send a call, and return its answer. Raises its error, and what `send` raises. The call of a caller that is
        cancelled is sent all the same."""
        trip = self._trip()
        index = len(trip.calls)
        trip.calls.append(call)
        assert trip.task is not None
        answer = (await asyncio.shield(trip.task))[index]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _trip(self) -> "_Trip[C, A]":
        if self._filling is None or len(self._filling.calls) >= _MAX_CALLS:
            self._filling = _Trip()
            self._filling.task = self._last = asyncio.create_task(self._run(self._filling, self._last))
            self._last.add_done_callback(_retrieve)
        return self._filling

    async def _run(
        self, trip: "_Trip[C, A]", before: "asyncio.Task[Sequence[A | Exception]] | None"
    ) -> Sequence[A | Exception]:
        if before is not None and not before.done():
            await asyncio.wait({before}, timeout=_MAX_WAIT_S)
        if self._filling is trip:
            self._filling = None
        return await self._send(trip.calls)


def _retrieve(task: "asyncio.Task[object]") -> None:
    """Retrieve the error of a round trip whose callers have all been cancelled, or asyncio logs it."""
    if not task.cancelled():
        task.exception()
