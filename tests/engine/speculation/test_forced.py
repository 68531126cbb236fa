import json
from collections.abc import Sequence

import pytest

from tests.engine.speculation.rows import PlainRow, row
from tests.text.guided import EOS, by, model, request
from tests.text.structured import Schema
from worker.engine.speculation.forced import GRAMMAR, GUESS, GrammarProposer
from worker.outcomes import MAX_DRAFT
from worker.request import GrammarAhead
from worker.text.grammar.row.grammar import RowGrammar

REPORT: Schema = {
    "type": "object",
    "properties": {
        "temperature_celsius": {"type": "integer"},
        "is_raining_today": {"type": "boolean"},
        "direction_of_the_wind": {"enum": ["north", "south"]},
    },
    "required": ["temperature_celsius", "is_raining_today", "direction_of_the_wind"],
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
        for token in answering.answer[grammar.accepted :]:
            grammar.accept(token)
        answering.answer += rest[: right + 1]
        count += 1
    return count


def report(degrees: int, raining: bool, separators: tuple[str, str] = (", ", ": ")) -> str:
    values = {"temperature_celsius": degrees, "is_raining_today": raining, "direction_of_the_wind": "south"}
    return json.dumps(values, separators=separators)


def test_forced_tokens_are_offered_with_an_acceptance_rate_each() -> None:
    answering = constrained()
    answering.answer += model().tokenizer.encode('{"t')
    offer = GrammarProposer().offer(answering)
    assert offer is not None
    assert offer.kind == GRAMMAR
    assert 1 <= len(offer.tokens) == len(offer.acceptance) == len(offer.kinds) <= MAX_DRAFT
    assert min(offer.acceptance) > 0.9
    assert {*offer.kinds} == {GRAMMAR}


def test_an_offer_leaves_the_grammar_as_it_was() -> None:
    answering = constrained()
    answering.answer += model().tokenizer.encode('{"t')
    grammar = answering.request.grammar
    assert grammar
    before = grammar.bitmask()
    GrammarProposer().offer(answering)
    assert (grammar.accepted, grammar.bitmask()) == (0, before)


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":"), (",\n  ", ": ")], ids=["spaced", "compact", "lines"])
def test_guesses_from_the_table_lead_to_more_that_is_forced(separators: tuple[str, str]) -> None:
    proposer = GrammarProposer()
    tokens = len(model().tokenizer.encode(report(21, True, separators)))
    first = forwards(proposer, constrained("first"), report(21, True, separators))
    for number in range(4):
        forwards(proposer, constrained(str(number)), report(10 + number, number % 2 == 0, separators))
    later = forwards(proposer, constrained("later"), report(17, False, separators))
    assert later < first < tokens
    assert tokens / later >= 4


@pytest.mark.parametrize("value", ["key", "enum"])
def test_a_long_text_is_not_read_anew_for_each_draft(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    long = "".join(chr(ord("a") + number % 26) for number in range(3_000))
    schema: Schema = {"type": "object", "properties": {long: {"type": "null"}}, "required": [long]}
    schema, text = (schema, f'{{"{long}": null}}') if value == "key" else ({"enum": [long]}, f'"{long}"')
    ahead, calls = RowGrammar.ahead, list[int]()

    def counting(grammar: RowGrammar, draft: Sequence[int]) -> GrammarAhead:
        calls.append(len(draft))
        return ahead(grammar, draft)

    monkeypatch.setattr(RowGrammar, "ahead", counting)
    tokens = len(model().tokenizer.encode(text))
    answering = row([1], grammar=model().quick_guide(request(**by(schema))))
    assert forwards(GrammarProposer(), answering, text) <= tokens / 6
    assert len(calls) <= tokens / 40


def test_a_guess_has_a_kind_and_a_rate_of_its_own() -> None:
    proposer = GrammarProposer()
    forwards(proposer, constrained("first"), report(21, True))
    answering = constrained("second")
    for token in model().tokenizer.encode(report(21, True).partition("_wind")[0]):
        answering.answer.append(token)
        answering.request.grammar.accept(token)  # type: ignore[union-attr]
    offer = proposer.offer(answering)
    assert offer is not None
    assert {*offer.kinds} == {GRAMMAR, GUESS}
    guessed = [rate for rate, kind in zip(offer.acceptance, offer.kinds, strict=True) if kind == GUESS]
    forced = [rate for rate, kind in zip(offer.acceptance, offer.kinds, strict=True) if kind == GRAMMAR]
    assert max(guessed) < min(forced)


def test_nothing_is_guessed_within_free_text() -> None:
    said = {"type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"]}
    proposer = GrammarProposer()
    answering = row([1], grammar=model().quick_guide(request(**by(said))))
    answering.answer += model().tokenizer.encode('{"said": "aaaa')
    for token in model().tokenizer.encode("aaaaaaaaaaaaaaaa"):
        assert proposer.offer(answering) is None
        answering.answer.append(token)


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
