"""A restored copy of a row continues as the row would have, and copies own their memory."""

import gc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.tiny import FAMILIES, network, prompt
from worker.engine.cache import slots
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.layers import layers
from worker.engine.cache.recurrent import SlotArraysCache
from worker.engine.cache.segments import (
    KVSegment,
    StateSnapshot,
    copy_segment,
    is_finite,
    is_sliceable,
    restore_cache,
    snapshot_state,
    token_bytes,
)
from worker.engine.upstream.mlx_lm import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

KEPT, MORE = 45, 12  # tokens; the windows are of 16
TOKENS = prompt(KEPT + MORE, 3)
STATELESS = ["llama", "deepseek_v3", "deepseek_v32"]


def computed(family: str, tokens: Sequence[int], cache: list[Any] | None = None) -> tuple[list[Any], mx.array]:
    """Return the cache after these tokens, computed in chunks of different lengths, and the logits of the last
    token."""
    cache, at = cache or make_prompt_cache(network(family)), 0
    while at < len(tokens):
        step = min(1 + at % 20, len(tokens) - at)
        logits = network(family)(mx.array([tokens[at : at + step]]), cache=cache)
        slots.materialize(cache)
        at += step
    return cache, logits[0, -1]


def batched(family: str) -> list[Any]:
    """Three rows, the one of `TOKENS[:KEPT]` among them at place 1, its last two tokens decoded."""
    batch: list[Any] = []
    for tokens in prompt(21, 8), TOKENS[: KEPT - 2], prompt(60, 9):
        row, _ = computed(family, tokens)
        if batch:
            slots.join(batch, row)
        else:
            batch = slots.batch_of(row)
    for token in TOKENS[KEPT - 2 : KEPT]:
        network(family)(mx.array([[5], [token], [6]]), cache=batch)
    return batch


def restored_twice(family: str, cache: Sequence[Any], place: int) -> list[Any]:
    """Taken in two parts, and restored."""
    segments = [copy_segment(cache, place, 0, 17), copy_segment(cache, place, 17, KEPT)]
    state = snapshot_state(cache, place)
    slots.materialize(state.layers)
    return restore_cache(make_prompt_cache(network(family)), segments, state.before(0), KEPT, capacity=256)


def equal(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=0, atol=1e-3 * float(mx.abs(other).max())).item())


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_row_continues_like_the_original(family: str) -> None:
    _, expected = computed(family, TOKENS)
    alone, _ = computed(family, TOKENS[:KEPT])
    for cache in restored_twice(family, alone, 0), restored_twice(family, batched(family), 1):
        assert {type(layer) for layer in layers(cache)} == {type(layer) for layer in layers(alone)}
        assert equal(computed(family, TOKENS[KEPT:], cache)[1], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_row_joins_a_batch(family: str) -> None:
    _, expected = computed(family, TOKENS[: KEPT + 1])
    alone, _ = computed(family, TOKENS[:KEPT])
    batch = slots.batch_of(computed(family, prompt(9, 4))[0])
    slots.join(batch, restored_twice(family, alone, 0))
    assert equal(network(family)(mx.array([[7], [TOKENS[KEPT]]]), cache=batch)[1, -1], expected)


@pytest.mark.parametrize("family", STATELESS)
def test_any_number_of_a_segments_tokens_can_be_restored(family: str) -> None:
    alone, _ = computed(family, TOKENS[:KEPT])
    segments = [copy_segment(alone, 0, 0, 20), copy_segment(alone, 0, 20, KEPT)]
    for length in 21, 30, KEPT:
        cache = restore_cache(make_prompt_cache(network(family)), segments, iter(()), length, capacity=256)
        assert equal(computed(family, TOKENS[length:], cache)[1], computed(family, TOKENS)[1])


def arrays(state: StateSnapshot) -> list[mx.array]:
    found = []
    for layer in state.layers:
        found += layer.cache if isinstance(layer, ArraysCache) else [layer.keys, layer.values]
    return [array for array in found if array is not None]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "falcon_h1", "mamba2", "recurrent_gemma"])
