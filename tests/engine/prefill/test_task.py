"""A prompt's stages: how they follow each other, and what they take from the prefix cache and add to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from tests.engine.tiny import network, prompt
from worker.engine.batch.row import Row
from worker.engine.prefill.scoring import LOOKAHEAD, DraftScorer
from worker.engine.prefill.spans import ComputeSpans
from worker.engine.prefill.specprefill import Score
from worker.engine.prefill.stage import Phase, Stage, StageProgress
from worker.engine.prefill.task import PromptTask
from worker.engine.prefix.cache import PrefixCache
from worker.outcomes import Outcome, Prefilled, PromptProgress, SpecPrefillApplied, SpecPrefillSkipped
from worker.request import GenerationRequest, SpecPrefillParams

LONG = 200
REQUEST = GenerationRequest("row", prompt(LONG, 1), 9)
PARAMS = SpecPrefillParams(keep=0.3, droppable_ranges=((10, 180),), min_tokens=1, requested=True)


def task_of(
    request: GenerationRequest = REQUEST, prefix: PrefixCache | None = None, first: Sequence[Stage] = ()
) -> PromptTask:
    return PromptTask(Row.of(request), ComputeSpans(network("qwen3"), request), first=first, prefix=prefix)


def scored_task(params: SpecPrefillParams = PARAMS, prefix: PrefixCache | None = None) -> PromptTask:
    request, draft = replace(REQUEST, specprefill=params), DraftScorer(network("llama"), prefix_bytes=0)
    score = Score(request, params, draft, lambda scored, tokens, keep: True, window=0, tokens_in_draft=int)
    spans = ComputeSpans(network("qwen3"), request)
    return PromptTask(Row.of(request), spans, first=[score], prefix=prefix)


@pytest.fixture
def prefix() -> PrefixCache:
    """Return a prefix cache that holds the first half of the prompt."""
    cache, request = PrefixCache(network("qwen3"), 10**9), replace(REQUEST, prompt=prompt(LONG, 1)[: LONG // 2 + 1])
    task_of(request, cache).advance(LONG)
    assert cache.match_length("", REQUEST.prompt) == LONG // 2
    return cache


def test_progress_counts_tokens_computed_and_cached(prefix: PrefixCache) -> None:
    task = task_of(prefix=prefix)
    advanced = task.advance(30)
    assert (advanced.phase, advanced.done, advanced.tokens) == ("prefill", LONG // 2, 30)
    assert advanced.outcomes == (Prefilled("row", LONG // 2 + 30, LONG - 1, LONG // 2),)


def test_refreshing_finds_a_prefix_and_loads_nothing(prefix: PrefixCache) -> None:
    task = task_of(prefix=prefix)
    assert task.stage.remaining == LONG - 1
    task.refresh()
    assert (task.stage.remaining, task.stage.held_tokens, task.cached) == (LONG - LONG // 2 - 1, 0, 0)


def test_prefix_evicted_before_it_is_loaded_is_computed(prefix: PrefixCache) -> None:
    task = task_of(prefix=prefix)
    task.refresh()
    prefix.set_limit(0)
    advanced = task.advance(LONG)
    assert (advanced.done, advanced.tokens, task.cached, task.is_computed) == (0, LONG - 1, 0, True)


def test_scoring_precedes_the_prefill_of_the_kept_tokens() -> None:
    task = scored_task()
    task.refresh()
    assert (task.stage.phase, task.stage.remaining) == ("scoring", LONG - 1 + LOOKAHEAD)
    first = task.advance(50)
    assert first.outcomes == (PromptProgress("scoring", "row", 50, LONG - 1 + LOOKAHEAD),)
    assert (first.phase, first.tokens) == ("scoring", 50)
    while task.stage.phase == "scoring":
        last = task.advance(LONG)
    applied, progress = last.outcomes
    assert isinstance(applied, SpecPrefillApplied)
    assert task.row.request.kept_ranges == applied.kept_ranges
    assert progress == Prefilled("row", 0, LONG - 1 - task.row.num_dropped)
    assert task.advance(LONG).tokens == LONG - 1 - task.row.num_dropped
    assert task.is_computed


def test_prompt_that_is_not_scored_says_so_with_its_first_progress() -> None:
    task = scored_task(replace(PARAMS, min_tokens=LONG + 1))
    task.refresh()
    assert task.stage.phase == "prefill"
    skipped, progress = task.advance(50).outcomes
    assert isinstance(skipped, SpecPrefillSkipped)
    assert progress == Prefilled("row", 50, LONG - 1)
    assert task.advance(50).outcomes == (Prefilled("row", 100, LONG - 1),)


def test_failed_scoring_is_replaced_by_the_whole_prompt(monkeypatch: pytest.MonkeyPatch, prefix: PrefixCache) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    task = scored_task(prefix=prefix)
    task.refresh()
    monkeypatch.setattr(Score, "advance", fails)
    skipped, progress = task.advance(50).outcomes
    assert isinstance(skipped, SpecPrefillSkipped)
    assert progress == Prefilled("row", 0, LONG - 1)
    assert task.advance(LONG).outcomes == (Prefilled("row", LONG - 1, LONG - 1, LONG // 2),)


def test_failure_of_a_prompt_that_is_not_sparse_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    for task in task_of(), task_of(replace(REQUEST, kept_ranges=((0, 50), (90, LONG)))):
        monkeypatch.setattr(ComputeSpans, "advance", fails)
        with pytest.raises(MemoryError):
            task.advance(50)


class Rehearse(Stage):
    """Counts a few tokens before the prompt is scored, and fails if it is told to."""

    phase = cast(Phase, "rehearsing")
    total, remaining = 10, 10
    before_prefix, takes_chunk = True, False

    def __init__(self, error: type[Exception] | None = None) -> None:
        self._error = error

    @property
    def needed(self) -> bool:
        return self.remaining > 0

    @property
    def report(self) -> Outcome:
        return PromptProgress("encoding", "row", self.done, self.total)

    def advance(self, tokens: int) -> StageProgress:
        if self._error:
            raise self._error
        self.remaining -= tokens
        return StageProgress(tokens)


def test_stage_of_a_further_kind_reports_its_own_progress_before_the_prefix_is_loaded(prefix: PrefixCache) -> None:
    task = task_of(prefix=prefix, first=[Rehearse()])
    advanced = task.advance(4)
    assert advanced.outcomes == (PromptProgress("encoding", "row", 4, 10),)
    assert (advanced.phase, advanced.tokens, advanced.chunk, task.cached) == ("rehearsing", 4, 0, 0)
    task.advance(6)
    assert task.advance(30).outcomes == (Prefilled("row", LONG // 2 + 30, LONG - 1, LONG // 2),)


def test_failure_of_a_stage_without_a_fallback_is_raised() -> None:
    with pytest.raises(MemoryError):
        task_of(first=[Rehearse(MemoryError)]).advance(4)


def test_stage_reports_done_with_its_last_tokens() -> None:
    spans = ComputeSpans(network("qwen3"), replace(REQUEST, kept_ranges=((0, 50), (90, LONG))))
    assert spans.total == LONG - 40 - 1
    assert spans.advance(80) == StageProgress(50), "a forward ends before the first dropped token"
    assert spans.advance(80) == StageProgress(80)
    assert spans.start == 170
    assert spans.advance(80) == StageProgress(LONG - 40 - 1 - 130)
    assert (spans.remaining, spans.done) == (0, spans.total)


def test_keeping_all_tokens_is_one_dense_span() -> None:
    whole = ComputeSpans(network("qwen3"), replace(REQUEST, kept_ranges=((0, 50), (50, LONG))))
    dense = ComputeSpans(network("qwen3"), REQUEST)
    assert (whole.total, whole.num_dense) == (dense.total, dense.num_dense) == (LONG - 1, LONG - 1)
