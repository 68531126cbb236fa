"""What proposers take of the time of steps, and what their drafts save, for the account that limits their loss."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from worker.engine.speculation.losses import LossAccount, VerifiedPart
from worker.engine.speculation.offer import DraftedRow, Offer
from worker.engine.speculation.proposer import Proposer, SteppedProposer
from worker.engine.speculation.width import ForwardCosts, without_stall

_Source = TypeVar("_Source")


class Spending:
    """Charges proposers what steps take longer than plain ones, so that those that lose more than they may are paused.
    For the engine's thread."""

    def __init__(self, costs: ForwardCosts, proposers: int = 1) -> None:
        """`costs`: of forwards. `proposers`: their number."""
        self._account = LossAccount(proposers)
        self._costs = costs
        self._asked_s = defaultdict[object, float](float)  # seconds by proposer that was asked, in the present step
        self._running_s = 0.0  # expected seconds of the plain steps that groups have launched in it
        self._began = 0.0  # the time at which the present group began to take drafts
        self._host_s: float | None = None  # see `begin_group`
        self._network: object | None = None  # that has drafted for the group
        self._parts = dict[object, VerifiedPart]()  # by proposer, of the group
        self._verified: Collection[object] = ()  # proposers of the last step that has verified drafts

    def allowed(self, sources: Iterable[_Source]) -> list[_Source]:
        """Return the proposers that are not paused."""
        return [source for source in sources if self._account.allows(source)]

    def begin_step(self, proposers: Iterable[SteppedProposer], rows: Sequence[DraftedRow]) -> None:
        """Let the proposers that are not paused do their work of each step for these rows."""
        self._asked_s.clear()
        self._running_s = 0.0
        for proposer in self.allowed(proposers):
            began = time.perf_counter()
            proposer.begin_step(rows)
            self.ask(proposer, time.perf_counter() - began)

    def offers(self, proposer: Proposer, rows: Sequence[DraftedRow]) -> list[Offer | None]:
        """Return what the proposer offers for each row."""
        began = time.perf_counter()
        offers = [proposer.offer(row) for row in rows]
        self.ask(proposer, time.perf_counter() - began)
        return offers

    def ask(self, source: object, seconds: float) -> None:
        """Record that it took so long to ask a proposer."""
        self._asked_s[source] += seconds
        self._account.charge(source, seconds)

    @property
    def asked_s(self) -> float:
        """Seconds that it took in the present step to ask all proposers."""
        return sum(self._asked_s.values())

    def launch_plain(self, rows: int) -> None:
        """Record that a group of `rows` rows launches a plain step."""
        if self._costs.measured:
            step_s = self._costs.mean_plain_s(rows)
            self._running_s += step_s
            self._account.pass_time(step_s)

    def observe_idle(self, host_s: float) -> None:
        """Record that the device was idle for so long before a plain step, since the step before has verified drafts
        and the host had to know their tokens first."""
        if host_s:
            self._account.charge_together(self._verified, self._uncharged(host_s))

    def begin_group(self, host_s: float | None) -> None:
        """Begin the part of a step in which a group takes drafts. `host_s`: seconds of the host's work since the last
        step, if that has verified drafts too; None: other groups run meanwhile."""
        self._began, self._host_s = time.perf_counter(), host_s
        self._parts = {}

    def draft(self, network: object | None, seconds: float) -> None:
        """Record how long a network has drafted for the group; None: none has."""
        self._network = network
        if network:
            self._parts[network] = VerifiedPart(seconds=seconds)

    def add_verified(self, source: object, proposed: int, accepted: int) -> None:
        """Add the draft of a row to those of the group that a forward has verified."""
        self._parts.setdefault(source, VerifiedPart()).add(proposed, accepted)

    def verify(self, rows: int, usual_s: float) -> None:
        """Record that the forward of the group, with the drafts of `add_verified`, has ended. `usual_s`: expected
        seconds of such a forward and of drafting for it."""
        self._verified = [*self._parts]
        if self._costs.measured:
            seconds = without_stall(self._taken_s(), usual_s)
            self._account.charge_verified(rows, seconds, self._costs.mean_plain_s(rows), self._parts)

    def delay_plain(self, rows: int) -> None:
        """Record that the group launches a plain step, only now since it was asked for drafts in vain."""
        sources = [self._network] if self._network else [*self._asked_s]
        self._account.charge_together(sources, self._taken_s())
        self.launch_plain(rows)

    def _taken_s(self) -> float:
        """Return the seconds of the group's part of the step. What other groups run meanwhile is not a part of it."""
        seconds = time.perf_counter() - self._began
        if self._host_s is not None:
            return self._uncharged(self._host_s) + seconds
        waited_s = min(seconds, self._running_s)
        self._running_s -= waited_s
        return seconds - waited_s

    def _uncharged(self, host_s: float) -> float:
        """Return the seconds of the host's work before a forward, without those that are charged already."""
        return max(0.0, host_s - self.asked_s)
