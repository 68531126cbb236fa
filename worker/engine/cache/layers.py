"""The layers of a cache, and all that a kind of them has to offer. `kinds.py` lists the kinds; each is one file."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from worker.engine.cache.slot_rows import SlotRows
from worker.engine.upstream.mlx_lm import CacheList


class SlotLayer(Protocol):
    """A layer of many rows, which join and leave in place. Models call it as one of mlx-lm's batches."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare room included."""

    @property
    def slot_rows(self) -> SlotRows | None:
        """Lengths and positions of the rows, which layers share; None if it counts no positions."""

    @property
    def state(self) -> Any:
        """The arrays, for evaluation."""

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row. They count only after `commit`."""

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Keep the first `counts[i]` >= 1 of the tokens of row i. `clear`: rows of which no value of the other tokens
        may stay in a buffer, since one is not finite."""

    def roll_back(self, clear: Collection[int] = ()) -> None:
        """Keep no token of the forward. `clear`: as for `commit`."""

    def extend(self, rows: Sequence[Any], positions: Sequence[int | None], ends: Sequence[int]) -> None:
        """Append rows, mlx-lm caches of one sequence each. `positions`: position of each row's next token, or None if
        it is the cache's offset. `ends`: the most tokens that each will have. If it fails, the rows stay as they
        were."""

    def growth(self, tokens: int) -> int:
        """Return the bytes of existing buffers that are copied when a row of `tokens` tokens joins."""

    def step_growth(self) -> int:
        """Return the bytes of existing buffers that are copied when each row is fed a token."""

    def tighten(self) -> None:
        """Free memory that the rows do not need. Blocks."""

    def moved(self, order: Sequence[int]) -> list[mx.array]:
        """Return copies of the rows that `filter` will write into another slot. Lazy."""

    def filter(self, order: Sequence[int], moved: Sequence[mx.array] | None = None) -> None:
        """Keep row `order[i]` as row i, and drop the others. `moved`: the result of the method of that name."""

    def extract(self, index: int) -> Any:
        """Return a copy of one row as an mlx-lm cache. Lazy."""

    def position(self, index: int) -> int | None:
        """Return the position of the row's next token; None if the layer counts none."""


class PackedLayer(Protocol):
    """A layer of several rows that share a forward. Models call it as an mlx-lm cache of one sequence."""

    @property
    def computed(self) -> list[mx.array]:
        """The arrays that a forward has added or replaced."""

    def unpack(self, index: int) -> None:
        """Add to one row's own layer what the forward has computed. Lazy."""


class LayerKind:
    """Differences between the kinds of layers; this class itself is the kind of those that are not listed, which a row
    can only be computed with alone. `layer` is an mlx-lm cache of one sequence, or one in slots."""

    classes: tuple[type, ...] = ()  # of mlx-lm and in slots, exactly: a subclass may keep other state
    sliceable = False  # it holds every token, so that prefixes share any range; others are cached as snapshots
    recurrent = False  # it holds states, which a model replaces whole at every step

    def slots(self, layer: Any, max_draft: int) -> SlotLayer:
        """Return an empty layer for many rows. `max_draft`: the most tokens that a forward feeds to a row beyond the
        first. Raises NotImplementedError if there is none."""
        raise NotImplementedError(f"{type(layer).__name__} has no batch that rows can join in place")

    def tried(self, layer: Any) -> Any:
        """Return a layer to try a forward of several tokens per row, as in slots, but lazily: only states are kept of
        it. `layer`: one of mlx-lm's, with several rows."""
        return _Uncommitted(layer)

    def packed(self, rows: Sequence[Any], tokens: Sequence[int], offset: int | mx.array) -> PackedLayer:
        """Return a layer with which rows share a forward of `tokens` tokens each. `offset`: position of the next token,
        as a number if it is the same for all rows. Raises NotImplementedError if there is none."""
        names = sorted({type(row).__name__ for row in rows})
        raise NotImplementedError(f"{', '.join(names)}: rows cannot be packed")

    def snapshot(self, layer: Any, index: int) -> Any:
        """Return a copy of row `index` as an mlx-lm cache without spare room. Lazy."""
        return copy.deepcopy(layer)

    def arrays(self, layer: Any) -> Sequence[mx.array | None]:
        """Return what the layer holds; None for what it does not hold yet."""
        return layer.keys, layer.values

    def fill(self, layer: Any, arrays: Sequence[mx.array], length: int) -> None:
        """Let an empty layer hold these arrays, of `length` tokens. Only for a sliceable kind."""
        raise NotImplementedError

    def hand_over(self, layer: Any, other: Any) -> None:
        """Let `other` hold the arrays of the layer. One of them is of another package, whose class has the same
        name."""
        other.keys, other.values = layer.keys, layer.values
        other.offset = layer.offset

    def window(self, layer: Any) -> int | None:
        """Return the most tokens that the layer holds; None is unlimited."""
        return None

    def name(self, layer: Any) -> str:
        """Return the name of the kind, for people."""
        if hasattr(layer, "chunk_size"):
            return "chunked"
        return "quantized" if hasattr(layer, "bits") else "unknown"


class _Uncommitted:
    """A layer of which nothing is kept: its buffers would be allocated."""

    slot_rows = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def begin(self, width: int) -> None:
        """Do nothing."""

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Do nothing."""

    def roll_back(self, clear: Collection[int] = ()) -> None:
        """Do nothing."""


def layers(cache: Iterable[Any]) -> Iterator[Any]:
    """Yield the layers of a cache in order; those inside nested lists (`CacheList`) take the place of the list."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from layers(layer.caches)
        else:
            yield layer


def mapped(change: Callable[[Any], Any], cache: Iterable[Any]) -> list[Any]:
    """Return a cache with what `change` returns for each layer, in order; nested lists (`CacheList`) stay lists."""
    return [
        CacheList(*mapped(change, layer.caches)) if isinstance(layer, CacheList) else change(layer) for layer in cache
    ]


def cannot_batch(cache: Iterable[Any]) -> list[str]:
    """Return the class names of the layers that cannot be merged into a shared batch, sorted. Decided by what a layer
    can do, not by its class."""
    return sorted({type(layer).__name__ for layer in layers(cache) if not hasattr(layer, "merge")})
