"""Drafts that gain nothing cost a step hardly anything, and those that are verified keep to the limit of a gap."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import pause_nothing, recurrence_of
from tests.engine.tiny import model, prompt
from worker.engine.speculation.offer import DraftedRow, Offer, Proposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.step.planner import GapLimit
from worker.outcomes import MAX_DRAFT, Speculated
from worker.request import GenerationRequest

ANSWER = 100


class Counting(Proposer):
    """Proposer that counts how often it is asked. Offers right tokens if it knows the answers."""

    def __init__(self, acceptance: float, answers: Mapping[str, Sequence[int]] | None = None) -> None:
        self.acceptance, self._answers = acceptance, answers or {}
        self.asked = Counter[str]()

    def offer(self, row: DraftedRow) -> Offer | None:
        self.asked[row.id] += 1
        at, wrong = len(row.answer), (5,) * ANSWER
        tokens = tuple(self._answers.get(row.id, wrong)[at : at + MAX_DRAFT])
        return Offer("counting", tokens, (self.acceptance,) * len(tokens))


@pytest.fixture(autouse=True)
def any_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pause_nothing(monkeypatch)


def speculator(*proposers: Counting) -> Speculator:
    return Speculator(proposers, max_draft=MAX_DRAFT, recurrence=recurrence_of(model("qwen3")))


def run(drafting: Speculator, step_s: float = 1.0, rows: int = 3) -> Run:
    driven = Run(model("qwen3"), speculator=drafting, step_s=step_s)
    for index in range(rows):
        driven.submit(GenerationRequest(str(index), prompt(9, index), ANSWER))
    return driven


def test_a_proposer_is_asked_once_for_each_row_and_step_at_most() -> None:
    proposer = Counting(0.95)
    driven = run(speculator(proposer))
    while len(driven.engine):
        before = proposer.asked.copy()
        driven.step()
        assert max((proposer.asked - before).values(), default=0) <= 1
    assert proposer.asked.total() > ANSWER


@dataclass
class OneRow:
    """A row whose next input is the last token of its answer."""

    request: GenerationRequest
    answer: list[int]
    recomputed = False
    last_unfed = True
    end = 100

    @property
    def id(self) -> str:
        return self.request.id


@dataclass
class Input:
    row: OneRow
    token: int
    finite: bool = True


@pytest.mark.parametrize(("more_s", "longest"), [(0.5, 0), (1.0, 1), (3.5, 3), (inf, MAX_DRAFT)])
def test_a_draft_is_as_long_as_its_forward_may_take(more_s: float, longest: int) -> None:
    drafting, row = speculator(Counting(0.95)), OneRow(GenerationRequest("a", (1, 2), 50), [3])
    for width in range(1, MAX_DRAFT + 2):
        for _ in range(3):
            drafting.costs.observe(1, width, 10.0 + width)  # more rows per second, the wider
    assert drafting.ask_for_drafts([row], more_s=more_s) == (longest > 0)
    (made,) = drafting.proposals([Input(row, 3)], more_s)
    assert made is not None
    assert len(made.offer.tokens) == longest


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_a_step_verifies_drafts_within_the_limit_of_its_gap(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    answers = run(speculator()).drain()
    monkeypatch.setattr(GapLimit, "verify_s", lambda *given, **named: seconds)
    driven = run(speculator(Counting(0.95, answers)))
    verified = list[Speculated]()
    while len(driven.engine):
        verified += [each for each in driven.step().outcomes if isinstance(each, Speculated)]
    assert bool(verified) == (seconds > 0)


def limited(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let drafts add so many seconds to a step."""
    monkeypatch.setattr(GapLimit, "verify_s", lambda limit, plain_s, *, running: plain_s + seconds)


@pytest.mark.parametrize("seconds", [-1.0, 1e-9])
def test_the_limit_of_a_gap_is_no_evidence_against_a_proposer(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    answers = run(speculator()).drain()
    proposer = Counting(0.95, answers)
    driven = run(speculator(proposer))
    limited(monkeypatch, seconds)
    driven.until(lambda: len(driven.generated["0"]) > 60)
    assert proposer.asked["0"] <= 3 if seconds < 0 else proposer.asked["0"] >= 50
    limited(monkeypatch, 100.0)
    before, verified = proposer.asked["0"], list[Speculated]()
    for _ in range(3):
        verified += [each for each in driven.step().outcomes if isinstance(each, Speculated)]
    assert proposer.asked["0"] == before + 3
    assert verified