def test_continuing_from_a_snapshot_does_not_change_it(family: str) -> None:
    cache, _ = computed(family, TOKENS[:KEPT])
    run, state = copy_segment(cache, 0, 0, KEPT), snapshot_state(cache, 0)
    slots.materialize(state.layers)
    before = [mx.array(array) + 0 for array in [*arrays(state), *run.buffers]]
    mx.eval(before)
    for _ in range(2):
        row = restore_cache(make_prompt_cache(network(family)), [run], state.before(0), KEPT, capacity=256)
        computed(family, prompt(40, 6), row)
        computed(family, prompt(3, 7), cache)
    after = [*arrays(state), *run.buffers]
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma3n"])
@pytest.mark.parametrize("batch", [False, True], ids=["alone", "of a batch"])
def test_snapshot_of_an_unfilled_window_can_be_trimmed(family: str, batch: bool) -> None:
    tokens = TOKENS[:14]
    cache, _ = computed(family, tokens)
    if batch:
        cache = slots.batch_of(cache)
    run, state = copy_segment(cache, 0, 0, 14), snapshot_state(cache, 0)
    slots.materialize(state.layers)
    assert state.trimmable
    for length in 13, 6, 1, 14:
        row = restore_cache(make_prompt_cache(network(family)), [run], state.before(14 - length), length, capacity=256)
        for parted in prompt(1, 11), prompt(25, 11):
            mine, theirs = (
                computed(family, parted, slots.restore(slots.RowCache(row))),
                (*tokens[:length], *parted),
            )
            assert equal(mine[1], computed(family, theirs)[1])


@pytest.mark.parametrize(("family", "shortens"), [("gemma3", True), ("qwen3_5", False), ("recurrent_gemma", False)])
def test_snapshot_is_trimmable_if_all_its_layers_are(family: str, shortens: bool) -> None:
    assert snapshot_state(computed(family, TOKENS[:15])[0], 0).trimmable == shortens
    assert not snapshot_state(computed(family, TOKENS[:16])[0], 0).trimmable


def test_chunk_does_not_make_a_snapshot_larger_than_its_window() -> None:
    cache = make_prompt_cache(network("gemma3"))
    network("gemma3")(mx.array([prompt(300, 1)]), cache=cache)
    state = snapshot_state(cache, 0)
    slots.materialize(state.layers)
    kept = [layer for layer in state.layers if isinstance(layer, RotatingKVCache)]
    assert kept
    assert all(layer.keys.shape[2] == 16 and layer.offset == 300 for layer in kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_token_bytes_equal_the_bytes_of_a_segment_per_token(family: str) -> None:
    for cache, place in (computed(family, TOKENS[:KEPT])[0], 0), (batched(family), 1):
        assert copy_segment(cache, place, 3, 40).nbytes == 37 * token_bytes(cache)


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "mamba2"])
def test_size_of_a_snapshot_is_known_before_it_is_computed(family: str) -> None:
    for cache, place in (computed(family, TOKENS[:KEPT])[0], 0), (batched(family), 1):
        state = snapshot_state(cache, place)
        promised = state.nbytes
        slots.materialize(state.layers)
        assert promised == state.nbytes == sum(array.nbytes for array in arrays(state))


def big(rows: int, columns: int) -> SlotKVCache:
    layer = SlotKVCache()
    for _ in range(rows):
        row = KVCache()
        row.update_and_fetch(mx.ones((1, 2, columns, 64)), mx.ones((1, 2, columns, 64)))
        layer.extend([row], [None], [columns])
    mx.eval(layer.state)
    return layer


def held_bytes() -> int:
    gc.collect()
    return mx.get_active_memory()


NEAR = 70_000  # bytes: MLX may leave up to 16 kB of a buffer unused after an array


def test_segment_copied_from_a_batch_owns_its_memory() -> None:
    before = held_bytes()
    layer = big(4, 1000)
    run = copy_segment([layer], 2, 100, 400)
    del layer
    assert held_bytes() - before == pytest.approx(run.nbytes, abs=NEAR)
    assert run.nbytes == 2 * 2 * 300 * 64 * 4


