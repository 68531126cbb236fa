"""The proposers alone."""

from dataclasses import dataclass, field

from scripts.benchmarks.speculation.proposers import PROPOSERS, IdleProposer, PredictionProposer
from worker.engine.speculation import speculator
from worker.engine.speculation.copies import CopyProposer
from worker.engine.speculation.mtp import HEAD_RATES
from worker.engine.speculation.offer import Offer
from worker.engine.speculation.width import ForwardCosts
from worker.outcomes import PREDICTION
from worker.request import GenerationRequest

REPEATING = (*range(10, 20), *range(10, 15))


@dataclass
class Row:
    request: GenerationRequest
    id: str = "a"
    answer: list[int] = field(default_factory=list)


def test_a_prediction_alone_copies_nothing_from_the_prompt() -> None:
    row = Row(GenerationRequest("a", REPEATING, 20))
    copied = CopyProposer().offer(row)
    assert copied is not None
    assert copied.tokens[0] == 15
    assert PredictionProposer().offer(row) is None


def test_a_prediction_alone_offers_what_the_client_expects() -> None:
    row = Row(GenerationRequest("a", (1, 2, 3), 20, prediction=(30, 31, 32)))
    offered = PredictionProposer().offer(row)
    assert offered is not None
    assert (offered.kind, offered.tokens) == (PREDICTION, (30, 31, 32))


def test_the_idle_proposer_offers_nothing_that_could_be_copied() -> None:
    assert IdleProposer().offer(Row(GenerationRequest("a", REPEATING, 20))) is None


def test_a_fixed_depth_holds_in_the_block_alone() -> None:
    offers, costs = [Offer("mtp", (1, 2, 3), (0.1,) * 3), None], ForwardCosts()
    before = speculator.choose_width
    with PROPOSERS["mtp-fixed"].chosen():
        assert speculator.choose_width(offers, costs, 8) == 1 + len(HEAD_RATES)
        assert speculator.choose_width([None, None], costs, 8) == 1
    assert speculator.choose_width is before
    with PROPOSERS["mtp"].chosen():
        assert speculator.choose_width is before
