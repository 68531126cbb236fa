"""Recurrent states of many rows."""

from collections.abc import Callable, Collection, Iterable, Sequence

import mlx.core as mx

from worker.engine.upstream.mlx_lm import ArraysCache

# Takes the number of tokens that each row keeps (rows,), and returns the state after them. Lazy.
Advance = Callable[[mx.array], mx.array]


class UnknownRecurrence(Exception):
    """A model has replaced a state in a way that was not recorded, so rows cannot keep a part of their tokens."""


class SlotArraysCache(ArraysCache):
    """Recurrent state of a batch. A model replaces it entirely at every step, so joining may copy all of it.

    States are values: those before a forward stay valid while it runs. So after a forward of several tokens, each state
    is advanced from the old one by the tokens that each row keeps. How is recorded during the forward, see
    `worker.engine.cache.recurrence`. If every row keeps all its tokens, the states after the forward are right."""

    def __init__(self, size: int) -> None:
        self.cache: list[mx.array | None]
        super().__init__(size)
        self.rows = 0
        self._before: list[mx.array | None] | None = None  # the states before the forward that verifies drafts
        self._width = 0  # tokens per row of that forward
        self._advances: dict[int, Advance] = {}  # by the index of the state
        self._convolved: list[mx.array] = []  # inputs of convolutions, in the order of the calls
        self._on_use: Callable[[], None] | None = None

    # Called by a model

    def __getitem__(self, index: int) -> mx.array | None:
        if self._on_use:
            self._on_use()
        return self.cache[index]

    def __setitem__(self, index: int, state: mx.array | None) -> None:
        if self._on_use:
            self._on_use()
        self.cache[index] = state

    # Several tokens, of which each row keeps some

    def begin(self, width: int) -> None:
        """Let the next forward feed several tokens to each row. They count only after `commit`."""
        self._before, self._width = list(self.cache), width
        self._advances, self._convolved = {}, []

    def observe_use(self, on_use: Callable[[], None] | None) -> None:
        """Call `on_use` whenever a model reads or replaces a state; None ends that."""
        self._on_use = on_use

    def index_before(self, state: mx.array | None) -> int | None:
        """Return the index of a state from before the forward, or None if it is no state of this cache."""
        states = self._before or []
        return next((index for index, own in enumerate(states) if own is not None and own is state), None)

    def record(self, index: int, advance: Advance) -> None:
        """Record how a state is advanced."""
        self._advances[index] = advance

    def record_convolution(self, inputs: mx.array) -> None:
        """Record the input of a convolution (rows, window + tokens, channels): a state is its window, which moves on by
        a column for each token. Convolutions belong, in order, to the states that `record` does not name."""
        self._convolved.append(inputs)

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Advance the states of row i by the first `counts[i]` of the tokens that were fed to it. Lazy. `clear` is not
        used. Raises `UnknownRecurrence`, and changes nothing, if a state was not recorded."""
        windows = self._windows()
        if min(counts) < self._width:
            self.cache = self._advanced(mx.array(list(counts)), windows)
        self._forget_forward()

    def _windows(self) -> list[int]:
        """Return the indices of the states that are windows of convolutions."""
        states = self._before or []
        windows = [i for i, state in enumerate(states) if state is not None and i not in self._advances]
        if len(windows) != len(self._convolved):
            raise UnknownRecurrence(f"{len(windows)} states, {len(self._convolved)} convolutions were recorded")
        return windows

    def _advanced(self, kept: mx.array, windows: Sequence[int]) -> list[mx.array | None]:
        states = self._before or []
        convolved = dict(zip(windows, self._convolved, strict=True))
        advances = {**self._advances, **{i: _window_after(states[i], inputs) for i, inputs in convolved.items()}}
        return [advances[i](kept) if i in advances else None for i in range(len(states))]

    def roll_back(self, clear: Collection[int] = ()) -> None:
        """Return to the states before the forward. `clear` is not used."""
        if self._before is not None:
            self.cache = self._before
        self._forget_forward()

    def _forget_forward(self) -> None:
        self._before = None
        self._advances, self._convolved = {}, []

    # Rows join and leave

    def extend(self, rows: Sequence[ArraysCache], positions: Sequence[int | None], ends: Sequence[int]) -> None:
        """Append rows, mlx-lm caches of one sequence each. `positions` and `ends` are not used. Blocks; if it fails,
        the rows stay as they were."""
        joined = [_concatenate(states) for states in zip(self.cache, *(row.cache for row in rows), strict=True)]
        mx.eval(joined)
        self.cache, self.rows = joined, self.rows + len(rows)

    def growth(self, tokens: int) -> int:
        """Return the bytes copied when a row joins: the whole state."""
        return sum(state.nbytes for state in self.cache if state is not None)

    def step_growth(self) -> int:
        """Return 0: a state does not grow."""
        return 0

    def tighten(self) -> None:
        """Do nothing: a state has no spare room."""

    def moved(self, order: Sequence[int]) -> list[mx.array]:
        """Return no arrays: a state is replaced, not written into."""
        return []

    def filter(self, order: Sequence[int], moved: Sequence[mx.array] | None = None) -> None:
        """Keep row `order[i]` as row i, and drop the others. Lazy. `moved` is not used."""
        indices = mx.array(list(order), dtype=mx.int32)
        self.cache = [None if state is None or not len(order) else state[indices] for state in self.cache]
        self.rows = len(order)

    def extract(self, index: int) -> ArraysCache:
        """Return a copy of one row as an mlx-lm cache. Lazy: it references the whole batch until it is evaluated."""
        row = ArraysCache(len(self.cache))
        row.cache = [None if state is None else mx.contiguous(state[index : index + 1]) for state in self.cache]
        return row


def _concatenate(states: Iterable[mx.array | None]) -> mx.array | None:
    present = [state for state in states if state is not None]
    return mx.concatenate(present) if present else None


def _window_after(state: mx.array | None, inputs: mx.array) -> Advance:
    """Return how a convolution's window (rows, columns, channels) moves on over its inputs."""
    columns, channels = (0, 0) if state is None else state.shape[1:]
    if state is None or inputs.shape[0] != state.shape[0] or inputs.shape[2] != channels:
        raise UnknownRecurrence(f"a convolution over {inputs.shape} has no state")

    def advance(kept: mx.array) -> mx.array:
        return mx.take_along_axis(inputs, (kept[:, None] + mx.arange(columns))[..., None], axis=1)

    return advance
