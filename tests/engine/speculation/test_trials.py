"""A head that pays is found soon, and one that does not costs little, on a machine whose steps vary."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from random import Random
from typing import Any

import pytest

from worker.engine.speculation import speculator
from worker.engine.speculation.mtp import HEAD_RATES
from worker.engine.speculation.offer import DraftedRow, NetworkProposer, Offer, Proposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.speculation.tuning import CREDIT, LOSS_SHARE
from worker.outcomes import MAX_DRAFT
from worker.request import GenerationRequest

PLAIN_S, DRAFTED_S, WIDER_S = 3.0, (1.7, 2.3, 2.8), (3.9, 4.4, 4.8)  # of tiny-chat, by depth, in ms
GOOD, BAD = (0.84, 0.88, 0.90), (0.3, 0.3, 0.3)
WRONG = 0


@dataclass
class Machine:
    """The time, and steps that vary by a tenth."""

    dice: Random
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def run(self, seconds: float) -> float:
        """Pass this time, about."""
        taken = seconds * self.dice.lognormvariate(0, 0.1)
        self.now += taken
        return taken


@dataclass
class Row:
    """A row whose answer counts from 1."""

    request: GenerationRequest = field(default_factory=lambda: GenerationRequest("a", (1, 2), 10_000))
    answer: list[int] = field(default_factory=lambda: [1])
    recomputed = False
    last_unfed = True
    end = 10_000
    id = "a"

    @property
    def token(self) -> int:
        return self.answer[-1]

    @property
    def finite(self) -> bool:
        return True

    @property
    def row(self) -> "Row":
        return self

    def draw(self, tokens: int) -> None:
        self.answer += range(self.token + 1, self.token + 1 + tokens)


class Network(NetworkProposer):
    """A network whose tokens are right as often as given by depth, and that takes some time."""

    def __init__(self, machine: Machine, rates: Sequence[float]) -> None:
        super().__init__("mtp", HEAD_RATES)
        self._machine, self._right = machine, rates

    def prepare(
        self, batch: object, inputs: Sequence[Any], fed: object = None, depth: int = 3, prefill_s: float = inf
    ) -> bool:
        rows = [each.row for each in inputs]
        self._machine.run(DRAFTED_S[depth - 1])
        right = (self._machine.dice.random() < rate for rate in self._right)
        last = rows[0].answer[-1]
        tokens = [last + index if each else WRONG for index, each in zip(range(1, 1 + depth), right, strict=False)]
        self.hold(rows[0].id, len(rows[0].answer), tokens)
        return True


@dataclass
class Verified:
    tokens: list[Any]
    accepted: list[int]


@dataclass(eq=False)
class Group:
    """A group of one row."""

    machine: Machine
    rows: list[Row] = field(default_factory=lambda: [Row()])
    fed: None = None
    drafted: list[bool] = field(default_factory=list)  # of each step

    def launch(self) -> None:
        self.rows[0].draw(1)
        self.drafted.append(False)

    def verify(self, inputs: Sequence[Row], drafts: Sequence[Sequence[int] | None], recurrence: object) -> Verified:
        """Verify the draft of the row."""
        draft, last = drafts[0] or (), inputs[0].token
        self.machine.run(WIDER_S[len(draft) - 1])
        accepted = len([*takewhile(lambda pair: pair[0] == pair[1], zip(draft, range(last + 1, 10_000), strict=False))])
        self.rows[0].draw(1 + accepted)
        self.drafted.append(True)
        return Verified([], [accepted])


def decode(machine: Machine, deciding: Speculator, steps: int) -> Group:
    """Run the steps of a row."""
    group: Any = Group(machine)
    for _ in range(steps):
        chosen = deciding.choose_groups([group])
        deciding.begin_step(0.0)
        verified = deciding.verify(group, group.rows, 0.0) if chosen else None
        if verified is None:
            deciding.launch_plain(group) if chosen else group.launch()
            deciding.observe_plain(1, machine.run(PLAIN_S))
    return group


def with_network(machine: Machine, rates: Sequence[float]) -> Speculator:
    return Speculator(draft=Network(machine, rates), max_draft=MAX_DRAFT)


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(Random(request.param))
    monkeypatch.setattr(speculator, "time", made)
    return made


class Slow(Proposer):
    """A proposer that takes some time to offer nothing."""

    def __init__(self, machine: Machine, seconds: float) -> None:
        self._machine, self._seconds = machine, seconds
        self.asked = 0

    def offer(self, row: DraftedRow) -> Offer | None:
        self._machine.now += self._seconds
        self.asked += 1
        return None


@pytest.mark.parametrize("machine", range(5), indirect=True)
@pytest.mark.parametrize("share", [0.001, 0.05, 1.0])  # of a plain step, that an ask takes
def test_looking_for_drafts_in_vain_takes_its_share(machine: Machine, share: float) -> None:
    slow, steps = Slow(machine, share * PLAIN_S), 5_000
    decode(machine, Speculator([slow], max_draft=MAX_DRAFT), steps)
    assert slow.asked == pytest.approx(min(steps, steps * LOSS_SHARE / share), rel=0.1, abs=3)


@pytest.mark.parametrize("machine", range(5), indirect=True)
def test_a_head_that_pays_is_found_at_once(machine: Machine) -> None:
    assert sum(decode(machine, with_network(machine, GOOD), 100).drafted) >= 80


@pytest.mark.parametrize("machine", range(5), indirect=True)
def test_what_a_head_gains_is_not_lost_to_pauses(machine: Machine) -> None:
    group = decode(machine, with_network(machine, GOOD), 1_000)
    assert machine.now <= PLAIN_S * len(group.rows[0].answer) / 1.1


@pytest.mark.parametrize("machine", range(5), indirect=True)
@pytest.mark.parametrize("steps", [400, 4_000])
def test_a_head_that_does_not_pay_loses_its_share_and_the_first_trials(machine: Machine, steps: int) -> None:
    group = decode(machine, with_network(machine, BAD), steps)
    assert machine.now <= PLAIN_S * ((1 + LOSS_SHARE) * len(group.rows[0].answer) + CREDIT + 8)
