"""A network drafts where that is expected to pay: by how often it is right, and by what it takes."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from tests.engine.speculation.test_draft_rows import draft_of
from tests.engine.tiny import prompt
from worker.engine.speculation.draft_model import DRAFT, DraftModelProposer
from worker.engine.speculation.offer import DraftedRow, Offer, Proposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.speculation.tuning import LOSS_SHARE
from worker.request import GenerationRequest

DEPTH = 4


@dataclass
class Row:
    """A row whose next input is the last token of its answer."""

    request: GenerationRequest = field(default_factory=lambda: GenerationRequest("a", prompt(9, 1), 200))
    answer: list[int] = field(default_factory=lambda: [7])
    recomputed = False
    last_unfed = True
    end = 209
    id = "a"


@dataclass
class Input:
    row: Row
    token: int = 7
    finite: bool = True


class Recorder(DraftModelProposer):
    """Records the depths that it is asked for, and the time that it may take to read prompts."""

    def __init__(self) -> None:
        super().__init__(draft_of("qwen3"), DEPTH)
        self.depths = list[int]()
        self.prefill_s = list[float]()

    def prepare(self, batch: Any, inputs: Any, fed: Any = None, depth: int = DEPTH, prefill_s: float = inf) -> bool:
        self.depths.append(depth)
        self.prefill_s.append(prefill_s)
        self.hold("a", len(inputs[0].row.answer), (1,) * depth)
        return False  # the time of this draft says nothing


class Batch:
    """A batch."""

    fed = None


class Step:
    """Decides the steps of a row."""

    def __init__(self, acceptance: float, token_s: float = 0.3) -> None:
        """`acceptance`: how often the drafts of the network turned out right. `token_s`: seconds of a forward
        for each token beyond the first, for which it takes one second."""
        self.network, self.row, self.batch = Recorder(), Row(), Batch()
        self.speculator = Speculator(draft=self.network, max_draft=7)
        for width in range(1, 9):
            for _ in range(3):
                self.speculator.costs.observe(1, width, 1.0 + token_s * (width - 1))
        for at in range(60):
            self.network.observe_accepted(self.row, DEPTH, DEPTH if at % 10 < 10 * acceptance else 0)
        self.plain_steps(1)
        self.loses(0.5)  # it was tried

    def plain_steps(self, number: int) -> None:
        self.speculator._budget.pass_time(1.0, number)

    def loses(self, seconds: float) -> None:
        """Charge the network for a draft."""
        self.speculator._budget.charge(self.network, seconds)

    def drafting_takes(self, plain_steps: float, depth: int = DEPTH) -> None:
        """Measure the time of a draft."""
        for _ in range(3):
            self.speculator.costs.observe_draft(DRAFT, 1, depth, plain_steps)

    def ask_for_drafts(self, more_s: float = inf) -> bool:
        return self.speculator.ask_for_drafts([self.row], more_s=more_s)

    def depth(self, more_s: float = inf) -> int | None:
        """Return the tokens that the network drafts; None: it does not."""
        before = len(self.network.depths)
        batch: Any = self.batch
        self.speculator.prepare(batch, [Input(self.row)], more_s)
        return self.network.depths[-1] if len(self.network.depths) > before else None

    def draft(self) -> tuple[int, ...]:
        (made,) = self.speculator.proposals([Input(self.row)])
        assert made is not None
        return made.offer.tokens


def test_a_network_drafts_as_deep_as_its_drafts_are_likely_to_be_right() -> None:
    step = Step(acceptance=1.0)
    assert step.ask_for_drafts()
    assert step.depth() == DEPTH
    assert step.draft() == (1,) * DEPTH


@pytest.mark.parametrize(("plain_steps", "drafts"), [(0.2, True), (2.0, True), (6.0, False)])
def test_a_network_that_takes_longer_than_it_saves_is_not_asked(plain_steps: float, drafts: bool) -> None:
    step = Step(acceptance=1.0)
    step.drafting_takes(plain_steps)
    assert step.ask_for_drafts() == drafts
    assert (step.depth() is not None) == drafts


def test_a_draft_is_as_deep_as_its_time_pays() -> None:
    step = Step(acceptance=1.0)
    step.drafting_takes(0.1, depth=1)
    for depth in range(2, DEPTH + 1):
        step.drafting_takes(8.0, depth=depth)
    assert step.ask_for_drafts()
    assert step.depth() == 1


def test_a_network_that_is_mostly_wrong_is_not_asked() -> None:
    step = Step(acceptance=0.0)
    step.drafting_takes(0.2)
    assert not step.ask_for_drafts()
    assert step.depth() is None


def test_a_network_that_did_not_pay_is_tried_now_and_then_and_not_verified() -> None:
    step = Step(acceptance=0.0)
    step.drafting_takes(0.2)
    assert not step.ask_for_drafts()
    step.plain_steps(200)
    assert step.ask_for_drafts()
    assert step.depth() == DEPTH
    assert step.draft() == ()
    assert step.depth() is None, "one trial is one draft"
    asked = 0
    for _ in range(10_000):
        step.plain_steps(1)
        if step.ask_for_drafts():
            step.loses(0.5)
            asked += 1
    assert asked == pytest.approx(10_000 * LOSS_SHARE / 0.5, rel=0.5)


@pytest.mark.parametrize(("more_s", "depth"), [(2.5, 4), (1.2, 2), (0.4, None)])
def test_a_trial_takes_no_more_time_than_the_step_has(more_s: float, depth: int | None) -> None:
    step = Step(acceptance=0.0)
    step.drafting_takes(2.0)
    step.plain_steps(200)
    assert step.ask_for_drafts(more_s)
    assert step.depth(more_s) == depth


def test_prompts_are_read_in_the_time_that_drafts_leave_of_the_step() -> None:
    step = Step(acceptance=1.0)
    step.drafting_takes(0.4)
    assert step.depth(more_s=2.0) == DEPTH
    assert step.network.prefill_s == [pytest.approx(1.6)]


def test_a_network_is_not_tried_if_it_could_not_pay_either() -> None:
    step = Step(acceptance=0.0, token_s=2.0)
    step.plain_steps(200)
    assert not step.ask_for_drafts()


def test_drafts_end_where_the_answer_does() -> None:
    step = Step(acceptance=1.0)
    step.row.request = GenerationRequest("a", prompt(9, 1), 4)
    assert step.depth() == 2
    step.row.answer = [7, 7, 7, 7]
    assert not step.ask_for_drafts()
    assert step.depth() is None


class Copies(Proposer):
    """A proposer that is always right."""

    def offer(self, row: DraftedRow) -> Offer:
        return Offer("copy", (5,) * 7, (0.99,) * 7)


def test_a_network_does_not_draft_where_a_copy_is_better() -> None:
    step = Step(acceptance=1.0)
    step.speculator._proposers = [Copies()]
    step.drafting_takes(0.5)
    assert step.ask_for_drafts()
    assert step.depth() is None
    assert step.draft() == (5,) * 7
