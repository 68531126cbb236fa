"""Which texts are control tokens, and that what quotes one is read as text, whatever the tokenizer."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.stack import TINY_CHAT
from worker.engine.control_tokens import ControlTokens, _pattern
from worker.engine.upstream.mlx_lm import load_tokenizer

TINY = load_tokenizer(TINY_CHAT)._tokenizer
LETTERS = "abcdefghijklmnopqrstuvwxyz<>|_/ \n"


def plain(tokenizer: Any) -> Any:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def control_tokens(tokenizer: Any = TINY, template: str = "{{ '<|im_end|>' }}", *markers: str) -> ControlTokens:
    return ControlTokens(tokenizer, template, markers, plain(tokenizer))


def tokenizer(model: Any, *, normalizer: Any = None, pre: Any = None, normalized: bool = False, **added: bool) -> Any:
    """`added`: tokens by name, with whether they are special."""
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre
    backend.decoder = decoders.Fuse()
    backend.add_tokens(
        [AddedToken(f"<{name}>", special=special, normalized=normalized) for name, special in added.items()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def letters(*more: str) -> Any:
    return models.BPE({piece: id for id, piece in enumerate([*LETTERS, "▁", *more])}, [])


TOKENIZERS = {
    "byte level": TINY,
    "a space before each word": tokenizer(
        letters(), pre=pre_tokenizers.Metaspace(prepend_scheme="first"), im_end=True, call=False
    ),
    "a space before all": tokenizer(
        letters(),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        im_end=True, call=False,
    ),
    "pieces by their weight": tokenizer(
        models.Unigram([(piece, -1.0) for piece in [*LETTERS, "▁"]] + [("<im_end>", 0.0), ("<call>", 0.0)], 0, False),
        pre=pre_tokenizers.Metaspace(prepend_scheme="first"), im_end=True, call=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_quoted_control_token_is_encoded_as_text(name: str) -> None:
    spoken = TOKENIZERS[name]
    tokens = control_tokens(spoken, "{{ '<im_end><call>' }}")
    added = set(spoken.added_tokens_decoder)
    for text in [token.content for token in spoken.added_tokens_decoder.values()]:
        assert tokens.found_in(f"hi{text}")
        ids = tokens.encode(tokens.mark(f"hi{text}{text} you"))
        assert added.isdisjoint(ids)
        assert spoken.decode(ids).replace("▁", " ").replace(" ", "") == f"hi{text}{text} you".replace(" ", "")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(LETTERS, max_size=30))
def test_text_without_control_tokens_is_encoded_unchanged(name: str, text: str) -> None:
    tokens = control_tokens(TOKENIZERS[name])
    assert tokens.encode(tokens.mark(text)) == plain(TOKENIZERS[name])(text)


PIECES = st.sampled_from(["a", "<|im_end|>", "\U000f0000", "\U000f0001", "\U0010ffff", "0", "1", "2", "3"])


@given(text=st.lists(PIECES).map("".join))
def test_unmarking_restores_a_marked_text(text: str) -> None:
    tokens = control_tokens()
    assert tokens.unmark(tokens.mark(text)) == text
    assert TINY.decode(tokens.encode(tokens.mark(text))) == text


@pytest.mark.parametrize("forged", ["\U000f0000<|im_end|>\U000f0001", "\U0010ffff1<|im_end|>", "\U000f0001<|im_end|>"])
def test_marks_cannot_be_forged(forged: str) -> None:
    tokens = control_tokens()
    assert 2 not in tokens.encode(tokens.mark(forged) + "x")


@pytest.mark.parametrize("written", [json.dumps, repr, ascii])
def test_marks_that_a_template_writes_as_escapes_are_recognized(written: Callable[[str], str]) -> None:
    tokens = control_tokens()
    ids = tokens.encode(written(tokens.mark("a<|im_end|>")))
    assert TINY.decode(ids) == written("a<|im_end|>")
    assert 2 not in ids


@pytest.mark.parametrize("spelled", [r"\udb80\udc00", r"\udb80\udc01", r"\U000f0000", r"\U000f0001"])
def test_text_that_spells_a_mark_is_unchanged(spelled: str) -> None:
    tokens = control_tokens()
    assert TINY.decode(tokens.encode(tokens.mark(f"{spelled}<|im_end|>{spelled}"))) == f"{spelled}<|im_end|>{spelled}"


def test_long_text_marked_and_encoded_in_pieces_gives_the_same_tokens() -> None:
    tokens = control_tokens()
    text = ("word " * 7_000 + "<|im_end|>") * 5 + "<|im_end|>" * 20_000
    ids = tokens.encode(tokens.mark(text))
    assert 2 not in ids
    assert TINY.decode(ids) == text


def test_added_tokens_that_are_ordinary_text_stay_tokens() -> None:
    spoken = tokenizer(letters(), table=False, note=False, im_end=True)
    tokens = control_tokens(spoken, "{{ '<note>' }}")
    assert (tokens.found_in("<table>"), tokens.found_in("<note>"), tokens.found_in("<im_end>")) == (False, True, True)
    ids = tokens.encode(tokens.mark("<table><note><im_end>"))
    assert spoken.convert_tokens_to_ids("<table>") in ids
    assert spoken.convert_tokens_to_ids("<note>") not in ids


def test_delimiter_built_by_a_template_is_a_control_token() -> None:
    spoken = tokenizer(letters(), **{"|user|": False})
    assert control_tokens(spoken, "{{ '<|' + messages[0].role + '|>' }}").found_in("<|user|>")


def test_with_a_template_in_python_every_added_token_is_a_control_token() -> None:
    assert control_tokens(tokenizer(letters(), table=False), "").found_in("<table>")


def test_a_model_s_own_markers_are_control_tokens() -> None:
    spoken = tokenizer(letters(), think=False)
    assert not control_tokens(spoken).found_in("<think>")
    assert control_tokens(spoken, "{{ '' }}", "<think>").found_in("<think>")


def test_a_control_token_may_be_spelled_as_its_tokenizer_normalizes_it() -> None:
    spoken = tokenizer(letters(), normalizer=normalizers.NFKC(), normalized=True, call=False)
    tokens = control_tokens(spoken, "{{ '<call>' }}")
    full_width = "\uff1ccall\uff1e"
    assert spoken.convert_tokens_to_ids("<call>") in plain(spoken)(full_width)
    assert tokens.found_in(full_width)
    assert spoken.convert_tokens_to_ids("<call>") not in tokens.encode(tokens.mark(full_width))


@given(texts=st.sets(st.text("ab|<", min_size=1, max_size=4), max_size=8), text=st.text("ab|<", max_size=20))
def test_longest_control_token_at_the_first_position_is_found(texts: set[str], text: str) -> None:
    longest_first = sorted(texts, key=len, reverse=True)
    expected = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert _pattern(texts).findall(text) == expected.findall(text)
