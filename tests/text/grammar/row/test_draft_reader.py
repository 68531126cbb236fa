"""A draft leaves no trace in a grammar, and what a grammar forces is all that it allows."""

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from tests.selection import examples
from tests.text.guided import ANY_OBJECT, CITY, CLOCK, EOS, FORCED, OTHER_EOS, WEATHER, by, model, request
from tests.text.structured import Schema, allowed, schema
from worker.request import GrammarAhead
from worker.text.grammar.builder import Grammars
from worker.text.grammar.guide import constraint_of, markup_of
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.row.thought import ThoughtMask, ThoughtState
from worker.text.grammar.sandbox import compile_grammar
from worker.text.tokenizer import Vocabulary

ENDS = {EOS, OTHER_EOS}
CALLS = {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
REPORT: Schema = {
    "type": "object",
    "properties": {"temperature_celsius": {"type": "integer"}, "is_raining_today": {"type": "boolean"}},
    "required": ["temperature_celsius", "is_raining_today"],
    "additionalProperties": False,
}
REASONING = {"closed": None, "none": False, "open": True}  # of a prompt; None: it has closed the thought


@cache
def thought_mask() -> ThoughtMask:
    tokenizer = model().tokenizer
    start, ends = tokenizer.think or ("", "")
    return ThoughtMask(Vocabulary(tokenizer), 1024, begins=tokenizer.encode(start)[0], ends=ends, banned=ENDS)


def grammar(format: str = "hermes", thinking: str = "closed", **fields: Any) -> RowGrammar:
    own = model(format)
    constraint = constraint_of(request(**fields))
    assert constraint
    begun = REASONING[thinking]
    written = Grammars(markup_of(own.tokenizer, own.dialect)).grammar(constraint, has_thought=begun is not None)
    thought = None if begun is None else ThoughtState(thought_mask(), begun=begun)
    matcher, drafts = (compile_grammar(own.vocabulary, written) for _ in range(2))
    return RowGrammar(matcher, frozenset(ENDS), thought, drafts=drafts, clock=lambda: 0.0)


def limited(schema: Schema, **limits: int) -> RowGrammar:
    """Return the state of a grammar whose matchers have these limits."""
    written = json.dumps({"grammars": [{"json_schema": schema}]})
    matcher, drafts = (
        LLMatcher(model().vocabulary, written, log_level=0, limits=LLParserLimits(**limits)) for _ in range(2)
    )
    return RowGrammar(matcher, frozenset(ENDS), drafts=drafts, clock=lambda: 0.0)


def fed(tokens: list[int], *args: Any, **fields: Any) -> RowGrammar:
    fresh = grammar(*args, **fields)
    for token in tokens:
        fresh.accept(token)
    return fresh


def drafted(state: RowGrammar, vocab: int, dice: random.Random) -> list[int]:
    """Return a draft that the grammar mostly allows for a while, and that may hold an end."""
    draft = list[int]()
    for _ in range(dice.randrange(9)):
        may = allowed(state, vocab)
        token = dice.choice(may) if dice.random() < 0.85 else dice.randrange(vocab)
        draft.append(token)
        state.accept(token)
    return draft


def plain(state: RowGrammar, draft: list[int], vocab: int) -> int:
    """Return the number of tokens that the masks allow, and accept them."""
    for place, token in enumerate(draft):
        if token in ENDS or token not in allowed(state, vocab):
            return place
        state.accept(token)
    return len(draft)


def after_drafts(seed: int, *args: Any, **fields: Any) -> None:
    """Compare a state that tries drafts all the time with fresh ones that are fed the kept tokens alone."""
    dice, said = random.Random(seed), list[int]()
    tried, vocab = grammar(*args, **fields), model(args[0]).count
    for _ in range(12):
        draft = drafted(fed(said, *args, **fields), vocab, dice)
        checked = fed(said, *args, **fields)
        valid = plain(checked, draft, vocab)
        assert tried.valid_prefix(draft) == valid
        masks = tried.masks_along(draft)
        assert len(masks) == valid + 1
        assert masks == [fed([*said, *draft[:place]], *args, **fields).bitmask() for place in range(valid + 1)]
        assert tried.bitmask() == masks[0]
        kept = dice.randint(0, valid)
        for token in draft[:valid]:
            tried.accept(token)
        tried.rollback(valid - kept)
        said += draft[:kept]
        assert tried.bitmask() == masks[kept]
        assert tried.error is None


@pytest.mark.parametrize("format", FORCED)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(5), deadline=None)
def test_drafts_of_calls_leave_no_trace(format: str, seed: int) -> None:
    after_drafts(seed, format, **CALLS)


@pytest.mark.parametrize("thinking", REASONING)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(5), deadline=None)
def test_drafts_with_reasoning_leave_no_trace(thinking: str, seed: int) -> None:
    after_drafts(seed, "hermes", thinking, **by(CITY))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(15), deadline=None)
def test_drafts_of_any_schema_leave_no_trace(seed: int) -> None:
    after_drafts(seed, "hermes", **by(schema(seed)))


