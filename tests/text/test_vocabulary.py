from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer

from tests.support.stack import TINY_CHAT
from tests.text.speech import model
from worker.engine.tokenizer import Streaming
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.text.tokenizer import Vocabulary

TINY = model()
WRAPPER = load_tokenizer(Path(TINY_CHAT))
SIZE = len(TINY.words.tokens)
IDS = st.lists(st.integers(0, SIZE - 1), max_size=30)
BY_BYTES = {TINY.vocabulary.bytes_of(token): token for token in range(SIZE)}

CODE_POINTS = {
    "ascii": "Hello, Ada! 1 2 3",
    "spaces": "  some  spaces \n\n and\ttabs \r\n ",
    "combining marks": "x\u0301 q\u0303 \u0627\u0651 क्षि",
    "CJK": "日本語 漢字 한국어 ㄱ",
    "emoji with joiners": "👩‍👩‍👧‍👦 👍🏽 ❤️ 🙂🙂",
    "flags": "🇳🇴🇯🇵 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "controls": "\x00\x01\x7f\u0085\u200b\u2028\ufeff",
    "past the BMP": "𝔸 𐍈 \U0010ffff",
    "a replacement character that is meant": "a\ufffdb\ufffd",
    "markers": "<think>a</think><tool_call><|im_start|>",
}


def pieces(vocabulary: Vocabulary, ids: list[int]) -> list[str]:
    detokenizer = vocabulary.detokenizer()
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


def decoded(ids: list[int]) -> str:
    return str(WRAPPER.decode(ids, skip_special_tokens=False))


@given(IDS)
def test_the_pieces_of_any_tokens_are_together_what_the_tokenizer_decodes(ids: list[int]) -> None:
    assert "".join(pieces(TINY.vocabulary, ids)) == decoded(ids)


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_come_out_as_in_the_whole_decode(data: bytes) -> None:
    ids = [BY_BYTES[bytes([value])] for value in data]
    said = pieces(TINY.vocabulary, ids)
    assert "".join(said) == decoded(ids) == data.decode(errors="replace")


@given(st.text(max_size=20))
def test_no_piece_holds_a_replacement_character_that_the_whole_does_not(text: str) -> None:
    ids = [BY_BYTES[bytes([value])] for value in text.encode()]
    said = pieces(TINY.vocabulary, ids)
    assert [piece for piece in said if "\ufffd" in piece] == ["\ufffd"] * text.count("\ufffd")


@pytest.mark.parametrize("text", CODE_POINTS.values(), ids=list(CODE_POINTS))
def test_every_class_of_code_points_comes_out_as_it_went_in(text: str) -> None:
    ids = TINY.words.encode(text)
    assert "".join(pieces(TINY.vocabulary, ids)) == text == decoded(ids)


def test_the_space_that_an_answer_begins_with_is_kept() -> None:
    assert "".join(pieces(TINY.vocabulary, TINY.words.encode(" and more"))) == " and more"


def test_a_code_point_that_never_became_whole_is_let_go_at_the_end() -> None:
    half = [BY_BYTES[bytes([value])] for value in "🙂".encode()[:2]]
    assert pieces(TINY.vocabulary, [*TINY.words.encode("a"), *half]) == ["a", "", "", "\ufffd"]


class Sentencepiece:
    """A tokenizer of such tokens, as mlx-lm and as we ask for it."""

    byte_level = False

    def __init__(self, *tokens: str) -> None:
        self.tokens = list(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[token] for token in ids]

    def streaming(self) -> Streaming:
        return Streaming(SPMStreamingDetokenizer(self, trim_space=False))


def test_an_id_beyond_the_vocabulary_says_nothing() -> None:
    a = TINY.words.encode("a")
    assert pieces(TINY.vocabulary, [*a, SIZE, 10**6, *a]) == ["a", "", "", "a", ""]
    assert TINY.vocabulary.bytes_of(SIZE) == b""
    assert pieces(Vocabulary(Sentencepiece("▁a", "b")), [0, 2, 1]) == [" a", "", "b", ""]


@pytest.mark.parametrize(
    ("token", "spelled"),
    [("Ġhi", b" hi"), ("é", b"\xe9"), ("ðŁ", b"\xf0\x9f"), ("<｜end▁of｜>", "<｜end▁of｜>".encode()), ("a b", b"a b")],
)
def test_a_byte_level_token_is_its_bytes_or_the_plain_text_that_was_added(token: str, spelled: bytes) -> None:
    assert Vocabulary(SimpleNamespace(tokens=[token], byte_level=True)).bytes_of(0) == spelled


@pytest.mark.parametrize(
    ("token", "spelled"), [("▁hi", b" hi"), ("<0xE2>", b"\xe2"), ("<s>", b"<s>"), ("é", "é".encode())]
)
def test_a_sentencepiece_token_is_its_byte_or_its_text(token: str, spelled: bytes) -> None:
    assert Vocabulary(Sentencepiece(token)).bytes_of(0) == spelled


@given(st.text("ab ▁é🙂", max_size=10))
def test_sentencepiece_says_a_code_point_when_its_last_byte_has_come(text: str) -> None:
    vocabulary = Vocabulary(Sentencepiece(*(f"<0x{value:02X}>" for value in range(256))))
    said = pieces(vocabulary, list(text.encode()))
    assert "".join(said) == text.replace("▁", " ")
    assert "\ufffd" not in "".join(said)


@given(IDS)
def test_the_bytes_of_all_tokens_are_the_bytes_of_the_text(ids: list[int]) -> None:
    assert b"".join(map(TINY.vocabulary.bytes_of, ids)).decode(errors="replace") == decoded(ids)


@pytest.mark.parametrize("first", [False, True])
@given(
    st.one_of(st.sampled_from(["<", ">", "think>", "</think>", " the", "\n\n"]).map(str.encode), st.binary(min_size=1))
)
def test_a_search_finds_the_tokens_that_hold_a_text_or_begin_with_it(first: bool, text: bytes) -> None:
    assume(b"\xff" not in text)  # no UTF-8 has it
    own = {token: TINY.vocabulary.bytes_of(token) for token in range(SIZE)}
    expected = [token for token, each in own.items() if (each.startswith(text) if first else text in each)]
    assert TINY.vocabulary.tokens_with(text, first=first) == expected