def test_parts_of_a_split_segment_own_their_memory() -> None:
    layer = big(1, 1000)
    run = copy_segment([layer], 0, 0, 1000)
    del layer
    before = held_bytes()
    first, rest = run.split(300)
    whole_bytes = run.nbytes
    del run
    assert first.nbytes + rest.nbytes == whole_bytes
    assert held_bytes() == pytest.approx(before, abs=NEAR)
    del rest
    assert held_bytes() == pytest.approx(before - whole_bytes + first.nbytes, abs=NEAR)


def test_snapshot_owns_its_memory() -> None:
    batch = SlotArraysCache(1)
    for _ in range(8):
        row = ArraysCache(1)
        row[0] = mx.ones((1, 64, 1024))
        batch.extend([row], [None], [1])
    del row
    before = held_bytes()
    state = snapshot_state([batch], 3)
    slots.materialize(state.layers)
    batch.filter([])
    assert held_bytes() == pytest.approx(before - 7 * state.nbytes, abs=NEAR)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1"])
def test_restored_cache_frees_all_its_memory(family: str) -> None:
    """Not even until Python collects its garbage."""
    cache, _ = computed(family, TOKENS[:KEPT])
    run, state = copy_segment(cache, 0, 0, KEPT), snapshot_state(cache, 0)
    slots.materialize(state.layers)
    del cache
    before = held_bytes()
    gc.disable()
    try:
        restore_cache(make_prompt_cache(network(family)), [run], state.before(0), KEPT, capacity=256)
        kept_bytes = run.nbytes + state.nbytes
        del run, state
        assert mx.get_active_memory() <= before - 0.9 * kept_bytes
    finally:
        gc.enable()


def test_layer_that_is_never_called_takes_no_bytes() -> None:
    cache = [KVCache(), KVCache()]
    cache[1].update_and_fetch(mx.ones((1, 2, 40, 8)), mx.ones((1, 2, 40, 8)))
    run = copy_segment(cache, 0, 0, 40)
    assert run.nbytes == 40 * token_bytes(cache) == 2 * 40 * 2 * 8 * 4
    first, second = restore_cache([KVCache(), KVCache()], run.split(10), iter(()), 40, capacity=256)
    assert first.empty()
    assert second.offset == 40


def test_values_with_a_head_dim_of_zero_are_restored() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 40, 8)), mx.ones((1, 1, 40, 0)))
    (row,) = restore_cache([KVCache()], copy_segment([cache], 0, 0, 40).split(7), iter(()), 30, capacity=256)
    row.update_and_fetch(mx.ones((1, 1, 5, 8)), mx.ones((1, 1, 5, 0)))
    assert [each.shape for each in row.keys_and_values()] == [(1, 1, 35, 8), (1, 1, 35, 0)]


def test_restored_row_has_capacity_for_its_prompt() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 300, 8)), mx.ones((1, 1, 300, 8)))
    (row,) = restore_cache([KVCache()], [copy_segment([cache], 0, 0, 300)], iter(()), 300, capacity=512)
    assert row.keys.shape[2] == 512
    row.update_and_fetch(mx.ones((1, 1, 212, 8)), mx.ones((1, 1, 212, 8)))
    assert row.keys.shape[2] == 512


def test_subclass_of_a_kv_cache_is_not_sliced_by_token() -> None:
    class Chunked(KVCache):
        pass

    assert is_sliceable(KVCache())
    assert is_sliceable(SlotKVCache())
    assert not is_sliceable(Chunked())
    assert not is_sliceable(RotatingKVCache(16))
    assert not is_sliceable(ArraysCache(1))


def test_single_nan_or_infinity_is_not_finite() -> None:
    for bad in float("nan"), float("inf"):
        keys = mx.ones((1, 1, 4, 2))
        keys[0, 0, 2, 1] = bad
        assert not is_finite(KVSegment((mx.ones((1, 1, 4, 2)), keys)))
        recurrent, window = ArraysCache(2), RotatingKVCache(8)
        recurrent[1] = keys
        window.keys = window.values = keys
        assert not is_finite(StateSnapshot((recurrent,)))
        assert not is_finite(StateSnapshot((window,)))
    assert is_finite(KVSegment((mx.ones((1, 1, 4, 2)),)))
    assert is_finite(StateSnapshot((ArraysCache(2), RotatingKVCache(8))))
    assert is_finite(None)