def test_a_draft_may_pass_the_end_of_the_reasoning_and_back() -> None:
    said = model().tokenizer.encode('so</think>{"city": ')
    tried = grammar(thinking="open", **by(CITY))
    assert tried.valid_prefix([*said, said[0]]) == len(said)
    before = tried.bitmask()
    assert len(tried.masks_along(said)) == len(said) + 1
    for token in said:
        tried.accept(token)
    tried.rollback(len(said))
    assert tried.bitmask() == before


@pytest.mark.parametrize("fields", [by(REPORT), by(CITY), CALLS, by({"enum": ["extraordinarily"]})], ids=str)
@pytest.mark.parametrize("format", FORCED)
def test_a_forced_token_is_the_only_one_that_is_allowed(format: str, fields: dict[str, Any]) -> None:
    state, dice, forced = grammar(format, **fields), random.Random(0), 0
    for _ in range(60):
        for token in state.ahead([]).forced:
            assert allowed(state, model(format).count) == [token]
            state.accept(token)
            forced += 1
        if not (may := [token for token in allowed(state, model(format).count) if token not in ENDS]):
            break
        state.accept(dice.choice(may))
    assert forced


def test_most_of_an_object_with_long_names_is_forced() -> None:
    state, forced = grammar(**by(REPORT)), 0
    text = json.dumps({"temperature_celsius": 21, "is_raining_today": True})
    tokens = model().tokenizer.encode(text)
    place = 0
    while place < len(tokens):
        ahead = [*state.ahead([]).forced] or [tokens[place]]
        assert tokens[place : place + len(ahead)] == ahead
        forced += len(ahead) if len(ahead) > 1 else 0
        for token in ahead:
            state.accept(token)
        place += len(ahead)
    assert forced >= len(tokens) / 2


@pytest.mark.parametrize("thinking", ["none", "open"])
def test_nothing_is_forced_while_reasoning_is_possible(thinking: str) -> None:
    state = grammar(thinking=thinking, **by({"enum": ["extraordinarily"]}))
    assert state.ahead([]).forced == ()


def test_a_forced_end_is_not_offered() -> None:
    state = fed(model().tokenizer.encode("{}"), **by({"enum": [{}]}))
    assert state.ahead([]).forced == ()
    assert state.valid_prefix([EOS]) == 0


def test_a_draft_that_exceeds_the_parsers_limits_harms_no_answer() -> None:
    wide = {"type": "object", "properties": {f"property_{number}": {"type": "integer"} for number in range(400)}}
    state = limited(wide, max_items_in_row=300)
    mask, draft = state.bitmask(), model().tokenizer.encode('{"')
    assert state.ahead(draft).mask is None
    assert (state.error, state.bitmask()) == (None, mask)
    assert state.masks_along(draft) == [mask]
    assert state.error is None
    assert state.bitmask() == mask
    state.accept(draft[0])
    state.bitmask()
    assert state.error


PATTERNS: Schema = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^(foo|bar|baz)[a-z]{2,8}[0-9]{1,5}$"},
        "b": {"type": "string", "pattern": "^[0-9]{3}-[a-z]{4}$"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("states", range(40, 101, 10))
def test_drafts_do_not_use_up_the_states_of_the_lexer(states: int) -> None:
    """With few states an answer ends early; no sooner with wrong drafts, which need others."""
    tokens = model().tokenizer.encode(json.dumps({"a": "fooabcd123", "b": "123-abcd"}))
    wrong = [model().tokenizer.encode(text) for text in ("bazxyzw99", "zz", "12345", '": "baz', "foozzz55", "999-zzzz")]
    plain, drafted = limited(PATTERNS, max_lexer_states=states), limited(PATTERNS, max_lexer_states=states)
    for token in tokens:
        drafted.ahead([])
        for draft in wrong:
            drafted.masks_along(draft[:7])
        assert drafted.bitmask() == plain.bitmask()
        plain.accept(token)
        drafted.accept(token)
        assert drafted.error == plain.error


def test_more_tokens_than_are_recorded_cannot_be_taken_back() -> None:
    state = grammar(**ANY_OBJECT)
    state.accept(model().tokenizer.encode("{")[0])
    with pytest.raises(ValueError, match="2 tokens"):
        state.rollback(2)


def test_a_grammar_that_has_failed_takes_no_draft() -> None:
    state = fed(model().tokenizer.encode("x"), **ANY_OBJECT)
    assert state.error
    assert (state.ahead([]), state.valid_prefix([5])) == (GrammarAhead(), 0)
    assert len(state.masks_along([5])) == 1


def test_accepted_tokens_are_counted() -> None:
    state = grammar(thinking="open", **ANY_OBJECT)
    for token in model().tokenizer.encode("so</think>{"):
        state.accept(token)
    tokens = state.accepted
    state.accept(EOS)
    assert state.accepted == tokens + 1
    state.rollback(3)
    assert state.accepted == tokens - 2
    state.reset()
    assert state.accepted == 0
