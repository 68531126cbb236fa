"""A semaphore with fair turns: interactive jobs before offline ones, and tenants in turn within a lane."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

from sluice.contract.keys import LANES, Lane

Turn = asyncio.Future[None]  # done when its waiter has the slot


class Turns:
    """A number of slots, for one event loop."""

    def __init__(self, slots: int, *, reserved: int = 0) -> None:
        """`reserved`: slots that offline jobs leave free."""
        self._free = slots
        self._reserved = dict.fromkeys(LANES, reserved) | {"interactive": 0}
        self._queues = {lane: _TenantQueue() for lane in LANES}

    @property
    def wanted(self) -> bool:
        """True if a job waits for a slot."""
        return any(line.waiting for line in self._queues.values())

    @asynccontextmanager
    async def slot(self, lane: Lane, tenant: str) -> AsyncIterator[None]:
        """Wait for a slot, and give it back after the block."""
        await self.take(lane, tenant)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, lane: Lane, tenant: str) -> None:
        """Wait for a slot. The caller must give it back."""
        turn = self.queue(lane, tenant)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def queue(self, lane: Lane, tenant: str, used_s: float = 0.0) -> Turn:
        """Return a turn to await or cancel. `used_s`: seconds for which the job has used a slot before; of a tenant's
        jobs, the one with the fewest seconds comes first."""
        turn = asyncio.get_running_loop().create_future()
        self._queues[lane].add(turn, tenant, used_s)
        self._grant()
        return turn

    def give_back(self) -> None:
        """Release a slot, and grant it to the next turn."""
        self._free += 1
        self._grant()

    def _grant(self) -> None:
        for lane in LANES:
            while self._free > self._reserved[lane] and (turn := self._queues[lane].next()):
                self._free -= 1
                turn.set_result(None)


class _TenantQueue:
    """The waiting turns of a lane, by tenant."""

    def __init__(self) -> None:
        self._numbers = count()
        self._tenants = OrderedDict[str, list[tuple[float, int, Turn]]]()  # each a heap

    @property
    def waiting(self) -> bool:
        return any(not turn.done() for turns in self._tenants.values() for _, _, turn in turns)

    def add(self, turn: Turn, tenant: str, used_s: float) -> None:
        heappush(self._tenants.setdefault(tenant, []), (used_s, next(self._numbers), turn))

    def next(self) -> Turn | None:
        """Remove and return the next turn that is not cancelled. Its tenant moves to the end of the order."""
        while self._tenants:
            tenant, turns = self._tenants.popitem(last=False)
            _, _, turn = heappop(turns)
            if turns:
                self._tenants[tenant] = turns
            if not turn.done():
                return turn
        return None
