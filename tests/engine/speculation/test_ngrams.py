from hypothesis import given
from hypothesis import strategies as st

from worker.engine.speculation.copies import NgramIndex, agreement
from worker.engine.speculation.tuning import MAX_AGREEMENT

TOKENS = st.lists(st.integers(0, 3), max_size=60)
SIZES = st.integers(1, 4)


def indexed(tokens: list[int], size: int, window: int = 1_000) -> NgramIndex:
    index = NgramIndex(tokens, size, window)
    index.catch_up(len(tokens))
    return index


@given(tokens=TOKENS, size=SIZES)
def test_a_place_follows_an_earlier_occurrence_of_the_ending(tokens: list[int], size: int) -> None:
    for position, agreeing in indexed(tokens, size).positions(tokens):
        assert position < len(tokens)
        assert tokens[position - agreeing : position] == tokens[len(tokens) - agreeing :]
        assert agreeing >= size


@given(tokens=TOKENS, size=SIZES)
def test_an_ending_that_occurred_earlier_is_found(tokens: list[int], size: int) -> None:
    ending = tokens[len(tokens) - size :]
    occurs = any(tokens[end - size : end] == ending for end in range(size, len(tokens)))
    assert any(indexed(tokens, size).positions(tokens)) == (len(tokens) >= size and occurs)


@given(tokens=TOKENS, context=TOKENS, position=st.integers(0, 60))
def test_agreement_is_the_longest_common_ending(tokens: list[int], context: list[int], position: int) -> None:
    before = tokens[:position]
    longest = max(n for n in range(len(before) + 1) if before[len(before) - n :] == context[max(0, len(context) - n) :])
    assert agreement(tokens, min(position, len(tokens)), context) == min(longest, MAX_AGREEMENT)


def test_a_text_is_indexed_by_parts() -> None:
    tokens = [1, 2, 3, 4, 1, 2]
    index = NgramIndex(tokens, 2, 1_000)
    index.catch_up(2)
    assert (index.behind, list(index.positions(tokens))) == (4, [])
    index.catch_up(2)
    assert (index.behind, list(index.positions(tokens))) == (2, [(2, 2)])


@given(count=st.integers(1, 3_000), window=st.integers(8, 300))
def test_the_memory_of_an_endless_text_is_bounded(count: int, window: int) -> None:
    index = NgramIndex([], 2, window)
    for number in range(count):
        index.extend((number % 7,))
        index.catch_up(3)
    assert len(index) < 2 * window
    assert index.nbytes <= 2 * window * 8 + 4 * max(1024, 4 * window)


@given(parts=st.lists(TOKENS, max_size=6), size=SIZES, window=st.integers(8, 40))
def test_tokens_that_are_appended_together_are_those_appended_one_by_one(
    parts: list[list[int]], size: int, window: int
) -> None:
    together, single = NgramIndex([], size, window), NgramIndex([], size, window)
    for part in parts:
        dropped = [single.extend((token,)) for token in part]
        assert together.extend(part) == any(dropped)
        assert together.tokens == single.tokens
        assert together.catch_up(5) == single.catch_up(5)
        assert [*together.positions(part)] == [*single.positions(part)]


def test_the_last_window_of_a_long_text_can_be_found() -> None:
    tokens = [*range(1_000), 5, 6, *range(2_000, 2_090), 990, 991]
    index = indexed(tokens, 2, window=100)
    assert len(index) == 100
    assert not list(index.positions([5, 6])) or 5 in index.tokens
    assert not list(index.positions([990, 991]))
    assert [index.tokens[position] for position, _ in index.positions([2_003, 2_004])] == [2_005]


def test_a_table_that_grows_crowded_is_built_anew() -> None:
    index = NgramIndex([], 2, 100_000)
    for number in range(20_000):
        index.extend((number,))
        index.catch_up(8)
    assert index.behind == 0
    assert [index.tokens[position] for position, _ in index.positions([7, 8])] == [9]
