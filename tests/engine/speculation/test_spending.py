"""Proposers pay for the time that they take, and for no other."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest

from worker.engine.speculation import spending
from worker.engine.speculation.losses import FIRST, RESUMED
from worker.engine.speculation.offer import DraftedRow, Offer
from worker.engine.speculation.spending import Spending
from worker.engine.speculation.width import ForwardCosts
from worker.request import GenerationRequest

ROW = GenerationRequest("a", (1, 2), 50)


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spending, "time", clock)
    return clock


@dataclass
class Row:
    request: GenerationRequest = ROW
    id: str = "a"
    answer: Sequence[int] = (3,)


@dataclass(eq=False)
class Slow:
    """A proposer that takes some seconds to offer nothing, and as many for its work of each step."""

    clock: Clock
    seconds: float

    def begin_step(self, rows: Sequence[DraftedRow]) -> None:
        self.clock.now += self.seconds

    def offer(self, row: DraftedRow) -> Offer | None:
        self.clock.now += self.seconds
        return None

    def observe_accepted(self, row: DraftedRow, proposed: int, accepted: int) -> None:
        pass

    def forget(self, row: DraftedRow) -> None:
        pass


def spent() -> Spending:
    """Return the spending of a worker whose plain steps take one second."""
    costs = ForwardCosts()
    for _ in range(3):
        costs.observe(1, 1, 1.0)
    spent = Spending(costs)
    spent.launch_plain(1)
    return spent


def lost_s(spent: Spending, proposer: object, may_lose_s: float = FIRST) -> float:
    """Return what a proposer has lost, about: how much less than `may_lose_s` it may still lose. It is paused then, and
    the fund of the first losses is used up."""
    left = 0.0
    while spent.allowed([proposer]):
        spent.ask(proposer, 0.25)
        left += 0.25
    return may_lose_s - left


def test_a_proposer_that_looks_in_vain_for_long_is_paused(clock: Clock) -> None:
    used, slow, quick = spent(), Slow(clock, 1.0), Slow(clock, 0.0)
    for _ in range(FIRST):
        used.begin_step([], [Row()])
        assert used.allowed([slow, quick]) == [slow, quick]
        used.offers(slow, [Row()])
        used.offers(quick, [Row()])
    assert used.allowed([slow, quick]) == [quick]


def test_a_paused_proposer_has_no_work_in_a_step(clock: Clock) -> None:
    used, slow = spent(), Slow(clock, FIRST + 1.0)
    used.begin_step([slow], [Row()])
    before = clock.now
    used.begin_step([slow], [Row()])
    assert clock.now == before


def test_a_verified_draft_pays_what_its_step_takes_longer(clock: Clock) -> None:
    used, proposer = spent(), Slow(clock, 0.0)
    used.begin_step([], [])
    used.begin_group(host_s=0.5)
    clock.now += 4.0
    used.add_verified(proposer, 3, 1)
    used.verify(1, inf)
    assert lost_s(used, proposer) == pytest.approx(4.5 - 2, abs=0.3)  # two tokens for it


def test_a_stall_of_the_machine_is_not_paid(clock: Clock) -> None:
    used, proposer = spent(), Slow(clock, 0.0)
    used.begin_step([], [])
    used.begin_group(host_s=0.0)
    clock.now += 100.0
    used.add_verified(proposer, 3, 1)
    used.verify(1, usual_s=1.5)
    assert lost_s(used, proposer) == pytest.approx(3 * 1.5 - 2, abs=0.3)


def test_work_of_the_host_is_not_paid_twice(clock: Clock) -> None:
    used, slow = spent(), Slow(clock, 0.5)
    used.begin_step([], [])
    used.offers(slow, [Row()])
    used.begin_group(host_s=0.75)
    clock.now += 3.0
    used.add_verified(slow, 3, 0)
    used.verify(1, inf)
    assert lost_s(used, slow) == pytest.approx(0.5 + 0.25 + 3 - 1, abs=0.3)


def test_the_time_of_other_groups_is_not_paid(clock: Clock) -> None:
    used, proposer = spent(), Slow(clock, 0.0)
    used.begin_step([], [])
    used.launch_plain(1)
    used.begin_group(host_s=None)
    clock.now += 4.0
    used.add_verified(proposer, 3, 0)
    used.verify(1, inf)
    assert lost_s(used, proposer) == pytest.approx(4 - 1 - 1, abs=0.3)


def test_a_network_pays_for_a_draft_that_is_not_verified(clock: Clock) -> None:
    used, network, other = spent(), object(), Slow(clock, 0.0)
    used.begin_step([], [])
    used.offers(other, [Row()])
    used.begin_group(host_s=0.0)
    clock.now += 3.0
    used.draft(network, 3.0)
    used.delay_plain(1)
    assert lost_s(used, network) == pytest.approx(3, abs=0.3)
    assert lost_s(used, other, RESUMED) == pytest.approx(0, abs=0.3)


def test_drafts_pay_for_the_idle_device_after_them(clock: Clock) -> None:
    used, proposer = spent(), Slow(clock, 0.0)
    used.begin_step([], [])
    used.begin_group(host_s=0.0)
    clock.now += 1.0
    used.add_verified(proposer, 1, 0)
    used.verify(1, inf)
    used.observe_idle(2.0)
    assert lost_s(used, proposer) == pytest.approx(2, abs=0.3)
