"""The layers of a cache, and all that a kind of them has to offer. `kinds.py` lists the kinds; each is one file."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx

from worker.engine.upstream.mlx_lm import CacheList


class SlotRows:
    """Rows as they were when one last joined or left. Each has been fed `steps` tokens since, a number that every layer
    counts for itself. Layers with equal rows share one object, so a forward computes each of its arrays only once."""

    def __init__(self, lengths: Sequence[int], positions: Sequence[int], ends: Sequence[int]) -> None:
        """`lengths`: tokens in each row's slot. `positions`: of each row's next token. `ends`: the most tokens that
        each row will have."""
        self.lengths = tuple(lengths)
        self.positions = tuple(positions)
        self.ends = tuple(ends)
        self.longest, self.last_end = max(self.lengths, default=0), max(self.ends, default=0)
        self.equal_lengths = len(set(self.lengths)) <= 1
        self._steps: int | None = None  # after which the arrays below are right
        self._next = self._offset = mx.array(0)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """A value that equal rows have in common."""
        return self.lengths, self.positions, self.ends

    @cached_property
    def slots(self) -> mx.array:
        """Indices of the rows (rows,)."""
        return mx.array([*range(len(self))], dtype=mx.int32)

    @cached_property
    def _arrays(self) -> tuple[mx.array, mx.array]:
        return mx.array([*self.lengths], dtype=mx.int32), mx.array([*self.positions], dtype=mx.int32)

    def next_indices(self, steps: int) -> mx.array:
        """Return the index of each row's next token (rows,), after so many steps. Lazy."""
        self._advance(steps)
        return self._next

    def next_positions(self, steps: int) -> mx.array:
        """Return the position of each row's next token (rows,), after so many steps. Lazy."""
        self._advance(steps)
        return self._offset

    def _advance(self, steps: int) -> None:
        if steps == self._steps:
            return
        # From evaluated arrays: adding to the last sum would grow an endless graph in models that never read it.
        lengths, positions = self._arrays
        self._next = lengths + steps
        self._offset = self._next if self.lengths == self.positions else positions + steps
        self._steps = steps


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


def share_rows(slot_layers: Iterable[Any]) -> None:
    """Let layers in slots share their rows with those that have equal ones."""
    known = dict[tuple[tuple[int, ...], ...], SlotRows]()
    for layer in slot_layers:
        if layer.slot_rows is not None:
            layer.slot_rows = known.setdefault(layer.slot_rows.key, layer.slot_rows)
