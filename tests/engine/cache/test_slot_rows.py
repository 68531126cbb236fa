"""Rows that several layers share."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import pytest

from tests.engine.tiny import network, prompt
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.layers import SlotRows, layers
from worker.engine.cache.slots import RowCache, batch_of, join_all, select_rows, verification
from worker.engine.upstream.mlx_lm import make_prompt_cache


def batch(family: str, *lengths: int) -> list[Any]:
    joining = list[RowCache]()
    for tokens in lengths:
        cache = make_prompt_cache(network(family))
        network(family)(mx.array([prompt(tokens, tokens)]), cache=cache)
        joining.append(RowCache(cache))
    caches = batch_of(make_prompt_cache(network(family)))
    join_all(caches, joining)
    return caches


def feed(family: str, caches: Sequence[Any], rows: int) -> None:
    mx.eval(network(family)(mx.array([[7]] * rows), cache=caches))


def offsets(caches: Sequence[Any]) -> list[mx.array]:
    return [layer.offset for layer in layers(caches) if isinstance(layer, SlotKVCache)]


def values(arrays: Sequence[mx.array]) -> list[list[int]]:
    return [cast("list[int]", array.tolist()) for array in arrays]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_layers_compute_the_positions_of_their_rows_once(family: str) -> None:
    caches = batch(family, 9, 3, 5)
    for rows in [3, 3, 2]:
        if rows == 2:
            select_rows(caches, [2, 1])
        first, *others = offsets(caches)
        assert all(other is first for other in others)
        feed(family, caches, rows)
    assert values(offsets(caches)) == [[8, 6]] * len(offsets(caches))


def test_layers_share_the_rows_that_have_kept_a_part_of_a_forward() -> None:
    caches = batch("qwen3", 9, 3)
    with verification(caches, 3) as verifying:
        network("qwen3")(mx.array([[7, 8, 9]] * 2), cache=caches)
        verifying.commit([1, 3])
    first, *others = offsets(caches)
    assert all(other is first for other in others)
    assert values([first]) == [[10, 6]]


def test_layers_of_different_progress_share_rows_and_have_positions_of_their_own() -> None:
    rows = SlotRows([4, 2], [9, 2], [20, 20])
    assert values([rows.next_positions(0), rows.next_positions(1), rows.next_positions(0)]) == [[9, 2], [10, 3], [9, 2]]
    assert values([rows.next_indices(1), rows.next_indices(0)]) == [[5, 3], [4, 2]]


def test_a_window_that_has_cut_its_rows_shares_no_lengths_with_full_attention() -> None:
    caches = batch("gemma3", 40, 3)
    assert len({tuple(layer.slot_rows.lengths) for layer in layers(caches)}) == 2
    feed("gemma3", caches, 2)
    assert values(offsets(caches)) == [[41, 4]] * len(offsets(caches))
