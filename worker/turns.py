"""Slots that jobs wait for: interactive before offline ones, and within a lane tenant by tenant."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.keys import LANES, Lane

Turn = asyncio.Future[None]  # done when the slot is the waiter's


class Turns:
    """A number of slots, for one event loop."""

    def __init__(self, slots: int, *, reserved: int = 0) -> None:
        """`reserved`: slots that offline jobs leave free."""
        self._free, self._kept_free = slots, dict.fromkeys(LANES, reserved) | {"interactive": 0}
        self._lines = {lane: _Line() for lane in LANES}

    @property
    def wanted(self) -> bool:
        return any(line.waiting for line in self._lines.values())

    @asynccontextmanager
    async def slot(self, lane: Lane, tenant: str) -> AsyncIterator[None]:
        await self.take(lane, tenant)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, lane: Lane, tenant: str) -> None:
        """Wait for a slot. Whoever took one gives it back."""
        turn = self.queue(lane, tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def queue(self, lane: Lane, tenant: str, *, again: bool = False) -> Turn:
        """Return a turn that is waited for, or cancelled. `again`: after a turn that was interrupted, so it comes
        behind the tenant's first ones."""
        turn = asyncio.get_running_loop().create_future()
        self._lines[lane].add(turn, tenant, again)
        self._grant()
        return turn

    def give_back(self) -> None:
        self._free += 1
        self._grant()

    def _grant(self) -> None:
        for lane in LANES:
            while self._free > self._kept_free[lane] and (turn := self._lines[lane].next()):
                self._free -= 1
                turn.set_result(None)


class _Line:
    """The turns of a lane."""

    def __init__(self) -> None:
        self._tenants = OrderedDict[str, tuple[deque[Turn], deque[Turn]]]()  # each one's first turns, and later ones

    @property
    def waiting(self) -> bool:
        return any(not turn.done() for queues in self._tenants.values() for turns in queues for turn in turns)

    def add(self, turn: Turn, tenant: str, again: bool) -> None:
        self._tenants.setdefault(tenant, (deque(), deque()))[again].append(turn)

    def next(self) -> Turn | None:
        """Take the next turn that is still waited for. Its tenant goes behind the others."""
        while self._tenants:
            tenant, (first, later) = self._tenants.popitem(last=False)
            turn = (first or later).popleft()
            if first or later:
                self._tenants[tenant] = first, later
            if not turn.done():
                return turn
        return None
