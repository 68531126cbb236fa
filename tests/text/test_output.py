from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.stack import TINY_CHAT
from tests.fakes import ByteTokenizer
from worker.text.output import Output

# A piece that begins inside an emoji, one that ends inside it, and ordinary ones.
TOKENIZER = ByteTokenizer("🙂".encode()[:2], "🙂".encode()[2:] + b"!", b"the ", b"en", "né".encode()[:2])
TEXTS = st.text("the n🙂é!d", max_size=30)
STOPS = st.lists(st.text("the n🙂", min_size=1, max_size=4), max_size=2)


def feed(output: Output, ids: list[int]) -> list[str]:
    """What each token brings, and last what the end brings."""
    return [*map(output.feed, ids), output.flush()]


def spoken(ids: list[int], stops: list[str] = ()) -> list[str]:  # type: ignore[assignment]
    return feed(Output(TOKENIZER.detokenizer, stops), ids)


def is_text(segment: str) -> bool:
    return "\N{REPLACEMENT CHARACTER}" not in segment


@given(TEXTS)
def test_a_code_point_is_never_split(text: str) -> None:
    assert all(map(is_text, spoken(TOKENIZER.encode(text))))


@given(st.lists(st.integers(0, len(TOKENIZER.vocab) - 1), max_size=20))
def test_the_deltas_together_are_the_whole_answer(ids: list[int]) -> None:
    assert "".join(spoken(ids)) == TOKENIZER.decode(ids)


def test_a_code_point_that_never_became_whole_is_let_go_at_the_end() -> None:
    half = list("🙂".encode()[:2])
    assert spoken([*b"a", *half]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


@given(TEXTS, STOPS, st.integers(0, 30))
def test_delivered_tokens_bring_an_output_back_to_where_it_was(text: str, stops: list[str], delivered: int) -> None:
    ids = TOKENIZER.encode(text)
    resumed = Output(TOKENIZER.detokenizer, stops)
    for token in ids[:delivered]:
        resumed.feed(token)
    assert feed(resumed, ids[delivered:]) == spoken(ids, stops)[min(delivered, len(ids)) :]
    whole = Output(TOKENIZER.detokenizer, stops)
    feed(whole, ids)
    assert resumed.stopped == whole.stopped


def test_a_stop_string_may_lie_across_tokens() -> None:
    output = Output(TOKENIZER.detokenizer, ["the end"])
    assert [output.feed(token) for token in TOKENIZER.encode("at the end, no")][:4] == ["a", "", "t ", ""]
    assert output.stopped


def test_a_stop_string_that_the_end_completes_is_not_let_out() -> None:
    output = Output(TOKENIZER.detokenizer, ["\N{REPLACEMENT CHARACTER}"])
    assert feed(output, [*b"a", *"🙂".encode()[:2]]) == ["a", "", "", ""]
    assert output.stopped


@pytest.fixture(scope="module")
def real() -> Any:
    pytest.importorskip("mlx_lm")
    from worker.engine.upstream import load_tokenizer

    return load_tokenizer(Path(TINY_CHAT))


@pytest.mark.parametrize(
    "text", ["Hello, Ada! 1 2 3", "😀 né 日本語 🙂🙂", "some  spaces \n\n and\ttabs ", "a\ufffdb", ""]
)
def test_a_real_tokenizer_says_what_it_would_decode_at_once(real: Any, text: str) -> None:
    ids = real.encode(text, add_special_tokens=False)
    assert "".join(feed(Output(real.detokenizer), ids)) == text == real.decode(ids)
