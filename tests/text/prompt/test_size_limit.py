import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import ChatRequest
from tests.selection import examples
from tests.text.conversations import assistant, calling, image, text, user
from tests.text.tokenizers import KINDS, tokenizer
from worker.errors import JobFailure
from worker.text.prompt import size_limit
from worker.text.prompt.size_limit import PromptLimit, cost_in_characters
from worker.text.threads import WorkAbandoned, never

PIECES = [
    "The quick brown fox. ", "0123456789", " ", "\n", "\t\n ", "a", "é", "e\u0301", "日本語", "🙂", "!?", "x" * 99,
    "ing", "<|im_end|>", "<|image_pad|>", "def f(x):\n    return x\n", '{"a": [1, 2.5e-3]}', "\u200d\ufe0f", "\x00",
    "ß", "1 2 ",
]  # fmt: skip


def encode(kind: str):  # type: ignore[no-untyped-def]
    return lambda said: tokenizer(kind).encode_batch_fast([said], add_special_tokens=False)[0].ids


def added(kind: str, said: str, size: int) -> tuple[int, int]:
    """Tokens that cutting adds, and cuts."""
    edges = [*range(0, len(said), size), len(said)]
    cut = sum(len(encode(kind)(said[a:b])) for a, b in pairwise(edges))
    return cut - len(encode(kind)(said)), max(0, len(edges) - 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", PIECES)
def test_a_cut_into_a_repeated_text_adds_less_than_half_of_what_is_left_for_it(kind: str, piece: str) -> None:
    more, cuts = added(kind, piece * (20_000 // len(piece)), 97)
    assert more <= size_limit._PER_CUT / 2 * cuts


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=200), st.integers(16, 400))
def test_a_cut_into_any_text_adds_less_than_half_of_what_is_left_for_it(kind: str, words: list[str], size: int) -> None:
    more, cuts = added(kind, "".join(words), size)
    assert more <= size_limit._PER_CUT / 2 * cuts


class Counted:
    """Characters as tokens, and the longest text that was tokenized."""

    def __init__(self) -> None:
        self.longest = self.calls = 0

    def __call__(self, said: str) -> list[int]:
        self.longest, self.calls = max(self.longest, len(said)), self.calls + 1
        return [0] * len(said)


def refused(counting: PromptLimit, said: str) -> JobFailure | None:
    try:
        counting.check_rendered(said, 0, never)
    except JobFailure as refusal:
        return refusal
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_that_fits_is_refused_and_none_of_twice_the_context_is_let_through(kind: str) -> None:
    dice = random.Random(0)
    for _ in range(3):
        said = "".join(dice.choice(PIECES) * dice.randrange(1, 40) for _ in range(dice.randrange(200, 600)))
        tokens = len(encode(kind)(said))
        assert refused(PromptLimit(encode(kind), tokens + 1), said) is None
        assert refused(PromptLimit(encode(kind), tokens // 2), said)


def test_a_text_well_beyond_the_context_is_never_tokenized_whole() -> None:
    counted = Counted()
    refusal = refused(PromptLimit(counted, 1_000), "x" * 10_000_000)
    assert refusal is not None
    assert refusal.type == "too_large"
    assert "maximum context length is 1000 tokens. However, your messages resulted in at least 8160" in refusal.message
    assert (counted.longest, counted.calls) == (8_192, 1)


def test_near_the_context_slices_do_not_decide() -> None:
    assert refused(PromptLimit(Counted(), 100_000), "x" * 100_300) is None
    assert refused(PromptLimit(Counted(), 100_000), "x" * 101_000) is not None


def test_a_text_of_fewer_characters_than_the_context_has_tokens_is_not_counted() -> None:
    counted = Counted()
    assert refused(PromptLimit(counted, 100_000), "x" * 100_000) is None
    assert counted.calls == 0


def test_a_text_of_hardly_any_tokens_is_refused_by_its_characters() -> None:
    refusal = refused(PromptLimit(lambda said: [0], 1_000), "x" * 4_000_001)
    assert refusal is not None
    assert refusal.type == "too_large"
    assert "4000001 characters" in refusal.message


def test_a_content_that_was_counted_does_not_hide_a_text_of_too_many_characters() -> None:
    with pytest.raises(JobFailure):
        PromptLimit(lambda said: [0], 1_000).check_rendered("x" * 4_000_001, 4_000_001, never)


def test_counting_stops_when_the_job_has_gone() -> None:
    counted, checks = Counted(), iter([None, None])

    def gone_at_the_third() -> None:
        if next(checks, WorkAbandoned) is WorkAbandoned:
            raise WorkAbandoned

    with pytest.raises(WorkAbandoned):
        PromptLimit(counted, 1_000_000).check_rendered("x" * 2_000_000, 0, gone_at_the_third)
    assert counted.calls == 2


LONG = "x" * 50_000


def called(arguments: object) -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "message",
    [
        *({"role": role, "content": LONG} for role in ("user", "system", "tool", "assistant")),
        {"role": "assistant", "content": "", "tool_calls": [called(LONG)]},
        {"role": "assistant", "content": "", "tool_calls": [called({"a": [{"b": LONG}]})]},
        {"role": "assistant", "content": "", "tool_calls": [called({LONG: 1})]},
    ],
)
def test_what_every_template_shows_is_counted_before_one_sees_it(message: dict[str, object]) -> None:
    with pytest.raises(JobFailure):
        PromptLimit(Counted(), 1_000).check_contents([message], never)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": f"{LONG}</think>"},
        {"role": "assistant", "content": f"[THINK]{LONG}"},
        {"role": "assistant", "content": LONG, "tool_calls": [called({})]},
        {"role": "assistant", "content": "", "reasoning_content": LONG},
        {"role": "user", "content": " " * 50_000},
    ],
)
def test_what_a_template_may_leave_out_is_not_counted_before_it(message: dict[str, object]) -> None:
    assert PromptLimit(Counted(), 1_000, ("[THINK]", "[/THINK]")).check_contents([message], never) == 0


