"""The drafts that an MTP head offers for the rows of batches."""

from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from tests.engine.speculation.mtp.test_drafts import DEPTH, Sequence, head_of, reference_of, sequence
from worker.engine.speculation.mtp import MTP, FedTokens, HeadProposer
from worker.engine.speculation.offer import Offer
from worker.request import GenerationRequest

NAME = "qwen3_5"
END = 70


class Batch:
    """A batch that the proposer tells from others."""


@dataclass
class Answering:
    """A row whose answer consists of its sequence's tokens from the first one on that it has decoded."""

    id: str
    sequence: Sequence
    answer: list[int] = field(default_factory=list)
    recomputed = False
    last_unfed = True
    end = END

    @property
    def request(self) -> GenerationRequest:
        return GenerationRequest(self.id, (1, 2), 50)

    def decode(self, tokens: int, width: int) -> tuple[mx.array, list[int], int]:
        advanced = self.sequence.advance(tokens, width)
        self.answer += advanced[1]
        return advanced

    def skip(self, tokens: int) -> None:
        """Decode without drafts."""
        self.answer += self.sequence.tokens[self.sequence.known + 1 : self.sequence.known + 1 + tokens]
        self.sequence.known += tokens


@dataclass
class Input:
    """A row and its next input."""

    row: Answering
    finite: bool = True

    @property
    def token(self) -> int:
        return self.row.answer[-1] if self.row.answer else 1


def row(id: str, seed: int, known: int) -> Answering:
    return Answering(id, sequence(NAME, seed, known))


def joined(proposer: HeadProposer, *rows: Answering) -> list[Answering]:
    for each in rows:
        proposer.add_prompt(each.id, each.sequence.entries())
    return list(rows)


def forward(rows: list[Answering], counts: list[int]) -> FedTokens:
    width = max(counts)
    advanced = [each.decode(count, width) for each, count in zip(rows, counts, strict=True)]
    return FedTokens(
        tuple(each.id for each in rows),
        mx.concatenate([each[0] for each in advanced]),
        tuple(each[2] for each in advanced),
        tuple(tuple(each[1]) for each in advanced),
    )


def inputs(rows: list[Answering]) -> list[Input]:
    return [Input(each) for each in rows]


def offered(proposer: HeadProposer, rows: list[Answering]) -> list[list[int] | None]:
    offers = [proposer.offer(each) for each in rows]
    return [list(offer.tokens) if offer else None for offer in offers]


def test_rows_are_offered_their_own_drafts_in_whatever_order_a_batch_holds_them() -> None:
    proposer, batch = HeadProposer(head_of(NAME), DEPTH), Batch()
    a, b, c = joined(proposer, row("a", 1, 9), row("b", 2, 4), row("c", 3, 12))
    fed = forward([a, b], [1, 3])
    proposer.prepare(batch, inputs([b, c, a]), fed)
    assert offered(proposer, [b, c, a]) == [b.sequence.expected(), None, a.sequence.expected()]
    fed = forward([b, c, a], [2, 1, 4])
    proposer.prepare(batch, inputs([c, a]), fed)
    assert offered(proposer, [c, a]) == [c.sequence.expected(), a.sequence.expected()]
    fed = forward([a, c], [3, 2])
    proposer.prepare(batch, inputs([a, c]), fed)
    assert offered(proposer, [a, c]) == [a.sequence.expected(), c.sequence.expected()]


def test_a_forward_of_one_token_is_followed_by_the_rows_inputs() -> None:
    proposer, rows = HeadProposer(head_of(NAME), DEPTH), [row("a", 1, 9)]
    joined(proposer, *rows)
    whole = forward(rows, [1])
    proposer.prepare(Batch(), inputs(rows), FedTokens(whole.ids, whole.hidden, whole.positions))
    assert offered(proposer, rows) == [rows[0].sequence.expected()]


def test_a_draft_is_offered_only_after_the_token_that_it_follows() -> None:
    proposer, rows = HeadProposer(head_of(NAME), DEPTH), [row("a", 1, 9)]
    joined(proposer, *rows)
    fed = forward(rows, [2])
    proposer.prepare(Batch(), inputs(rows), fed)
    rows[0].answer.append(5)
    assert proposer.offer(rows[0]) is None


