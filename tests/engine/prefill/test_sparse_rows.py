"""Sparse rows in the engine: they end, are preempted, fail and are recomputed as all others."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.engine import tiny
from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.prefill.test_sparse import ANSWER, KEPT, LONG, OTHER, reference
from tests.engine.tiny import EOS, alone, build, model, network, prompt
from worker.engine.batch.row import Row
from worker.request import GenerationRequest, Sampling


def expected(family: str, seed: int, kept: tuple[tuple[int, int], ...]) -> list[int]:
    generated = [token for token, _ in reference(family, seed, kept)]
    return generated[: generated.index(EOS)] if EOS in generated else generated


FAMILIES = pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "deepseek_v32"])


@FAMILIES
@pytest.mark.parametrize("keep", [True, False])
def test_preempted_sparse_row_continues_with_or_without_its_cache(family: str, keep: bool) -> None:
    run = Run(model(family), prefix_bytes=1 << 24)
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.add("other", prompt(LONG, 2), max_tokens=ANSWER, kept_ranges=OTHER)
    run.add("dense", prompt(40, 3), max_tokens=20)
    run.until(lambda: len(run.generated["sparse"]) >= 3)
    run.preempt("sparse")
    run.group_by(EACH_ALONE)
    run.step()
    # Meanwhile another row computes the whole prompt, which inserts it into the prefix cache.
    run.add("whole", prompt(LONG, 1), max_tokens=3)
    run.until(lambda: "whole" in run.ended)
    run.readmit(keep_caches=keep)
    run.until(lambda: len(run.generated["sparse"]) >= 6)
    run.group_by(ONE_GROUP)
    run.drain()
    assert run.generated["sparse"] == expected(family, 1, KEPT)
    assert run.generated["other"] == expected(family, 2, OTHER)
    assert run.generated["dense"] == alone(network(family), prompt(40, 3), 20)
    assert run.generated["whole"] == alone(network(family), prompt(LONG, 1), 3)


@FAMILIES
def test_sparse_row_inserts_no_prefix(family: str) -> None:
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
    assert (run.cached["dense"], run.generated["dense"]) == (0, alone(network(family), prompt(LONG, 1), 5))


def test_sparse_row_reuses_a_dense_rows_prefix() -> None:
    run = Run(model("qwen3"), prefix_bytes=1 << 24)
    run.add("dense", prompt(LONG, 1), max_tokens=3)
    run.drain()
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.drain()
    assert (run.cached["sparse"], run.generated["sparse"]) == (9, expected("qwen3", 1, KEPT))


def test_failed_step_costs_a_sparse_row_no_token() -> None:
    breakable = build(tiny.FAMILIES["qwen3"])
    run = Run(tiny.model_of(breakable, tiny.FAMILIES["qwen3"]))
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.add("dense", prompt(40, 3), max_tokens=20)
    run.until(lambda: len(run.generated["sparse"]) >= 3 and len(run.generated["dense"]) >= 3)
    breakable.model.norm = _BrokenOnce(breakable.model.norm)
    run.drain()
    assert breakable.model.norm.mended
    assert run.generated["sparse"] == expected("qwen3", 1, KEPT)
    assert run.generated["dense"] == alone(network("qwen3"), prompt(40, 3), 20)


class _BrokenOnce(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mended = norm, False

    def __call__(self, x: mx.array) -> mx.array:
        if not self.mended:
            self.mended = True
            raise RuntimeError("on purpose")
        return self.norm(x)


def test_length_of_a_sparse_row_counts_kept_tokens() -> None:
    run = Run(model("qwen3"))
    run.add("sparse", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.until(lambda: len(run.generated["sparse"]) >= 3)
    kept = sum(end - start for start, end in KEPT)
    assert run.engine._running.lengths == [[kept + len(run.generated["sparse"])]]


def test_invalid_ranges_fail_only_their_row() -> None:
    run = Run(model("gemma3"))
    run.add("wrong", prompt(LONG, 1), kept_ranges=((0, 10), (80, LONG)))
    run.add("right", prompt(LONG, 1), max_tokens=ANSWER, kept_ranges=KEPT)
    run.drain()
    assert run.ended["wrong"] == "faulted"
    assert run.generated["right"] == expected("gemma3", 1, KEPT)


def _drawn(*, preempt: bool) -> list[int]:
    run = Run(model("qwen3"))
    run.add("row", prompt(LONG, 1), max_tokens=20, kept_ranges=KEPT, sampling=Sampling(temperature=1.0, seed=5))
    run.until(lambda: len(run.generated["row"]) >= 4)
    if preempt:
        run.preempt("row")
        run.readmit(keep_caches=False)
    return run.drain()["row"]


def test_resumed_sparse_row_draws_the_same() -> None:
    assert _drawn(preempt=True) == _drawn(preempt=False)


def test_recomputed_row_drops_the_same_tokens() -> None:
    row = Row.of(GenerationRequest("row", prompt(LONG, 1), 9))
    row.drop_tokens(KEPT)
    row.answer += [1, 2]
    assert row.resumable_request() == GenerationRequest(
        "row", prompt(LONG, 1), 9, resume_tokens=(1, 2), kept_ranges=KEPT
    )
    assert Row.of(row.resumable_request()).length == row.length == sum(end - start for start, end in KEPT) + 2
