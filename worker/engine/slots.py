"""Batches whose rows join and leave in place: a newcomer is written into its slot, and nobody else is copied.

    batch = batch_of(make_prompt_cache(network))    # no rows yet
    join(batch, row)                                # a prompt that was computed alone
    logits = network(tokens[:, None], cache=batch)  # a token for each row
    keep(batch, without(rows, {3}))                 # the row at place 3 leaves, and the last one takes its place

Whoever keeps other things by row, keeps them in the same order: `keep` tells it, and newcomers are last.
"""

import copy
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.cache import layers
from worker.engine.slots_kv import SlotKVCache, SlotRotatingKVCache
from worker.engine.upstream import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)


class SlotArraysCache(ArraysCache):
    """Recurrent state. A model replaces it whole at every step, so joining may copy it whole too."""

    def __init__(self, size: int) -> None:
        self.cache: list[mx.array | None]
        super().__init__(size)
        self.rows = 0

    def extend(self, other: ArraysCache, position: int | None = None) -> None:
        """Takes one row. A failure leaves the rows as they were."""
        joined = [_concatenate(ours, theirs) for ours, theirs in zip(self.cache, other.cache, strict=True)]
        mx.eval(joined)
        self.cache, self.rows = joined, self.rows + 1

    def growth(self, tokens: int) -> int:
        """Bytes that are copied when a row joins."""
        return sum(state.nbytes for state in self.cache if state is not None)

    def moved(self, places: Sequence[int]) -> list[mx.array]:
        """None: a state is replaced, and not written into."""
        return []

    def filter(self, places: Sequence[int], moved: Sequence[mx.array] | None = None) -> None:
        taken = mx.array(list(places), dtype=mx.int32)
        self.cache = [None if state is None or not len(places) else state[taken] for state in self.cache]
        self.rows = len(places)

    def extract(self, place: int) -> ArraysCache:
        row = ArraysCache(len(self.cache))
        row.cache = [None if state is None else mx.contiguous(state[place : place + 1]) for state in self.cache]
        return row


def _concatenate(rows: mx.array | None, row: mx.array | None) -> mx.array | None:
    return row if rows is None or row is None else mx.concatenate([rows, row])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row that waits outside. It owns its memory."""

    row: list[Any]
    position: int | None  # of the next token; None in a model that knows no positions

    @property
    def nbytes(self) -> int:
        return bytes_of(self.row)


def batch_of(row: Sequence[Any], position: int | None = None) -> list[Any]:
    """A batch for such rows, and in it this one if it has begun. Raises NotImplementedError for layers that cannot."""
    batch = [_slots_for(layer) for layer in row]
    if _begun(row):
        join(batch, row, position)
    return batch


def _slots_for(layer: Any) -> Any:
    """By what exactly the layer is: a subclass may keep things that a slot would not."""
    kind = type(layer)
    if kind is CacheList:
        return CacheList(*map(_slots_for, layer.caches))
    if kind is ArraysCache:
        return SlotArraysCache(len(layer.cache))
    if kind in (KVCache, BatchKVCache):
        return SlotKVCache()
    if kind is BatchRotatingKVCache or (kind is RotatingKVCache and layer.keep == 0):
        return SlotRotatingKVCache(layer.max_size)
    raise NotImplementedError(f"{kind.__name__} has no batch that rows can join in place")


def join(batch: Sequence[Any], row: Sequence[Any], position: int | None = None) -> None:
    """Writes the row, upstream's caches of one, behind the last of the batch, and spends it. `position` of its next
    token, where that is not what the row's own offset says. Whatever fails, the batch stays as it was.

    Raises ValueError for a row that has not computed a token yet: to some models no state is not a state of zeros."""
    if not _begun(row):
        raise ValueError("A row can join once it has computed a token.")
    # What is wrong with the row shall show before the batch is touched, and a batch that a step under way still reads
    # would not be written in place.
    settle([*row, *batch])
    with ExitStack() as undo:
        for ours, theirs in zip(layers(batch), layers(row), strict=True):
            undo.callback(ours.filter, range(ours.rows))
            ours.extend(theirs, position)
        settle(batch)
        undo.pop_all()


def _begun(row: Sequence[Any]) -> bool:
    return any(not layer.empty() for layer in layers(row))


def growth(batch: Sequence[Any], tokens: int) -> int:
    """Bytes of the buffers that are made anew when a row of that length joins, and filled from those that there are."""
    return sum(layer.growth(tokens) for layer in layers(batch))


def keep(batch: Sequence[Any], places: Sequence[int]) -> None:
    """Row i is from now on the one that was at places[i]; the others are forgotten."""
    leaves = list(layers(batch))
    moved = [layer.moved(places) for layer in leaves]
    mx.eval(moved)
    for layer, rows in zip(leaves, moved, strict=True):
        layer.filter(places, rows)


def without(rows: int, leaving: Collection[int]) -> list[int]:
    """The places to keep when some leave: the last rows fill the gaps, so that as few as possible move."""
    staying = rows - len(leaving)
    movers = [place for place in range(staying, rows) if place not in leaving]
    return [movers.pop() if place in leaving else place for place in range(staying)]


def snapshot(batch: Sequence[Any], place: int) -> Snapshot:
    row = [layer.extract(place) for layer in batch]
    settle(row)
    positions = (layer.position(place) for layer in layers(batch) if isinstance(layer, SlotKVCache))
    return Snapshot(row, next(positions, None))


def restore(kept: Snapshot) -> list[Any]:
    """A row to compute on or to join with `kept.position`. It shares memory with the snapshot until it is written."""
    return copy.deepcopy(kept.row)


def settle(cache: Sequence[Any]) -> None:
    """Computes what is pending."""
    mx.eval([layer.state for layer in layers(cache)])


def bytes_of(cache: Sequence[Any]) -> int:
    """Allocated, room to spare included."""
    return sum(layer.nbytes for layer in layers(cache))