def test_a_row_that_decoded_without_drafts_lacks_these_entries_and_is_drafted_at_its_true_position() -> None:
    proposer, batch, rows = HeadProposer(head_of(NAME), DEPTH), Batch(), [row("a", 1, 0)]
    rows[0].skip(6)
    fed = forward(rows, [3])
    proposer.prepare(batch, inputs(rows), fed)
    own = rows[0].sequence
    alone = reference_of(NAME).drafts(own.tokens[6 : own.known + 1], own.hidden[0, 6 : own.known], DEPTH)
    assert offered(proposer, rows) == [alone]


def test_a_row_without_a_forward_in_its_batch_is_offered_nothing() -> None:
    proposer, rows = HeadProposer(head_of(NAME), DEPTH), [row("a", 1, 9)]
    proposer.prepare(Batch(), inputs(rows), None)
    assert offered(proposer, rows) == [None]


def foreseen(proposer: HeadProposer, own: Answering) -> Offer:
    offer = proposer.foresee(own)
    assert offer is not None
    return offer


def test_a_row_that_leaves_its_batch_holds_no_slot_there() -> None:
    proposer, batch = HeadProposer(head_of(NAME), DEPTH), Batch()
    rows = joined(proposer, row("a", 1, 9), row("b", 2, 4))
    fed = forward(rows, [1, 3])
    proposer.prepare(batch, inputs(rows), fed)
    assert proposer.nbytes_of(batch) == proposer.nbytes > 0
    proposer.leave("a")
    proposer.leave("b")
    assert proposer.nbytes_of(batch) == 0
    assert offered(proposer, rows[:1]) == [rows[0].sequence.expected()], "it is offered its last draft all the same"


def test_a_row_that_leaves_its_batch_moves_one_other() -> None:
    proposer, batch = HeadProposer(head_of(NAME), DEPTH), Batch()
    rows = joined(proposer, *(row(id, seed, 40) for seed, id in enumerate("abcdefgh", 1)))
    fed = forward(rows, [1] * len(rows))
    proposer.prepare(batch, inputs(rows), fed)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    proposer.leave("a")
    assert mx.get_peak_memory() - before < proposer.nbytes / 4
    fed = forward(rows[1:], [2] * 7)
    proposer.prepare(batch, inputs(rows[1:]), fed)
    assert offered(proposer, rows[1:]) == [each.sequence.expected() for each in rows[1:]]


def test_rates_are_learned_by_depth() -> None:
    proposer, own = HeadProposer(head_of(NAME), DEPTH), row("a", 1, 9)
    before = foreseen(proposer, own).acceptance
    for _ in range(20):
        proposer.observe_accepted(own, 3, 1)
    first, second, third = foreseen(proposer, own).acceptance
    assert first > before[0]
    assert second < before[1]
    assert third == before[2], "a token after a wrong one is not compared"
    assert foreseen(proposer, own).kind == MTP


def test_a_forgotten_row_is_offered_nothing_and_a_batch_that_is_gone_holds_nothing() -> None:
    proposer, batch, rows = HeadProposer(head_of(NAME), DEPTH), Batch(), [row("a", 1, 9)]
    joined(proposer, *rows)
    fed = forward(rows, [2])
    proposer.prepare(batch, inputs(rows), fed)
    assert proposer.nbytes > 0
    proposer.forget(rows[0])
    assert offered(proposer, rows) == [None]
    del batch
    assert proposer.nbytes == 0


@pytest.mark.parametrize(("most", "depth"), [(1, 7), (DEPTH, 1), (DEPTH, 2), (2, DEPTH)])
def test_a_draft_is_as_deep_as_it_was_asked_for(most: int, depth: int) -> None:
    proposer, rows = HeadProposer(head_of(NAME), most), [row("a", 1, 9)]
    joined(proposer, *rows)
    fed = forward(rows, [2])
    assert proposer.prepare(Batch(), inputs(rows), fed, depth)
    assert offered(proposer, rows) == [rows[0].sequence.expected()[: min(depth, most)]]
