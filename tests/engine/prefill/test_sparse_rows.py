"""Sparse rows in the engine: they end, pause, fail and come again as all others do."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.engine import tiny
from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.prefill.test_sparse import ANSWER, KEPT, LONG, OTHER, reference
from tests.engine.tiny import EOS, alone, build, model, network, prompt
from worker.engine.batch.row import Row
from worker.schedule.request import GenerationRequest, Sampling


def expected(family: str, seed: int, kept: tuple[tuple[int, int], ...]) -> list[int]:
    said = [token for token, _ in reference(family, seed, kept)]
    return said[: said.index(EOS)] if EOS in said else said


FAMILIES = pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "deepseek_v32"])


@FAMILIES
@pytest.mark.parametrize("keep", [True, False])
def test_a_sparse_row_that_is_parked_goes_on_with_its_cache_or_without(family: str, keep: bool) -> None:
    run = Run(model(family), prefix_bytes=1 << 24)
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.add("other", prompt(LONG, 2), max_tokens=ANSWER, kept_ranges=OTHER)
    run.add("dense", prompt(40, 3), max_tokens=20)
    run.until(lambda: len(run.said["sparse"]) >= 3)
    run.park("sparse")
    run.group_by(EACH_ALONE)
    run.step()
    # Meanwhile somebody computes all of the prompt, and leaves it in the prefix cache.
    run.add("whole", prompt(LONG, 1), max_tokens=3)
    run.until(lambda: "whole" in run.ended)
    run.stir(keep=keep)
    run.until(lambda: len(run.said["sparse"]) >= 6)
    run.group_by(ONE_GROUP)
    run.drain()
    assert run.said["sparse"] == expected(family, 1, KEPT)
    assert run.said["other"] == expected(family, 2, OTHER)
    assert run.said["dense"] == alone(network(family), prompt(40, 3), 20)
    assert run.said["whole"] == alone(network(family), prompt(LONG, 1), 3)


@FAMILIES
def test_nothing_of_a_sparse_row_is_kept_for_others(family: str) -> None:
    run = Run(model(family), prefix_bytes=1 << 24)
    run.add("sparse", prompt(LONG, 1), max_tokens=5, kept_ranges=KEPT)
    run.add("gone", prompt(LONG, 1), max_tokens=50, kept_ranges=KEPT)
    run.until(lambda: "sparse" in run.ended)
    run.engine.remove("gone")
    run.drain()
    assert run.engine._caches.prefix is not None
    assert run.engine._caches.prefix.nbytes == 0
    run.add("dense", prompt(LONG, 1), max_tokens=5)
    run.drain()
    assert (run.cached["dense"], run.said["dense"]) == (0, alone(network(family), prompt(LONG, 1), 5))


def test_a_sparse_row_begins_with_what_a_dense_one_left() -> None:
    run = Run(model("qwen3"), prefix_bytes=1 << 24)
    run.add("dense", prompt(LONG, 1), max_tokens=3)
    run.drain()
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.drain()
    assert (run.cached["sparse"], run.said["sparse"]) == (9, expected("qwen3", 1, KEPT))


def test_a_failed_step_costs_a_sparse_row_nothing_but_time() -> None:
    breakable = build(tiny.FAMILIES["qwen3"])
    run = Run(tiny.model_of(breakable, tiny.FAMILIES["qwen3"]))
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.add("dense", prompt(40, 3), max_tokens=20)
    run.until(lambda: len(run.said["sparse"]) >= 3 and len(run.said["dense"]) >= 3)
    breakable.model.norm = _BrokenOnce(breakable.model.norm)
    run.drain()
    assert breakable.model.norm.mended
    assert run.said["sparse"] == expected("qwen3", 1, KEPT)
    assert run.said["dense"] == alone(network("qwen3"), prompt(40, 3), 20)


class _BrokenOnce(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mended = norm, False

    def __call__(self, x: mx.array) -> mx.array:
        if not self.mended:
            self.mended = True
            raise RuntimeError("on purpose")
        return self.norm(x)


def test_a_sparse_row_is_as_long_as_what_it_keeps() -> None:
    run = Run(model("qwen3"))
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.until(lambda: len(run.said["sparse"]) >= 3)
    kept = sum(end - start for start, end in KEPT)
    assert run.engine._running.lengths == [[kept + len(run.said["sparse"])]]


def test_wrong_ranges_fault_their_row_alone() -> None:
    run = Run(model("gemma3"))
    run.add("wrong", prompt(LONG, 1), kept_ranges=((0, 10), (80, LONG)))
    run.add("right", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.drain()
    assert run.ended["wrong"] == "faulted"
    assert run.said["right"] == expected("gemma3", 1, KEPT)


def _drawn(*, park: bool) -> list[int]:
    run = Run(model("qwen3"))
    run.add("row", prompt(LONG, 1), max_tokens=20, kept_ranges=KEPT, sampling=Sampling(temperature=1.0, seed=5))
    run.until(lambda: len(run.said["row"]) >= 4)
    if park:
        run.park("row")
        run.stir(keep=False)
    return run.drain()["row"]


def test_a_drawn_answer_goes_on_as_it_would_have() -> None:
    assert _drawn(park=True) == _drawn(park=False)


def test_what_a_row_leaves_out_is_left_out_whenever_it_comes_again() -> None:
    row = Row.of(GenerationRequest("row", prompt(LONG, 1), 9))
    row.drop_tokens(KEPT)
    row.answer += [1, 2]
    assert row.resumable_request() == GenerationRequest(
        "row", prompt(LONG, 1), 9, resume_tokens=(1, 2), kept_ranges=KEPT
    )
    assert Row.of(row.resumable_request()).length == row.length == sum(end - start for start, end in KEPT) + 2
