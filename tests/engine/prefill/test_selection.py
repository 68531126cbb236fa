import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.prefill.specprefill import Range, merged_ranges, select_ranges

SHARES = st.floats(0.1, 1.0)
CHUNK, REGION = 16, 1024  # tokens; the best chunk of each region is always kept


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Sequence[float], list[Range]]:
    """Scores, and protected ranges among them, in any order and over one another."""
    tokens, dice = draw(st.integers(1, 4000)), Random(draw(st.integers(0, 1000)))
    edges = st.tuples(st.integers(0, tokens), st.integers(0, tokens)).map(sorted).map(tuple)
    return array("f", (dice.random() for _ in range(tokens))), draw(st.lists(edges, max_size=6))


def chosen(ranges: Iterable[Range]) -> set[int]:
    return {token for start, end in ranges for token in range(start, end)}


def needle(tokens: int, *places: int) -> list[float]:
    """The first place scores highest."""
    scores = [0.0] * tokens
    for rank, place in enumerate(places):
        scores[place] = 1.0 / (1 + rank)
    return scores


@given(prompts(), SHARES)
def test_protected_ranges_are_kept(prompt: tuple[Sequence[float], list[Range]], keep: float) -> None:
    scores, protected = prompt
    assert chosen(protected) <= chosen(select_ranges(scores, keep, protected))


@given(prompts(), SHARES)
def test_ranges_are_ascending_and_separate(prompt: tuple[Sequence[float], list[Range]], keep: float) -> None:
    kept = select_ranges(prompt[0], keep, prompt[1])
    assert all(start < end for start, end in kept)
    assert all(end < start for (_, end), (start, _) in pairwise(kept))
    assert chosen(kept) <= set(range(len(prompt[0])))


@given(prompts(), SHARES)
def test_share_is_exceeded_by_less_than_a_chunk(prompt: tuple[Sequence[float], list[Range]], keep: float) -> None:
    scores, protected = prompt
    kept, asked = len(chosen(select_ranges(scores, keep, protected))), round(keep * len(scores))
    at_least = len(chosen(protected)) + CHUNK * -(-len(scores) // REGION)
    assert asked <= kept < max(asked, at_least) + CHUNK


@given(prompts(), SHARES)
def test_no_two_adjacent_regions_are_without_a_kept_token(
    prompt: tuple[Sequence[float], list[Range]], keep: float
) -> None:
    scores, protected = prompt
    kept = select_ranges(scores, keep, protected)
    gaps = [start - end for (_, end), (start, _) in pairwise([(0, 0), *kept, (len(scores), len(scores))])]
    assert max(gaps) < 2 * REGION


@given(prompts(), SHARES)
def test_no_dropped_chunk_beats_a_kept_one_beyond_the_floor(
    prompt: tuple[Sequence[float], list[Range]], keep: float
) -> None:
    scores, _ = prompt
    there = chosen(select_ranges(scores, keep))
    chunks = {start: max(scores[start : start + CHUNK]) for start in range(0, len(scores), CHUNK)}
    best = [max(starts, key=lambda start: chunks[start]) for starts in regions(chunks)]
    taken = [chunks[start] for start in chunks if start in there and start not in best]
    left = [chunks[start] for start in chunks if start not in there]
    assert set(best) <= there
    assert min(taken, default=1.0) >= max(left, default=0.0)


def regions(chunks: Iterable[int]) -> list[list[int]]:
    starts = sorted(chunks)
    return [[s for s in starts if s // REGION == number] for number in range(starts[-1] // REGION + 1)]


@given(prompts(), SHARES)
def test_equal_scores_select_equally(prompt: tuple[Sequence[float], list[Range]], keep: float) -> None:
    scores, protected = prompt
    assert select_ranges(scores, keep, protected) == select_ranges(list(scores), keep, [*reversed(protected)])


@given(prompts())
def test_keeping_all_keeps_everything(prompt: tuple[Sequence[float], list[Range]]) -> None:
    scores, protected = prompt
    assert select_ranges(scores, 1.0, protected) == [(0, len(scores))]


@given(prompts(), SHARES, SHARES)
def test_larger_share_keeps_all_of_a_smaller_one(
    prompt: tuple[Sequence[float], list[Range]], one: float, other: float
) -> None:
    less, more = (chosen(select_ranges(*prompt[:1], share, prompt[1])) for share in sorted([one, other]))
    assert less <= more


def test_score_of_a_chunk_is_its_best_token() -> None:
    """In the mean the second needle's chunk would beat the first one's."""
    scores = needle(480, 100)
    scores[200:208] = [0.5] * 8
    assert select_ranges(scores, 0.03) == [(96, 112)]


def test_of_equal_chunks_the_first_ones_are_kept() -> None:
    assert select_ranges([0.0] * 480, 0.1) == [(0, 48)]


def test_scores_of_protected_tokens_do_not_matter() -> None:
    """The protected token that scores highest brings no neighbours along."""
    assert select_ranges(needle(480, 40, 300), 0.05, [(36, 44)]) == [(36, 44), (288, 304)]


def test_protected_tokens_count_in_the_share() -> None:
    assert select_ranges(needle(480, 300), 0.1, [(0, 32)]) == [(0, 32), (288, 304)]


def test_more_protected_tokens_than_the_share_are_all_kept() -> None:
    assert select_ranges(needle(480, 300), 0.1, [(0, 200), (460, 480)]) == [(0, 200), (460, 480)]


def test_region_with_zero_scores_keeps_its_best_chunk() -> None:
    scores = [1.0] * REGION + needle(REGION, 100) + [1.0] * REGION
    scores[REGION + 100] = 0.001
    assert (REGION + 96, REGION + 112) in select_ranges(scores, 0.1)


def test_ranges_beyond_the_prompt_are_cut() -> None:
    assert merged_ranges([(5, 9), (-3, 2), (8, 99), (4, 4)], 10) == [(0, 2), (5, 10)]
    assert select_ranges([], 0.5, [(0, 3)]) == []


def test_two_hundred_thousand_tokens_are_selected_quickly() -> None:
    """Some 20 ms; what is not linear in them would take seconds."""
    scores = array("f", (i * 0.618034 % 1 for i in range(200_000)))
    protected = [(at, at + 5) for at in range(0, 200_000, 200)]
    began = time.process_time()
    select_ranges(scores, 0.3, protected)
    assert time.process_time() - began < 0.25
