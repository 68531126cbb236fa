"""Drafts lose no more than a small share of the time, whatever they cost and however often they are right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection import examples
from worker.engine.speculation.tuning import (
    CREDIT,
    LOSS_SHARE,
    PLAIN_EVERY,
    PLAIN_WANTED,
    STALLED,
)
from worker.engine.speculation.width import DraftBudget, ForwardCosts

PROPOSERS = ("copies", "grammar", "mtp")
MOST = 30.0  # plain steps that a step with drafts takes


@dataclass(frozen=True)
class Phase:
    """Steps in a row in which drafts are alike."""

    steps: int
    proposers: Sequence[str]  # whose drafts are verified, those of them that are not paused
    seconds: float  # of such a step, plain ones take one each
    accepted: int  # tokens of each draft
    network_s: float = 0.0  # of these, seconds that the first of the proposers drafted
    asked_s: float = 0.0  # seconds in addition that no token comes of


PHASES = st.builds(
    Phase,
    steps=st.integers(1, 400),
    proposers=st.lists(st.sampled_from(PROPOSERS), min_size=1, unique=True),
    seconds=st.floats(0.5, MOST),
    accepted=st.integers(0, 7),
    network_s=st.floats(0, 0.5),
    asked_s=st.just(0.0) | st.floats(0, 2),
)


def decode(phases: Sequence[Phase], steps: int) -> tuple[float, float]:
    """Return the seconds that the steps of these phases, over and over, take as far as they are allowed, and those of
    plain steps for the same tokens."""
    budget, seconds, plain_s = DraftBudget(), 0.0, 0.0
    for phase in islice(cycle(each for each in phases for _ in range(each.steps)), steps):
        allowed = [each for each in phase.proposers if budget.allows(each)] if budget.may_ask else []
        if allowed and phase.asked_s:
            budget.charge_asks(phase.asked_s)
            seconds += phase.asked_s
        if allowed and phase.seconds:
            drafts = [(each, 7, phase.accepted) for each in allowed]  # each has a row
            budget.charge_verified(len(allowed), phase.seconds, 1.0, drafts, (allowed[0], phase.network_s))
            plain_s += 1 + phase.accepted
            seconds += phase.seconds
        else:
            budget.pass_time(1.0)
            plain_s, seconds = plain_s + 1, seconds + 1
    return seconds, plain_s


def bound(plain_s: float, longest_s: float) -> float:
    """Return the most seconds: the share, the first losses, and a last step of each proposer, or a last ask."""
    return (1 + LOSS_SHARE) * plain_s + len(PROPOSERS) * (CREDIT + longest_s) + CREDIT + 2


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(PHASES, min_size=1, max_size=8))
def test_drafts_of_any_cost_lose_no_more_than_their_share(phases: list[Phase]) -> None:
    seconds, plain_s = decode(phases, 3_000)
    assert seconds <= bound(plain_s, MOST)


def test_a_long_gain_does_not_pay_for_a_long_loss() -> None:
    good, bad = Phase(10_000, ["mtp"], 2.0, 5), Phase(2_000, ["mtp"], 3.0, 0)
    before, after = decode([good], 10_000), decode([good, bad], 12_000)
    lost_s = (after[0] - before[0]) - (after[1] - before[1])
    assert CREDIT / 2 < lost_s <= CREDIT + LOSS_SHARE * 2_000 + bad.seconds


@dataclass
class NoisyMachine:
    """Runs steps that all vary by a sixth, and of which one in fifty takes five times as long. A plain one usually
    takes a millisecond. Those with drafts draw 1 to 4 tokens, and make `gain` times as many a second. Three plain steps
    in a hundred are measured while drafts are verified."""

    dice: Random
    gain: float
    used: int = 0  # steps that were not plain although drafts might have been verified
    seconds: float = 0.0
    plain_s: float = 0.0  # that plain steps would have taken for the same tokens, in the mean
    _timer: ForwardCosts = field(default_factory=ForwardCosts)
    _budget: DraftBudget = field(default_factory=DraftBudget)

    def run(self, steps: int) -> float:
        """Return the share of the steps in which drafts were verified, of those in which they might have been."""
        might = [step % PLAIN_EVERY >= PLAIN_WANTED for step in range(steps)]
        for allowed in might:
            if allowed and self._budget.allows("mtp"):
                self._verify()
            else:
                self._decode()
        return self.used / sum(might)

    def _decode(self) -> None:
        seconds = self._taken(0.001)
        self.plain_s += 0.001 * MEAN_TAKEN
        self._timer.observe(1, 1, seconds)
        self._budget.pass_time(self._timer.mean_plain_s(1))

    def _verify(self) -> None:
        drawn = self.dice.choice(DRAWN)
        seconds = self._taken(0.001 * sum(DRAWN) / len(DRAWN) / self.gain)
        counted = min(seconds, STALLED * self._timer.seconds(1, 4))
        self._budget.charge_verified(1, counted, self._timer.mean_plain_s(1), [("mtp", 3, drawn - 1)])
        self._timer.observe(1, 4, seconds)
        self.used += 1
        self.plain_s += drawn * 0.001 * MEAN_TAKEN

    def _taken(self, seconds: float) -> float:
        taken = seconds * self.dice.lognormvariate(0, 0.15) * (5 if self.dice.random() < 0.02 else 1)
        self.seconds += taken
        return taken


DRAWN = (1, 2, 3, 4, 4, 4)  # tokens of steps with drafts
MEAN_TAKEN = math.exp(0.15**2 / 2) * 1.08  # usual times that a step of the noisy machine takes in the mean


def test_a_proposer_that_gains_is_used_nearly_always_on_a_noisy_machine() -> None:
    used = [NoisyMachine(Random(seed), 1.1).run(10_000) for seed in range(10)]
    assert sum(used) >= 0.95 * len(used)
    assert min(used) >= 0.8


@pytest.mark.parametrize("gain", [0.95, 0.8, 0.5])
def test_a_proposer_that_loses_costs_little_on_a_noisy_machine(gain: float) -> None:
    machines = [NoisyMachine(Random(seed), gain) for seed in range(10)]
    for machine in machines:
        machine.run(3_000)
    assert sum(each.seconds for each in machines) <= 1.04 * sum(each.plain_s for each in machines)


@pytest.mark.parametrize("seed", range(3))
def test_a_proposer_that_loses_is_used_rarely_on_a_noisy_machine(seed: int) -> None:
    assert NoisyMachine(Random(seed), 0.8).run(10_000) <= 0.1


def budget_of(*proposers: str) -> DraftBudget:
    """Return a budget after a long time without drafts."""
    budget = DraftBudget()
    budget.pass_time(1.0, CREDIT / LOSS_SHARE)
    for proposer in proposers:
        budget.charge(proposer, 0.0)
    return budget


def steps_to_pause(budget: DraftBudget, proposer: str, lost: float) -> int:
    """Return after how many losses a proposer is paused."""
    for number in range(1, 10_000):
        budget.charge(proposer, lost)
        if not budget.allows(proposer):
            return number
    raise AssertionError("it is never paused")


def steps_to_resume(budget: DraftBudget, proposer: str) -> int:
    """Return after how many plain steps a proposer is allowed again."""
    for number in range(1, 10_000):
        budget.pass_time(1.0)
        if budget.allows(proposer):
            return number
    raise AssertionError("it is paused for ever")


def test_a_proposer_that_loses_pauses_no_other() -> None:
    budget = budget_of("copies", "mtp")
    for _ in range(100):
        if budget.allows("mtp"):
            budget.charge_verified(2, 3.0, 1.0, [("copies", 7, 7), ("mtp", 3, 0)], ("mtp", 1.0))
    assert budget.allows("copies")
    assert not budget.allows("mtp")


def test_a_paused_proposer_is_tried_again_when_its_share_has_paid_for_its_last_loss() -> None:
    budget = budget_of("mtp")
    assert steps_to_pause(budget, "mtp", 1.0) == CREDIT + 1
    assert steps_to_resume(budget, "mtp") == pytest.approx(1 / LOSS_SHARE, abs=1)


def test_proposers_that_lose_divide_the_share() -> None:
    budget = budget_of("copies", "mtp")
    for proposer in ("copies", "mtp"):
        steps_to_pause(budget, proposer, 1.0)
    assert steps_to_resume(budget, "mtp") == pytest.approx(2 / LOSS_SHARE, abs=1)


def test_what_a_forward_takes_longer_is_divided_by_the_tokens_proposed() -> None:
    for proposer, lost in {"copies": 2 * 6 / 8, "mtp": 1 + 2 * 2 / 8 - 1}.items():
        charged = budget_of("copies", "mtp")
        charged.charge_verified(2, 4.0, 1.0, [("copies", 6, 0), ("mtp", 2, 2)], ("mtp", 1.0))
        assert steps_to_pause(charged, proposer, 0.25) == 1 + (CREDIT - lost) / 0.25


def test_nothing_is_asked_before_a_plain_step_was_measured() -> None:
    budget = DraftBudget()
    assert not budget.may_ask
    budget.pass_time(1.0)
    assert budget.may_ask


@pytest.mark.parametrize("ask_s", [0.001, 0.1, 3.0])
def test_asks_in_vain_take_their_share_of_the_time(ask_s: float) -> None:
    budget, asked = DraftBudget(), 0
    for _ in range(10_000):
        if budget.may_ask:
            budget.charge_asks(ask_s)
            asked += 1
        budget.pass_time(1.0)
    assert asked == pytest.approx(min(9_999, 10_000 * LOSS_SHARE / ask_s), abs=2 + 1 / ask_s)


def test_a_time_without_asks_pays_for_few_of_them() -> None:
    budget = DraftBudget()
    for _ in range(10_000):
        budget.pass_time(1.0)
    asked = 0
    while budget.may_ask:
        budget.charge_asks(0.1)
        asked += 1
    assert asked <= CREDIT / 0.1 + 2


def test_what_drafts_gain_pays_for_looking_for_them() -> None:
    budget = budget_of("copies")
    budget.charge_asks(CREDIT + 1.0)
    assert not budget.may_ask
    budget.charge_verified(1, 1.5, 1.0, [("copies", 3, 0)])
    assert not budget.may_ask
    budget.charge_verified(1, 1.5, 1.0, [("copies", 3, 3)])
    assert budget.may_ask
