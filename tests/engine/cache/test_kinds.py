"""What every kind of cache offers, and what becomes of a layer of none. Exactness is tested for each family."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from worker.engine.cache.kinds import KINDS, kind_of
from worker.engine.cache.layers import mapped
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


@pytest.mark.parametrize("name", EMPTY)
def test_only_the_states_of_a_layer_are_kept_when_drafts_are_tried(name: str) -> None:
    kind = kind_of(EMPTY[name]())
    tried = kind.tried(EMPTY[name]())
    assert (kind_of(tried) is kind) == kind.recurrent == (name == "Recurrent")
    tried.begin(2)
    tried.commit([1, 2])
    assert tried.slot_rows is None
    assert tried.empty()


def test_nested_lists_stay_when_each_layer_is_replaced() -> None:
    one, *others = mapped(type, [KVCache(), CacheList(ArraysCache(2), CacheList(KVCache()))])
    assert one is KVCache
    assert (others[0].caches[0], others[0].caches[1].caches) == (ArraysCache, (KVCache,))


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
