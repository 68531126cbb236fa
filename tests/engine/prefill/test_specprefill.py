"""Prompts that a draft scores in the engine, together with others."""

from dataclasses import replace
from functools import cache

import pytest

from tests.engine.driver import Run
from tests.engine.tiny import FAMILIES, alone, model, network, prompt
from worker.engine.model.load import DraftModel, Model
from worker.engine.prefill.scoring import DraftScorer
from worker.request import Range, SpecPrefillParams

LONG, ANSWER = 200, 10
WISH = SpecPrefillParams(keep=0.3, droppable_ranges=((10, 180),), min_tokens=1, requested=True)


@cache
def drafted(family: str = "qwen3") -> Model:
    """Another model with the same tokens is its draft."""
    return replace(model(family), draft=DraftModel(network("llama"), context=1000))


def run(family: str = "qwen3", *, prefix_bytes: int = 1 << 24) -> Run:
    return Run(drafted(family), prefix_bytes=prefix_bytes)


@cache
def kept_alone(family: str, kept: tuple[Range, ...], seed: int = 1) -> list[int]:
    one = Run(model(family))
    one.add("x", prompt(LONG, seed), max_tokens=ANSWER, kept_ranges=kept)
    return one.drain()["x"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_keeping_everything_keeps_the_whole_prompt(family: str) -> None:
    one = run(family)
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=replace(WISH, keep=1.0))
    one.drain()
    assert one.generated["x"] == alone(network(family), prompt(LONG, 1), ANSWER)
    assert one.kept_ranges["x"] == ((0, LONG),)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "deepseek_v32"])
def test_row_with_dropped_tokens_equals_its_kept_tokens_alone_and_so_do_others(family: str) -> None:
    some = run(family)
    some.add("first", prompt(30, 2), max_tokens=60)
    some.until(lambda: len(some.generated["first"]) > 2)
    some.add("thin", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    some.add("last", prompt(40, 3), max_tokens=30)
    some.drain()
    kept = some.kept_ranges["thin"]
    assert 0 <= sum(end - start for start, end in kept) - (30 + 0.3 * 170) <= 16  # all that stays, and a share
    assert kept[0][0] == 0
    assert kept[0][1] >= 10
    assert (kept[-1][0] <= 180, kept[-1][1]) == (True, LONG)
    assert some.generated["thin"] == kept_alone(family, kept)
    assert some.generated["first"] == alone(network(family), prompt(30, 2), 60)
    assert some.generated["last"] == alone(network(family), prompt(40, 3), 30)


def test_scoring_alternates_with_decoding() -> None:
    some = Run(drafted(), step_s=0.0)
    some.add("first", prompt(30, 2), max_tokens=60)
    some.until(lambda: len(some.generated["first"]) > 2)
    before = len(some.generated["first"])
    some.add("thin", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    some.until(lambda: "thin" in some.kept_ranges)
    assert some.scored["thin"] > 5
    assert len(some.generated["first"]) - before >= some.scored["thin"]


def test_an_equal_prompt_is_not_scored_again() -> None:
    one = run(prefix_bytes=0)
    for id in "ab":
        one.add(id, prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
        one.drain()
    assert (one.scored["a"] > 0, one.scored["b"]) == (True, 0)
    assert (one.kept_ranges["a"], one.generated["a"]) == (one.kept_ranges["b"], one.generated["b"])


def test_cached_prefix_is_kept_and_the_rest_is_selected() -> None:
    one = run()
    one.add("before", prompt(80, 1), max_tokens=2)
    one.drain()
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    one.drain()
    ((start, end), *_), rest = one.kept_ranges["x"], LONG - 80
    assert (start, one.cached["x"]) == (0, 80)
    assert end >= 80
    assert 0 <= sum(b - a for a, b in one.kept_ranges["x"]) - 80 - (20 + 0.3 * (rest - 20)) <= 16
    assert one.generated["x"] == kept_alone("qwen3", one.kept_ranges["x"])


def test_dense_prefix_is_cached_and_nothing_else() -> None:
    one = run()
    params = replace(WISH, droppable_ranges=((60, 180),))
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=params)
    one.drain()
    one.add("y", prompt(LONG, 1), max_tokens=ANSWER)
    one.drain()
    assert one.cached["y"] == one.kept_ranges["x"][0][1]
    assert one.generated["y"] == alone(network("qwen3"), prompt(LONG, 1), ANSWER)


@pytest.mark.parametrize("keep", [True, False])
def test_preempted_row_drops_the_same_tokens_when_readmitted(keep: bool) -> None:
    one = run()
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    one.until(lambda: len(one.generated["x"]) > 3)
    one.preempt("x")
    one.readmit(keep_caches=keep)
    one.drain()
    assert one.generated["x"] == kept_alone("qwen3", one.kept_ranges["x"])


def test_draft_that_fails_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    one = run()
    monkeypatch.setattr("worker.engine.prefill.scoring._pooled", fails)
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    one.drain()
    assert one.generated["x"] == alone(network("qwen3"), prompt(LONG, 1), ANSWER)
    assert one.skipped == {"x": "The draft failed; the worker's log has the reason."}


def test_failed_sparse_prefill_restarts_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError

    one = run()
    monkeypatch.setattr("worker.engine.prefill.spans.rope_at", fails)
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    one.drain()
    assert one.generated["x"] == alone(network("qwen3"), prompt(LONG, 1), ANSWER)
    assert list(one.skipped) == ["x"]


def test_prompt_with_few_tokens_to_compute_is_not_scored() -> None:
    one = run()
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=replace(WISH, min_tokens=LONG + 1))
    one.drain()
    assert one.skipped == {"x": "200 tokens were left to compute, fewer than the minimum of 201."}
    assert one.generated["x"] == alone(network("qwen3"), prompt(LONG, 1), ANSWER)


@pytest.mark.parametrize(("ratio", "applied"), [(1.2, False), (5.0, True)])
def test_specprefill_is_chosen_if_worthwhile(ratio: float, applied: bool) -> None:
    one = run()
    one.engine._prefills._ratio = ratio  # how much faster the draft is, until it is measured
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=replace(WISH, requested=False))
    one.drain()
    assert ("x" in one.kept_ranges) is applied
    assert one.skipped == ({} if applied else {"x": "Scoring would have taken longer than it saves."})


