"""What a network's drafts teach, verified or not."""

from dataclasses import dataclass, field

from worker.engine.speculation.offer import NetworkProposer
from worker.request import GenerationRequest

PRIORS = (0.7, 0.6, 0.5)


@dataclass
class Row:
    id: str = "a"
    answer: list[int] = field(default_factory=lambda: [7])

    @property
    def request(self) -> GenerationRequest:
        return GenerationRequest(self.id, (1, 2), 50)


def rates(proposer: NetworkProposer, row: Row) -> tuple[float, ...]:
    offer = proposer.foresee(row)
    assert offer is not None
    return offer.acceptance


def compared(*drawn: int) -> tuple[float, ...]:
    """Return the rates after a draft of 4, 5, 6 that was not verified, and these tokens, one at a time."""
    proposer, row = NetworkProposer("any", PRIORS), Row()
    proposer.hold("a", 1, (4, 5, 6))
    for token in drawn:
        row.answer.append(token)
        rates(proposer, row)
    return rates(proposer, row)


def test_a_draft_that_was_not_verified_is_compared_with_what_the_row_draws() -> None:
    first, second, third = compared(4, 5, 6)
    assert first > PRIORS[0]
    assert second > PRIORS[1]
    assert third > PRIORS[2]


def test_tokens_after_a_wrong_one_are_not_compared() -> None:
    first, second, third = compared(4, 9, 6)
    assert first > PRIORS[0]
    assert second < PRIORS[1]
    assert third == PRIORS[2]


def test_tokens_are_compared_as_soon_as_they_are_drawn() -> None:
    first, *others = compared(4)
    assert first > PRIORS[0]
    assert tuple(others) == PRIORS[1:]


def test_a_verified_draft_is_not_compared_again() -> None:
    proposer, row = NetworkProposer("any", PRIORS), Row()
    proposer.hold("a", 1, (4, 5, 6))
    proposer.observe_accepted(row, 2, 1)
    learned = rates(proposer, row)
    row.answer += [4, 9, 6]
    assert rates(proposer, row) == learned


def test_what_is_hoped_for_counts_for_less_with_each_draft_that_was_compared() -> None:
    proposer, row = NetworkProposer("any", PRIORS), Row()
    learned = [rates(proposer, row)[0]]
    for _ in range(20):
        proposer.observe_accepted(row, 3, 0)
        learned.append(rates(proposer, row)[0])
    assert learned == sorted(learned, reverse=True)
    assert learned[0] == PRIORS[0]
    assert learned[1] > PRIORS[0] / 2
    assert learned[-1] < 0.3


def test_what_is_hoped_for_does_not_depend_on_what_was_learned() -> None:
    proposer, row = NetworkProposer("any", PRIORS), Row()
    for _ in range(20):
        proposer.observe_accepted(row, 3, 0)
    hoped = proposer.foresee(row, hopeful=True)
    assert hoped is not None
    assert hoped.acceptance == PRIORS
    assert rates(proposer, row)[0] < 0.3


def test_an_offer_is_as_long_as_the_draft() -> None:
    proposer, row = NetworkProposer("any", PRIORS), Row()
    proposer.hold("a", 1, (4, 5))
    offer = proposer.offer(row)
    assert offer is not None
    assert (offer.tokens, offer.acceptance) == ((4, 5), PRIORS[:2])
    row.answer.append(4)
    assert proposer.offer(row) is None
