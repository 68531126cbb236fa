"""Batched caches whose rows join and leave in place: a new row is written into its slot, and no other row is copied.

    batch = batch_of(make_prompt_cache(network))      # no rows yet
    join(batch, row)                                  # a prompt that was prefilled alone
    logits = network(tokens[:, None], cache=batch)    # one token for each row
    select_rows(batch, compact_order(rows, {3}))      # row 3 leaves, and the last row takes its slot

Callers that hold other data by row keep it in the same order: `select_rows` takes that order, and `join` appends."""

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.cache.kinds import kind_of
from worker.engine.cache.layers import SlotLayer, layers, mapped, share_rows
from worker.engine.memory import UNLIMITED_TOKENS


@dataclass(frozen=True, slots=True)
class RowCache:
    """One row outside a batch: mlx-lm caches of one sequence, which must not be used once it has joined a batch."""

    cache: Sequence[Any]
    position: int | None = None  # of its next token; None: by the cache's own offset, if a layer counts positions
    end: int = UNLIMITED_TOKENS  # the most tokens that it will have in a batch

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return bytes_of(self.cache)


def batch_of(row: Sequence[Any], position: int | None = None, end: int = UNLIMITED_TOKENS) -> list[Any]:
    """Return batched caches for rows of this layout, with `row` as the first row if it holds tokens (it must not be
    used afterwards). Raises NotImplementedError if a layer has no slot variant."""
    batch = empty_batch_of(row)
    if _has_tokens(row):
        join(batch, row, position, end)
    return batch


def empty_batch_of(row: Sequence[Any], max_draft: int = 0) -> list[Any]:
    """Return batched caches without rows, for rows of this layout. `max_draft`: the most tokens that a forward feeds to
    a row beyond the first. Raises NotImplementedError as `batch_of` does."""
    return mapped(lambda layer: kind_of(layer).slots(layer, max_draft), row)


def join(batch: Sequence[Any], row: Sequence[Any], position: int | None = None, end: int = UNLIMITED_TOKENS) -> None:
    """Append a single row to the batch, as `join_all` does."""
    join_all(batch, [RowCache(row, position, end)])


def join_all(batch: Sequence[Any], rows: Sequence[RowCache]) -> None:
    """Append rows to the batch. Buffers grow at most once, so this is faster than one row after the other. Blocks. If
    anything fails, the batch stays as it was.

    Raises ValueError for a row without tokens: for some models an absent state differs from a state of zeros."""
    if not all(_has_tokens(row.cache) for row in rows):
        raise ValueError("A row can join only after it has computed a token.")
    # Errors of a row must surface before the batch is changed, and a batch that a running step still reads would be
    # copied instead of written in place.
    materialize([*(layer for row in rows for layer in row.cache), *batch])
    positions, ends = [row.position for row in rows], [row.end for row in rows]
    with ExitStack() as undo:
        for batched, *joining in zip(layers(batch), *(layers(row.cache) for row in rows), strict=True):
            undo.callback(batched.filter, range(batched.rows))
            batched.extend(joining, positions, ends)
        materialize(batch)
        undo.pop_all()
    _share_rows(batch)


def _has_tokens(row: Sequence[Any]) -> bool:
    return any(not layer.empty() for layer in layers(row))


def tighten(batch: Sequence[Any]) -> None:
    """Free memory that buffers still occupy after rows have left. The usual padding stays. Blocks."""
    for layer in layers(batch):
        layer.tighten()


def growth(batch: Sequence[Any], tokens: int) -> int:
    """Return the bytes of existing buffers that are reallocated and copied when a row of `tokens` tokens joins."""
    return sum(layer.growth(tokens) for layer in layers(batch))


def step_growth(batch: Sequence[Any]) -> int:
    """Return the bytes of existing buffers that are reallocated and copied when each row is fed a token."""
    return sum(layer.step_growth() for layer in layers(batch))


def select_rows(batch: Sequence[Any], order: Sequence[int]) -> None:
    """Keep row `order[i]` as row i, and drop the others. Blocks until the rows that change their slot are copied. At no
    time do the copies take more memory than the buffers of the largest layer, as when these grow. If it raises, the
    batch must not be used any more."""
    moving = list[tuple[Any, list[mx.array]]]()
    copied, most = 0, max((layer.nbytes for layer in layers(batch)), default=0)
    for layer in layers(batch):
        moved = layer.moved(order)
        nbytes = sum(rows.nbytes for rows in moved)
        if moving and copied + nbytes > most:
            _move(moving, order)
            mx.eval([each.state for each, _ in moving])  # frees the copies
            moving, copied = [], 0
        moving.append((layer, moved))
        copied += nbytes
    _move(moving, order)
    _share_rows(batch)


def _move(moving: Sequence[tuple[Any, list[mx.array]]], order: Sequence[int]) -> None:
    """Let each of these layers keep the rows of `order`. Blocks until `moving`, their copies, are computed."""
    mx.eval([moved for _, moved in moving])
    for layer, moved in moving:
        layer.filter(order, moved)


def _share_rows(batch: Sequence[Any]) -> None:
    """Let layers with equal rows compute the arrays of these once in each forward."""
    share_rows(layers(batch))


def compact_order(rows: int, leaving: Collection[int]) -> list[int]:
    """Return the order for `select_rows` that drops the `leaving` rows: the last rows fill the gaps, so as few as
    possible are copied."""
    staying = rows - len(leaving)
    movers = [index for index in range(staying, rows) if index not in leaving]
    return [movers.pop() if index in leaving else index for index in range(staying)]


def snapshot(batch: Sequence[Any], index: int) -> RowCache:
    """Return a copy of one row of the batch, which owns its memory. Blocks."""
    row = [layer.extract(index) for layer in batch]
    materialize(row)
    positions = (layer.position(index) for layer in layers(batch))
    return RowCache(row, next((position for position in positions if position is not None), None))


def restore(row: RowCache) -> list[Any]:
    """Return caches to compute on, or to join with `row.position`. They share memory with the row's until they are
    written."""
    return copy.deepcopy([*row.cache])


def materialize(cache: Sequence[Any]) -> None:
    """Evaluate all pending arrays of the cache. Blocks."""
    mx.eval([layer.state for layer in layers(cache)])


def bytes_of(cache: Sequence[Any]) -> int:
    """Return the allocated bytes of a cache, spare room included."""
    return sum(layer.nbytes for layer in layers(cache))


class Verification:
    """One forward of several tokens per row."""

    def __init__(self, cache: Sequence[Any]) -> None:
        self._layers: list[SlotLayer] = list(layers(cache))
        self._open = True

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row."""
        for layer in self._layers:
            layer.begin(width)

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Keep the first `counts[i]` of the tokens of row i, in all layers. Lazy. `clear`: see `SlotLayer`."""
        for layer in self._layers:
            layer.commit(counts, clear)
        share_rows(self._layers)
        self._open = False

    def discard(self, clear: Collection[int] = ()) -> None:
        """Keep no token of the forward. `clear`: see `SlotLayer`."""
        for layer in self._layers:
            layer.roll_back(clear)
        self._open = False

    def end(self) -> None:
        """Keep no token of the forward unless `commit` has succeeded."""
        if self._open:
            self.discard()


@contextmanager
def verification(cache: Sequence[Any], width: int) -> Iterator[Verification]:
    """Let the forward in the body feed `width` tokens to each row of the batch, and the body then commit. Without a
    commit, lengths and states stay as they were."""
    verifying = Verification(cache)
    try:
        verifying.begin(width)
        yield verifying
    finally:
        verifying.end()