def test_shared_prefixes_do_not_distort_the_measured_speed() -> None:
    one = Run(model("qwen3"), step_s=10.0, prefix_bytes=1 << 24)
    one.add("first", prompt(600, 9), max_tokens=2)
    one.drain()
    before = one.engine._prefills.cost("prefill").token_s
    for i in range(12):
        one.add(str(i), prompt(600, 4) + prompt(3, 50 + i), max_tokens=2)
    one.drain()
    assert sorted(one.cached.values())[2:] == [600] * 11
    assert one.engine._prefills.cost("prefill").token_s > before / 3


def test_one_prompt_is_scored_at_a_time() -> None:
    some = Run(drafted(), step_s=0.0)
    for seed in range(3):
        some.add(str(seed), prompt(LONG, seed), max_tokens=ANSWER, specprefill=WISH)
    under_way = set[str]()
    while len(some.engine):
        some.step()
        begun = {id for id, chunks in some.scored.items() if chunks and id not in some.kept_ranges}
        assert len(begun) <= 1
        under_way |= begun
    assert under_way == {"0", "1", "2"}


def test_row_without_dropped_tokens_caches_its_answer() -> None:
    one = run()
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=replace(WISH, keep=1.0))
    one.drain()
    one.add("y", prompt(LONG, 1) + tuple(one.generated["x"]) + (7,), max_tokens=2)
    one.drain()
    assert one.cached["y"] >= LONG + len(one.generated["x"]) - 1  # the last token was not fed


def test_row_removed_during_scoring_leaves_nothing() -> None:
    one = Run(drafted(), step_s=0.0)
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    one.until(lambda: one.scored["x"] > 1)
    one.engine.remove("x")
    assert len(one.engine) == 0
    one.step()
    assert "x" not in one.ended


def test_draft_reuses_its_prefix_of_a_growing_conversation() -> None:
    draft = DraftScorer(network("llama"), 1 << 24)
    first = draft.scoring("", prompt(150, 1))
    first.advance(1000)
    assert draft.scoring("", prompt(LONG, 1)).remaining < LONG - 140 + 10


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_prefixes_cached_meanwhile_are_used_without_effect_on_the_answer(family: str) -> None:
    some = Run(drafted(family), step_s=0.0, prefix_bytes=1 << 24)
    some.add("thin", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    some.until(lambda: some.scored["thin"] > 1)
    some.add("whole", prompt(LONG, 1), max_tokens=ANSWER, boundaries=(50, 120))
    some.drain()
    assert some.generated["whole"] == alone(network(family), prompt(LONG, 1), ANSWER)
    assert some.generated["thin"] == kept_alone(family, some.kept_ranges["thin"])


def test_prompt_longer_than_the_drafts_context_is_not_scored() -> None:
    short = replace(drafted(), draft=DraftModel(network("llama"), context=LONG + 7))
    one = Run(short)
    one.add("x", prompt(LONG, 1), max_tokens=ANSWER, specprefill=WISH)
    one.drain()
    assert one.skipped == {"x": "The prompt exceeds the draft's context of 207 tokens."}
    assert one.generated["x"] == alone(network("qwen3"), prompt(LONG, 1), ANSWER)
