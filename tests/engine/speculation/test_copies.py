from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.speculation.rows import PlainRow, row
from worker.engine.speculation.copies import (
    COPY,
    CopyProposer,
    NgramIndex,
)
from worker.engine.speculation.tuning import INDEXED_PER_OFFER, INDEXED_PER_STEP, WINDOW
from worker.outcomes import MAX_DRAFT, PREDICTION

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafted(proposer: CopyProposer, answering: PlainRow) -> tuple[int, ...]:
    proposer.begin_step([answering])
    offer = proposer.offer(answering)
    return offer.tokens if offer else ()


def steps(proposer: CopyProposer, answering: PlainRow, text: list[int]) -> int:
    """Return the forwards that a row takes to write the text, if each draft is verified."""
    forwards = 0
    while len(answering.answer) < len(text):
        rest = text[len(answering.answer) :]
        draft = drafted(proposer, answering)
        right = next((at for at, pair in enumerate(zip(draft, rest, strict=False)) if pair[0] != pair[1]), len(draft))
        answering.answer += rest[: right + 1]
        forwards += 1
    return forwards


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that each call has indexed."""
    catch_up, counts = NgramIndex.catch_up, list[int]()

    def counting(index: NgramIndex, most: int) -> int:
        counts.append(catch_up(index, most))
        return counts[-1]

    monkeypatch.setattr(NgramIndex, "catch_up", counting)
    return counts


def random_text(length: int, seed: int = 0) -> list[int]:
    dice = Random(seed)
    return [dice.randrange(30_000) for _ in range(length)]


@given(prompt=TOKENS, answer=TOKENS, prediction=st.lists(st.integers(0, 3), max_size=40))
def test_an_offer_has_an_acceptance_rate_for_each_of_a_few_tokens(
    prompt: list[int], answer: list[int], prediction: list[int]
) -> None:
    proposer, answering = CopyProposer(), row(prompt, prediction)
    for token in answer:
        answering.answer.append(token)
        if offer := proposer.offer(answering):
            assert 1 <= len(offer.tokens) == len(offer.acceptance) <= MAX_DRAFT
            assert {*offer.tokens} <= {*prompt, *answering.answer, *prediction}
            assert all(0 < rate < 1 for rate in offer.acceptance)


@given(prompt=TOKENS, answer=TOKENS)
def test_tokens_that_come_together_lead_to_the_same_offer(prompt: list[int], answer: list[int]) -> None:
    often, seldom, answering = CopyProposer(), CopyProposer(), row(prompt)
    often.offer(answering)
    seldom.offer(answering)
    for token in answer:
        answering.answer.append(token)
        often.offer(answering)
    assert drafted(often, answering)[:1] == drafted(seldom, answering)[:1]


def test_what_followed_an_ending_earlier_is_offered() -> None:
    offer = CopyProposer().offer(row([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]))
    assert offer is not None
    assert (offer.kind, offer.tokens) == (COPY, (4, 5, 6, 7, 8, 9, 0))


def test_a_longer_ending_is_preferred_to_a_recent_one() -> None:
    offer = CopyProposer().offer(row([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3]))
    assert offer is not None
    assert offer.tokens[0] == 4


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert drafted(CopyProposer(), row([7, 1, 2, 1, 2, 1, 2, 1])) == (2, 1, 2, 1, 2, 1, 2)


def test_an_ending_that_is_new_is_offered_nothing() -> None:
    assert CopyProposer().offer(row(random_text(500))) is None


def test_a_copy_of_the_prompt_takes_an_eighth_of_the_forwards() -> None:
    prompt = random_text(400)
    assert steps(CopyProposer(), row(prompt), prompt) <= 3 + 400 / (MAX_DRAFT + 1) + 1


def test_a_prediction_is_offered_before_the_answer_has_begun() -> None:
    offer = CopyProposer().offer(row([1, 2], prediction=[5, 6, 7]))
    assert offer is not None
    assert (offer.kind, offer.tokens) == (PREDICTION, (5, 6, 7))


@pytest.mark.parametrize("seed", range(5))
def test_an_edit_finds_its_place_in_the_prediction_again(seed: int) -> None:
    dice, file = Random(seed), random_text(600, seed)
    edited = [*file[:100], *random_text(5, seed + 1), *file[100:300], *file[320:500], *random_text(3, seed + 2)]
    edited += file[500:]
    forwards = steps(CopyProposer(), row(random_text(20, dice.randrange(99)), prediction=file), edited)
    assert forwards <= len(edited) / (MAX_DRAFT + 1) + 8 + 4 * 4


def test_after_a_change_the_nearest_of_equal_places_goes_on() -> None:
    line = [1, 2, 3]
    file = [10, *line, 20, *line, 30, *line, 40]
    proposer, answering = CopyProposer(), row([0], prediction=file)
    drafted(proposer, answering)
    for token in [10, *line, 99, *line]:  # 20 is replaced
        answering.answer.append(token)
        draft = drafted(proposer, answering)
    assert draft[0] == 30


def test_acceptance_is_learned_without_a_forward() -> None:
    proposer = CopyProposer()
    prompt = [1, 2, 3, 4] * 20
    wrong = row(prompt, id="wrong")
    for number in range(60):
        proposer.offer(wrong)
        wrong.answer += [1, 2, 3, 100 + number]
    right = row(prompt, id="right")
    offer = proposer.offer(right)
    assert offer is not None
    before = offer.acceptance[0]
    for number in range(40):
        right.answer.append(1 + number % 4)
        offer = proposer.offer(right)
    assert offer is not None
    assert before < offer.acceptance[0]


def test_a_row_that_is_forgotten_begins_anew() -> None:
    proposer = CopyProposer()
    first = row([1, 2, 3, 4, 1, 2, 3])
    proposer.offer(first)
    proposer.forget(first)
    proposer.forget(first)
    assert drafted(proposer, row([5, 6, 7, 8, 5, 6, 7]))[0] == 8


def test_a_row_that_has_lost_tokens_is_read_anew() -> None:
    proposer, answering = CopyProposer(), row([1, 2, 3, 4, 1])
    answering.answer += [2, 3]
    assert drafted(proposer, answering)[0] == 4
    answering.answer[:] = [9]
    assert drafted(proposer, answering) == ()


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    prompt = [*range(WINDOW + 100), 40_000, 40_001, 40_002]
    proposer, answering = CopyProposer(), row(prompt)
    answering.answer += [60_000, 60_001, 60_002]
    assert drafted(proposer, answering) == ()
    for _ in range(WINDOW // INDEXED_PER_STEP):
        proposer.begin_step([answering])
    assert drafted(proposer, answering)[0] == 60_003


def test_rows_that_are_not_asked_are_indexed(indexed: list[int]) -> None:
    """Asked at last, they have hardly anything left to index."""
    proposer, rows = CopyProposer(), [row(random_text(2_000, seed), id=str(seed)) for seed in range(20)]
    for token in range(60):
        for each in rows:
            each.answer.append(40_000 + token)
        proposer.begin_step(rows)
    indexed.clear()
    for each in rows:
        each.answer += each.request.prompt[1_000:1_003]
        assert drafted(proposer, each) == each.request.prompt[1_003:1_010]
    assert sum(indexed) <= 60 * len(rows)


def test_a_step_indexes_few_tokens_of_all_rows(indexed: list[int]) -> None:
    proposer, text = CopyProposer(), random_text(5_000)
    rows = [row(text, prediction=text, id=str(number)) for number in range(12)]
    for each in rows[:6]:
        each.answer += text  # they resume
    for _ in range(100):
        indexed.clear()
        proposer.begin_step(rows)
        assert sum(indexed) <= INDEXED_PER_STEP
        for each in rows:
            proposer.offer(each)
        assert sum(indexed) <= INDEXED_PER_STEP + 2 * INDEXED_PER_OFFER * len(rows)


def test_a_row_that_resumes_finds_its_place_in_the_prediction() -> None:
    text = random_text(1_000)
    answering = row([1, 2], prediction=text)
    answering.answer += text[:700]
    proposer = CopyProposer()
    for _ in range(3):
        proposer.begin_step([answering])
    assert drafted(proposer, answering) == tuple(text[700:707])
