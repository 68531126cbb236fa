import json
from collections.abc import Sequence

import pytest

from tests.schedule.speculation.rows import PlainRow, row
from tests.text.guided import EOS, by, model, request
from tests.text.structured import Schema
from worker.schedule.speculation.forced import GRAMMAR, GrammarProposer, Habits
from worker.schedule.speculation.offer import MAX_DRAFT

REPORT: Schema = {
    "type": "object",
    "properties": {"temperature_celsius": {"type": "integer"}, "is_raining_today": {"type": "boolean"}},
    "required": ["temperature_celsius", "is_raining_today"],
    "additionalProperties": False,
}


def constrained(id: str = "a", namespace: str = "") -> PlainRow:
    return row([1], id=id, namespace=namespace, grammar=model().quick_guide(request(**by(REPORT))))


def forwards(proposer: GrammarProposer, answering: PlainRow, text: str) -> int:
    """Return the number of forwards that an answer takes if all drafts are verified. The grammar accepts a token when
    it is fed, one forward after it was drawn."""
    tokens, grammar, count = model().tokenizer.encode(text), answering.request.grammar, 0
    assert grammar
    while len(answering.answer) < len(tokens):
        offer = proposer.offer(answering)
        rest: Sequence[int] = tokens[len(answering.answer) :]
        draft = offer.tokens if offer else ()
        right = next((at for at, pair in enumerate(zip(draft, rest, strict=False)) if pair[0] != pair[1]), len(draft))
        if offer:
            proposer.kept(answering, len(draft), right)
        for token in answering.answer[grammar.accepted :]:
            grammar.accept(token)
        answering.answer += rest[: right + 1]
        count += 1
    return count


def report(degrees: int, raining: bool) -> str:
    return json.dumps({"temperature_celsius": degrees, "is_raining_today": raining})


def test_forced_tokens_are_offered_with_a_chance_each() -> None:
    answering = constrained()
    answering.answer += model().tokenizer.encode('{"t')
    offer = GrammarProposer().offer(answering)
    assert offer is not None
    assert offer.kind == GRAMMAR
    assert 1 <= len(offer.tokens) == len(offer.chances) <= MAX_DRAFT
    assert min(offer.chances) > 0.9


def test_an_offer_leaves_the_grammar_as_it_was() -> None:
    answering = constrained()
    answering.answer += model().tokenizer.encode('{"t')
    grammar = answering.request.grammar
    assert grammar
    before = grammar.bitmask()
    GrammarProposer().offer(answering)
    assert (grammar.accepted, grammar.bitmask()) == (0, before)


def test_habits_lead_over_white_space_to_more_that_is_forced() -> None:
    proposer, tokens = GrammarProposer(), len(model().tokenizer.encode(report(21, True)))
    first = forwards(proposer, constrained("first"), report(21, True))
    for number in range(4):
        forwards(proposer, constrained(str(number)), report(10 + number, number % 2 == 0))
    later = forwards(proposer, constrained("later"), report(17, False))
    assert later < first < tokens
    assert tokens / later >= 3


def test_habits_stay_within_a_namespace() -> None:
    proposer = GrammarProposer()
    for number in range(5):
        forwards(proposer, constrained(str(number), "one"), report(21, True))
    alone = forwards(GrammarProposer(), constrained("alone"), report(21, True))
    assert forwards(proposer, constrained("other", "two"), report(21, True)) == alone


@pytest.mark.parametrize("answer", [[], [EOS]])
def test_nothing_is_offered_before_an_answer_or_after_its_end(answer: list[int]) -> None:
    answering = constrained()
    answering.answer += answer
    assert GrammarProposer().offer(answering) is None


def test_a_row_without_a_grammar_is_offered_nothing() -> None:
    answering = row([1, 2])
    answering.answer.append(3)
    assert GrammarProposer().offer(answering) is None


def test_a_habit_changes_with_what_is_seen() -> None:
    habits = Habits()
    for following in [5] * 10 + [6] * 10:
        habits.observe(1, following)
    guess = habits.guess(1)
    assert guess is not None
    assert guess[0] == 6
    assert 0.5 < guess[1] <= 1


def test_old_habits_are_forgotten() -> None:
    habits = Habits()
    for token in range(2_000):
        habits.observe(token, 1)
    assert habits.guess(0) is None
    assert habits.guess(1_999) is not None
