"""A limit of thoughts forces what closes them, and drafts leave no trace in it."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.stepwise_grammar import StepwiseGrammar
from tests.selection import examples
from tests.text.guided import ANY_OBJECT, WEATHER, model
from tests.text.output.test_thought import PLAIN, thought_of
from tests.text.speech import request
from worker.text.grammar.row.thought import ThoughtLimit
from worker.text.output.thought import Thought
from worker.text.tokenizer import Vocabulary

VOCAB = 1024
CALL = {"tools": [WEATHER], "tool_choice": "required"}
WORDS = PLAIN.words.encode("<think></think>\n a日")
TOKENS = st.lists(st.sampled_from(WORDS), max_size=12)


def limit(budget: int) -> ThoughtLimit:
    return ThoughtLimit(lambda: thought_of(PLAIN, request(), budget=budget), None, VOCAB)


def only(token: int) -> bytes:
    return (1 << token).to_bytes(VOCAB // 8, "little")


def test_no_mask_is_computed_but_for_the_tokens_that_close_a_thought() -> None:
    state = limit(2)
    masks = []
    for token in PLAIN.words.encode("<think>a a\n</think>\n\na"):
        masks.append(state.bitmask())
        state.accept(token)
    closing = PLAIN.words.encode("\n</think>\n\n")
    assert masks == [None] * 3 + [only(token) for token in closing] + [None]


@given(TOKENS, TOKENS.map(lambda draft: draft[:7]), st.integers(0, 3))
@settings(max_examples=examples(300))
def test_what_is_known_of_a_draft_is_what_its_tokens_one_by_one_give(
    said: list[int], draft: list[int], budget: int
) -> None:
    state = limit(budget)
    for token in said:
        state.accept(token)
    masks = StepwiseGrammar.masks_along(state, draft)  # type: ignore[arg-type]
    assert state.masks_along(draft) == masks
    assert state.valid_prefix(draft) == len(masks) - 1
    forced = state.ahead(draft).forced
    expected = masks[-1] if len(masks) > len(draft) else None
    assert (only(forced[0]) if forced else None) == expected
    again = limit(budget)
    for token in said:
        again.accept(token)
    assert (state.bitmask(), state.accepted) == (again.bitmask(), len(said))


def test_a_reset_begins_anew() -> None:
    state = limit(0)
    first = state.bitmask()
    for token in WORDS:
        state.accept(token)
    state.reset()
    assert (state.bitmask(), state.accepted) == (first, 0)


@pytest.mark.parametrize("format", ["harmony", "hermes"])
@pytest.mark.parametrize("fields", [CALL, ANY_OBJECT], ids=["call", "schema"])
async def test_what_closes_a_thought_is_allowed_by_the_grammar_of_the_answer(
    format: str, fields: dict[str, Any]
) -> None:
    spoken, asked = model(format), request(**fields)
    form = spoken.dialect.thought_format(spoken.tokenizer, Vocabulary(spoken.tokenizer), asked)
    assert form is not None
    for budget in range(4):
        new_thought = partial(Thought, form, begun=False, only_first=True, budget=budget)
        state = ThoughtLimit(new_thought, await spoken.guide("none", **fields), spoken.count)
        closing = list[int]()
        for token in spoken.tokenizer.encode(form.begins.decode() + "日本 a b c"):
            if closing := [*state._thought.forced]:
                break
            state.accept(token)
        for token in closing:
            assert int.from_bytes(state.bitmask() or b"", "little") == 1 << token
            state.accept(token)
        assert closing
        assert state.error is None
        assert state.bitmask() is not None  # the grammar's own
        assert not state._thought.inside
