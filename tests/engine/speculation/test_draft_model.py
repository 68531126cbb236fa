"""The drafts that a draft model offers for the rows of batches."""

from dataclasses import dataclass, field

from tests.engine.speculation.test_draft_rows import DEPTH, draft_of, expected
from tests.engine.tiny import prompt
from worker.engine.speculation.draft_model import DraftModelProposer
from worker.request import GenerationRequest


@dataclass
class Answering:
    """A row."""

    id: str
    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)

    recomputed = False
    last_unfed = True
    end = 50

    @property
    def request(self) -> GenerationRequest:
        return GenerationRequest(self.id, self.prompt, 50)


@dataclass
class Input:
    """A row and its next input."""

    row: Answering
    token: int = 7
    finite: bool = True


class Batch:
    """A batch that the proposer tells from others."""


def test_a_row_is_offered_its_draft_once_its_next_input_is_known() -> None:
    proposer, row, batch = DraftModelProposer(draft_of("qwen3"), DEPTH), Answering("a", prompt(9, 1), [7]), Batch()
    assert proposer.offer(row) is None
    proposer.prepare(batch, [Input(row)])
    offer = proposer.offer(row)
    assert offer is not None
    assert offer.tokens == expected("qwen3", (*row.prompt, 7))
    row.answer.append(5)
    assert proposer.offer(row) is None


def test_rates_follow_what_was_right_and_a_batch_that_is_gone_holds_nothing() -> None:
    proposer, row, batch = DraftModelProposer(draft_of("qwen3"), DEPTH), Answering("a", prompt(9, 1), [7]), Batch()
    before = proposer.foresee(row)
    for _ in range(30):
        proposer.observe_accepted(row, DEPTH, 0)
    after = proposer.foresee(row)
    assert before is not None
    assert after is not None
    assert after.acceptance[0] < before.acceptance[0]
    proposer.prepare(batch, [Input(row)])
    assert proposer.nbytes > 0
    del batch
    assert proposer.nbytes == 0
