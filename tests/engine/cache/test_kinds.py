"""What every kind of cache offers, and what becomes of a layer of none. Exactness is tested for each family."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from worker.engine.cache.kinds import KINDS, kind_of
from worker.engine.cache.pack import Pack

WINDOW = 4
EMPTY: dict[str, Callable[[], Any]] = {
    "KV": KVCache,
    "Rotating": lambda: RotatingKVCache(WINDOW),
    "Recurrent": lambda: ArraysCache(2),
}


def test_each_listed_kind_is_tested_here() -> None:
    assert [type(kind).__name__ for kind in KINDS] == [*EMPTY]


@pytest.mark.parametrize("name", EMPTY)
def test_a_layer_and_its_slots_are_of_one_kind(name: str) -> None:
    layer = EMPTY[name]()
    kind = kind_of(layer)
    slots = kind.slots(layer, max_draft=2)
    assert type(kind).__name__ == name
    assert kind_of(slots) is kind
    assert (slots.rows, slots.nbytes, slots.step_growth()) == (0, 0, 0)
    assert (slots.slot_rows is None) == (name == "Recurrent")


@pytest.mark.parametrize("name", EMPTY)
def test_rows_share_a_forward_in_a_layer_that_has_computed_nothing_yet(name: str) -> None:
    rows = [[EMPTY[name]()], [EMPTY[name]()]]
    (layer,) = Pack(rows, [0, 0], [3, 3]).layers
    assert layer.computed == []


@pytest.mark.parametrize("layer", [QuantizedKVCache(), RotatingKVCache(WINDOW, keep=1)], ids=["quantized", "keep"])
def test_a_layer_that_no_kind_holds_has_neither_slots_nor_packs(layer: Any) -> None:
    with pytest.raises(NotImplementedError, match=type(layer).__name__):
        kind_of(layer).slots(layer, 0)
    with pytest.raises(NotImplementedError, match=type(layer).__name__):
        Pack([[layer], [layer]], [0, 0], [1, 1])
    assert not kind_of(layer).sliceable


def test_layers_of_different_kinds_cannot_share_a_forward() -> None:
    with pytest.raises(NotImplementedError, match="KVCache, RotatingKVCache"):
        Pack([[KVCache()], [RotatingKVCache(WINDOW)]], [0, 0], [1, 1])


def test_a_ring_that_is_handed_over_keeps_the_order_of_its_tokens() -> None:
    """Token by token, a ring writes over its oldest token, wherever that is."""
    alone, lent = RotatingKVCache(WINDOW), RotatingKVCache(WINDOW)
    for number in range(1, 9):
        token = mx.full((1, 1, 1, 1), number)
        alone.update_and_fetch(token, token)
        other = RotatingKVCache(WINDOW)
        if number > 1:
            kind_of(lent).hand_over(lent, other)
        other.update_and_fetch(token, token)
        kind_of(lent).hand_over(other, lent)
    assert [ring._temporal_order(ring.keys).flatten().tolist() for ring in (alone, lent)] == [[5, 6, 7, 8]] * 2