def test_contents_that_were_counted_are_not_counted_again() -> None:
    counted = Counted()
    counts = PromptLimit(counted, 49_900)
    done = counts.check_contents([{"role": "user", "content": LONG}], never)
    before = counted.calls
    counts.check_rendered(f"<user>{LONG}<assistant>", done, never)
    assert (done, before, counted.calls) == (50_000, 7, 7)


# Characters


def request(*messages: object, **rest: object) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages), **rest})


def size(*messages: object, limit: int = 10**9) -> int:
    return cost_in_characters([request(*messages).messages], limit)


def test_the_characters_of_all_texts_are_found() -> None:
    short = size(user("x"), assistant("x"), user([text("x"), text("x")]))
    long = size(user("x" * 100), assistant("x" * 100), user([text("x" * 100), text("x" * 100)]))
    assert long - short == 4 * 99


def test_arguments_of_calls_count() -> None:
    called = calling({"id": "1", "type": "function", "function": {"name": "f", "arguments": "y" * 9_000}})
    assert size(user("x"), called) > 9_000


def test_an_image_counts_as_a_short_text() -> None:
    assert size(user([image("A" * 1_000_000)])) < 3_000


def test_many_values_count_though_they_are_short() -> None:
    assert cost_in_characters([{"a": [[]] * 1_000}], 10**9) > 1_000


def test_the_walk_ends_when_the_answer_is_known() -> None:
    walked = []
    total = cost_in_characters((walked.append(i) or "x" for i in range(10**6)), 1_000)  # type: ignore[func-returns-value]
    assert 1_000 < total < 2_000
    assert len(walked) < 100


def test_deep_nesting_is_walked() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert cost_in_characters(deep, 10**9) >= 100_000
