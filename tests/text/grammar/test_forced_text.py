"""A long text without a choice is read a part at a time, and spelled as llguidance spells it."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.text.guided import EOS, OTHER_EOS, by, model, request
from tests.text.structured import allowed
from worker.text.grammar.builder import Grammars
from worker.text.grammar.guide import constraint_of, markup_of
from worker.text.grammar.llg_tokenizer import ForcedText
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.sandbox import compile_twice

ENDS = frozenset({EOS, OTHER_EOS})
_DICE = random.Random(1)
WORDS = " ".join("".join(_DICE.choice("abcdefgh") for _ in range(_DICE.randint(1, 9))) for _ in range(400))
LETTERS = "".join(_DICE.choice("abcdefghijklmnopqrstuvwxyzäß漢😀") for _ in range(1_500))
ONE_OF_TWO = {"enum": [LETTERS + "0", LETTERS + "1"]}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"const": WORDS}, json.dumps(WORDS)),
    "letters": ({"const": LETTERS}, json.dumps(LETTERS, ensure_ascii=False)),
    "one of two": (ONE_OF_TWO, json.dumps(LETTERS + "1", ensure_ascii=False)),
    "name": ({"properties": {WORDS: {"type": "null"}}, "required": [WORDS]}, json.dumps({WORDS: None})),
    "pattern": ({"type": "string", "pattern": "^(ab){1000}$"}, json.dumps("ab" * 1_000)),
}


class Recorded:
    """A vocabulary that records how many bytes are tokenized at once."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary, self.most = vocabulary, 0
        self.vocab_size = vocabulary.vocab_size

    def tokenize_bytes(self, text: bytes) -> list[int]:
        self.most = max(self.most, len(text))
        return self._vocabulary.tokenize_bytes(text)

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return self._vocabulary.decode_bytes(tokens)


class Watched:
    """A matcher that records the bytes that llguidance tokenizes for a mask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self.most = matcher, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def compute_bitmask(self) -> bytes:
        self.most = max(self.most, len(self._matcher.compute_ff_bytes()))
        return self._matcher.compute_bitmask()

    def compute_ff_tokens(self) -> list[int]:
        self.most = max(self.most, len(self._matcher.compute_ff_bytes()))
        return self._matcher.compute_ff_tokens()


def matchers(schema: dict[str, Any]) -> tuple[LLMatcher, LLMatcher]:
    own = model()
    constraint = constraint_of(request(**by({"type": "object", **schema} if "properties" in schema else schema)))
    assert constraint
    written = Grammars(markup_of(own.tokenizer, own.dialect)).grammar(constraint, has_thought=False)
    return compile_twice(own.vocabulary, written)


def spelled(state: RowGrammar, text: str) -> list[int]:
    """Return the tokens of the text that masks allow. Where they leave a choice, the longest one is taken."""
    tokens, rest, vocabulary = list[int](), text.encode(), model().vocabulary
    while rest:
        may = [token for token in allowed(state, model().count) if token not in ENDS]
        fitting = [token for token in may if rest.startswith(vocabulary.decode_bytes([token]))]
        tokens.append(max(fitting, key=lambda token: len(vocabulary.decode_bytes([token]))))
        rest = rest[len(vocabulary.decode_bytes([tokens[-1]])) :]
        state.accept(tokens[-1])
        assert state.error is None
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_a_long_text_is_spelled_as_llguidance_spells_it(case: str) -> None:
    schema, text = CASES[case]
    (matcher, drafts), (plain, _) = matchers(schema), matchers(schema)
    watched, watched_drafts, vocabulary = Watched(matcher), Watched(drafts), Recorded(model().vocabulary)
    forced_text: Any = ForcedText(vocabulary)  # type: ignore[arg-type]
    state = RowGrammar(
        watched,  # type: ignore[arg-type]
        ENDS,
        drafts=watched_drafts,  # type: ignore[arg-type]
        clock=lambda: 0.0,
        forced_text=forced_text,
    )
    assert spelled(state, text) == spelled(RowGrammar(plain, ENDS), text)
    assert set(allowed(state, model().count)) >= ENDS
    assert 0 < vocabulary.most < 300
    assert max(watched.most, watched_drafts.most) <= 512


@pytest.mark.parametrize("case", CASES)
def test_drafts_of_a_long_text_are_what_its_masks_allow(case: str) -> None:
    schema, text = CASES[case]
    matcher, drafts = matchers(schema)
    forced_text = ForcedText(model().vocabulary)
    state = RowGrammar(matcher, ENDS, drafts=drafts, clock=lambda: 0.0, forced_text=forced_text)
    for token in model().tokenizer.encode(text)[:3]:
        state.accept(token)
    forced = state.ahead([]).forced
    assert len(forced) > 20
    before = state.bitmask()
    assert len(state.masks_along(forced[:7])) == 8
    for token in forced[:12]:
        assert allowed(state, model().count) == [token]
        state.accept(token)
    state.rollback(12)
    assert state.bitmask() == before


def test_a_short_text_is_left_to_llguidance() -> None:
    matcher, _ = matchers({"const": "a" * 200})
    assert ForcedText(model().vocabulary).tokens(matcher, None) == []
