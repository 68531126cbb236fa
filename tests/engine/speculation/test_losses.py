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
from worker.engine.speculation.losses import (
    EVERY,
    FIRST,
    MOST_GAINED,
    RESUMED,
    SHARE,
    WANTED,
    LossAccount,
    VerifiedPart,
)
from worker.engine.speculation.width import ForwardCosts, without_stall

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
    asked_s: float = 0.0  # seconds in addition that no token comes of, for each proposer


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
    account, seconds, plain_s = LossAccount(len(PROPOSERS)), 0.0, 0.0
    for phase in islice(cycle(each for each in phases for _ in range(each.steps)), steps):
        allowed = [each for each in phase.proposers if account.allows(each)]
        for proposer in allowed:
            account.charge(proposer, phase.asked_s)
            seconds += phase.asked_s if plain_s else 0.0  # before the first plain step, nothing is asked
        if allowed and plain_s:
            parts = {each: VerifiedPart(7, phase.accepted) for each in allowed}  # each has a row
            parts[allowed[0]].seconds = phase.network_s
            account.charge_verified(len(allowed), phase.seconds, 1.0, parts)
            plain_s += 1 + phase.accepted
            seconds += phase.seconds
        else:
            account.pass_time(1.0)
            plain_s, seconds = plain_s + 1, seconds + 1
    return seconds, plain_s


def bound(plain_s: float, longest_s: float) -> float:
    """Return the most seconds: the share, the first losses, and a last step of each proposer."""
    return (1 + 1.5 * SHARE) * plain_s + FIRST + len(PROPOSERS) * longest_s


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(PHASES, min_size=1, max_size=8))
def test_drafts_of_any_cost_lose_no_more_than_their_share(phases: list[Phase]) -> None:
    seconds, plain_s = decode(phases, 3_000)
    assert seconds <= bound(plain_s, MOST)


def test_a_long_gain_does_not_pay_for_a_long_loss() -> None:
    good, bad = Phase(10_000, ["mtp"], 2.0, 5), Phase(2_000, ["mtp"], 3.0, 0)
    before, after = decode([good], 10_000), decode([good, bad], 12_000)
    lost_s = (after[0] - before[0]) - (after[1] - before[1])
    assert lost_s <= MOST_GAINED + FIRST + SHARE * 2_000 + bad.seconds  # the first losses are still allowed
    assert lost_s > MOST_GAINED / 2


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
    _account: LossAccount = field(default_factory=LossAccount)

    def run(self, steps: int) -> float:
        """Return the share of the steps in which drafts were verified, of those in which they might have been."""
        might = [step % EVERY >= WANTED for step in range(steps)]
        for allowed in might:
            if allowed and self._account.allows("mtp"):
                self._verify()
            else:
                self._decode()
        return self.used / sum(might)

    def _decode(self) -> None:
        seconds = self._taken(0.001)
        self.plain_s += 0.001 * MEAN_TAKEN
        self._timer.observe(1, 1, seconds)
        self._account.pass_time(self._timer.mean_plain_s(1))

    def _verify(self) -> None:
        drawn = self.dice.choice(DRAWN)
        seconds = self._taken(0.001 * sum(DRAWN) / len(DRAWN) / self.gain)
        counted = without_stall(seconds, self._timer.seconds(1, 4))
        parts = {"mtp": VerifiedPart(3, drawn - 1, counted / 4)}
        self._account.charge_verified(1, counted, self._timer.mean_plain_s(1), parts)
        self._timer.observe(1, 4, seconds)
        self.used += 1
        self.plain_s += drawn * 0.001 * MEAN_TAKEN

    def _taken(self, seconds: float) -> float:
        taken = seconds * self.dice.lognormvariate(0, 0.15) * (5 if self.dice.random() < 0.02 else 1)
        self.seconds += taken
        return taken


DRAWN = (1, 2, 3, 4, 4, 4)  # tokens of steps with drafts
MEAN_TAKEN = math.exp(0.15**2 / 2) * 1.08  # usual times that a step of the noisy machine takes in the mean


@pytest.mark.parametrize("seed", range(10))
def test_a_proposer_that_gains_is_used_nearly_always_on_a_noisy_machine(seed: int) -> None:
    assert NoisyMachine(Random(seed), 1.1).run(10_000) >= 0.9


@pytest.mark.parametrize("gain", [0.95, 0.8, 0.5])
def test_a_proposer_that_loses_costs_little_on_a_noisy_machine(gain: float) -> None:
    machines = [NoisyMachine(Random(seed), gain) for seed in range(10)]
    for machine in machines:
        machine.run(3_000)
    assert sum(each.seconds for each in machines) <= 1.04 * sum(each.plain_s for each in machines)


@pytest.mark.parametrize("seed", range(3))
def test_a_proposer_that_loses_is_used_rarely_on_a_noisy_machine(seed: int) -> None:
    assert NoisyMachine(Random(seed), 0.8).run(10_000) <= 0.1


def account_of(*proposers: str) -> LossAccount:
    account = LossAccount(len(proposers))
    account.pass_time(1.0)
    for proposer in proposers:
        account.charge(proposer, 0.0)
    return account


def steps_to_pause(account: LossAccount, proposer: str, lost: float) -> int:
    """Return after how many losses a proposer is paused."""
    for number in range(1, 10_000):
        account.charge(proposer, lost)
        if not account.allows(proposer):
            return number
    raise AssertionError("it is never paused")


def steps_to_resume(account: LossAccount, proposer: str) -> int:
    """Return after how many plain steps a proposer is allowed again."""
    for number in range(1, 10_000):
        account.pass_time(1.0)
        if account.allows(proposer):
            return number
    raise AssertionError("it is paused for ever")


def test_a_proposer_that_loses_pauses_no_other() -> None:
    account = account_of("copies", "mtp")
    for _ in range(100):
        if account.allows("mtp"):
            parts = {"copies": VerifiedPart(7, 7), "mtp": VerifiedPart(3, 0, seconds=1.0)}
            account.charge_verified(2, 3.0, 1.0, parts)
    assert account.allows("copies")
    assert not account.allows("mtp")


def test_a_paused_proposer_is_tried_again_when_it_can_lose_a_little() -> None:
    account = account_of("mtp")
    assert steps_to_pause(account, "mtp", 1.0) == FIRST
    assert steps_to_resume(account, "mtp") == pytest.approx(RESUMED / SHARE, abs=1)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_proposers_together_may_lose_no_more_at_first_than_one_alone(number: int) -> None:
    proposers = PROPOSERS[:number]
    account = account_of(*proposers)
    assert sum(steps_to_pause(account, each, 0.5) for each in proposers) == FIRST / 0.5


def test_what_one_proposer_loses_leaves_the_others_a_first_try() -> None:
    account = account_of(*PROPOSERS)
    account.charge("mtp", 100 * FIRST)
    assert steps_to_pause(account, "grammar", 0.5) == RESUMED / 0.5


def test_proposers_that_lose_divide_the_share() -> None:
    account = account_of("copies", "mtp")
    for proposer in ("copies", "mtp"):
        steps_to_pause(account, proposer, 1.0)
    assert steps_to_resume(account, "mtp") == pytest.approx(2 * RESUMED / SHARE, abs=1)


def test_what_a_forward_takes_longer_is_divided_by_the_tokens_proposed() -> None:
    for proposer, lost in {"copies": 2 * 6 / 8, "mtp": 1 + 2 * 2 / 8 - 1}.items():
        charged = account_of("copies", "mtp")
        charged.charge_verified(2, 4.0, 1.0, {"copies": VerifiedPart(6, 0), "mtp": VerifiedPart(2, 2, seconds=1.0)})
        assert steps_to_pause(charged, proposer, 0.25) == (FIRST - RESUMED - lost) // 0.25 + 1


def test_nothing_is_charged_before_a_plain_step_was_measured() -> None:
    account = LossAccount()
    account.charge("copies", 1e6)
    assert account.allows("copies")
