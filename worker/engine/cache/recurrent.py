"""Recurrent states, which a model replaces whole at every step: of the rows of a batch, of prompts that share a
forward, and how they advance by a part of a forward's tokens.

For the last, the advance is recorded during a forward of several tokens, so that afterwards each row can keep a number
of tokens of its own. `Replay`: the inputs of the recurrence, which are small, are recorded, and the recurrence alone
runs again over the kept ones. No weight is read again. For mlx-lm's `gated_delta_update` and `ssm_update`, and for
convolutions. mlx-lm's open pull request 1821 does the same. `Stepping`: each layer with a state is called once per
token, and the states after each token are recorded. For any other recurrence; reads the weights of these layers once
per token."""

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import LayerKind, PackedLayer, SlotLayer, layers
from worker.engine.upstream.hooks import replaced_recurrence, wrapped_calls
from worker.engine.upstream.mlx_lm import ArraysCache, make_prompt_cache

# Takes the number of tokens that each row keeps (rows,), and returns the state after them. Lazy.
Advance = Callable[[mx.array], mx.array]


class SlotArraysCache(ArraysCache):
    """Recurrent state of a batch. A model replaces it entirely at every step, so joining may copy all of it.

    States are values: those before a forward stay valid while it runs. So after a forward of several tokens, each state
    is advanced from the old one by the tokens that each row keeps. How is recorded during the forward, see
    `worker.engine.cache.recurrent`. If every row keeps all its tokens, the states after the forward are right."""

    slot_rows = None  # it counts no positions

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
        used. Raises ValueError, and changes nothing, if a model has replaced a state in a way that was not recorded, so
        that rows cannot keep a part of their tokens."""
        windows = self._windows()
        if min(counts) < self._width:
            self.cache = self._advanced(mx.array(list(counts)), windows)
        self._forget_forward()

    def _windows(self) -> list[int]:
        """Return the indices of the states that are windows of convolutions."""
        states = self._before or []
        windows = [i for i, state in enumerate(states) if state is not None and i not in self._advances]
        if len(windows) != len(self._convolved):
            raise ValueError(f"{len(windows)} states, {len(self._convolved)} convolutions were recorded")
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

    def position(self, index: int) -> None:
        """Return None: a state has no position."""

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
        raise ValueError(f"a convolution over {inputs.shape} has no state")

    def advance(kept: mx.array) -> mx.array:
        return mx.take_along_axis(inputs, (kept[:, None] + mx.arange(columns))[..., None], axis=1)

    return advance


class _PackedArraysCache(ArraysCache):
    """Recurrent states of several rows."""

    def __init__(self, rows: Sequence[Any], tokens: Sequence[int]) -> None:
        """`tokens`: number of tokens that each row computes. Raises ValueError if only some of the rows have a
        state."""
        super().__init__(len(rows[0].cache))
        if len(set(tokens)) > 1:
            self.lengths = mx.array([*tokens])  # by which some models ignore the padding
        self._rows = rows
        states = zip(*(row.cache for row in rows), strict=True)
        self.cache: list[mx.array | None] = [_concatenated(each) for each in states]

    @property
    def computed(self) -> list[mx.array]:
        """The states."""
        return [state for state in self.cache if state is not None]

    def unpack(self, index: int) -> None:
        """Replace the states of one row by those computed. Lazy."""
        for number, state in enumerate(self.cache):
            self._rows[index][number] = None if state is None else mx.contiguous(state[index : index + 1])


def _concatenated(states: Sequence[mx.array | None]) -> mx.array | None:
    present = [state for state in states if state is not None]
    if present and len(present) < len(states):
        raise ValueError("Rows with and without a recurrent state cannot be packed.")
    return mx.concatenate(present) if present else None


class Recurrence:
    """Way to advance recurrent states by a part of a forward's tokens. This class itself is that of models without
    states."""

    @contextmanager
    def recording(self, cache: Sequence[Any]) -> Iterator[None]:
        """Record, while the context is open and a forward builds its graph, how the states of the cache advance."""
        yield

    def held_states(self, width: int) -> int:
        """Return the number of states of a row that exist until a forward of `width` tokens is committed."""
        return 1


class Replay(Recurrence):
    """Runs the recurrences again over the kept tokens."""

    def __init__(self, network: nn.Module) -> None:
        """Find the modules that may call recurrences: those that define the layers of the network."""
        self._modules = {type(each).__module__ for each in network.modules()}

    @contextmanager
    def recording(self, cache: Sequence[Any]) -> Iterator[None]:
        """Record the inputs of recurrences and convolutions."""
        states = _Recorder([layer for layer in layers(cache) if isinstance(layer, SlotArraysCache)])
        with states.observed(), replaced_recurrence(self._modules, states.gated_delta, states.ssm, states.convolve):
            yield

    def held_states(self, width: int) -> int:
        """Return those before and after the forward, and those after each token if the model uses `ssm_update`."""
        stepped = any(hasattr(sys.modules[name], "ssm_update") for name in self._modules)
        return width + 2 if stepped else 2


class _Recorder:
    """Replacements of the recurrences during one forward."""

    def __init__(self, caches: Sequence[SlotArraysCache]) -> None:
        self._caches = caches
        self._used: SlotArraysCache | None = None  # the last cache that the model has read or written

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Note which cache is in use while the context is open."""
        for each in self._caches:
            each.observe_use(partial(self._use, each))
        try:
            yield
        finally:
            for each in self._caches:
                each.observe_use(None)

    def _use(self, cache: SlotArraysCache) -> None:
        self._used = cache

    def _record(self, state: mx.array | None, advance: Advance) -> None:
        for cache in self._caches:
            if (index := cache.index_before(state)) is not None:
                cache.record(index, advance)
                return
        raise ValueError("a recurrence over a state of no cache")

    def convolve(self, inputs: mx.array) -> None:
        """Record a convolution's inputs for the cache in use."""
        if self._used:
            self._used.record_convolution(inputs)

    def gated_delta(
        self,
        original: Callable[..., tuple[mx.array, mx.array]],
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        **options: Any,
    ) -> tuple[mx.array, mx.array]:
        """Call `gated_delta_update`, and record it."""

        def advance(kept: mx.array) -> mx.array:
            live = mx.arange(q.shape[1]) < kept[:, None]
            return original(q, k, v, a, b, A_log, dt_bias, state, live, **options)[1]

        self._record(state, advance)
        return original(q, k, v, a, b, A_log, dt_bias, state, mask, **options)

    def ssm(
        self,
        original: Callable[..., tuple[mx.array, mx.array]],
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Call `ssm_update` token by token, as decoding does, since several tokens round differently; and record it."""
        outputs, states = list[mx.array](), list[mx.array]()
        for t in range(x.shape[1]):
            at, last = slice(t, t + 1), states[-1] if states else state
            output, new = original(x[:, at], A_log, B[:, at], C[:, at], D, dt[:, at], dt_bias, last, time_step_limit)
            outputs.append(output)
            states.append(new)
        self._record(state, partial(_chosen, states))
        return mx.concatenate(outputs, axis=1), states[-1]


class Stepping(Recurrence):
    """Calls each layer with a state once per token."""

    def __init__(self, network: nn.Module) -> None:
        """Find the innermost classes that are called with a state. Lazy: computes nothing."""
        self._kinds = _recurrent_kinds(network)

    @contextmanager
    def recording(self, cache: Sequence[Any]) -> Iterator[None]:
        """Record the states after each token."""
        with wrapped_calls(self._kinds, _stepped):
            yield

    def held_states(self, width: int) -> int:
        """Return those before and after the forward, and those after each token."""
        return width + 2


def _stepped(call: Callable[..., Any], module: nn.Module, *given: Any, **named: Any) -> Any:
    """Call a layer once per token if it is given states; its other arguments are cut by token as its input is."""
    arguments = [*given, *named.values()]
    states = next((each for each in arguments if isinstance(each, SlotArraysCache)), None)
    x = next((each for each in arguments if isinstance(each, mx.array) and each.ndim == 3), None)
    if states is None or x is None or x.shape[1] == 1:
        return call(module, *given, **named)

    def part(value: Any, t: int) -> Any:
        by_token = isinstance(value, mx.array) and value.ndim >= 2 and value.shape[:2] == x.shape[:2]
        return value[:, t : t + 1] if by_token else value

    outputs, after = list[Any](), list[dict[int, mx.array]]()
    for t in range(x.shape[1]):
        before = list(states.cache)
        cut, cut_named = [part(each, t) for each in given], {name: part(each, t) for name, each in named.items()}
        outputs.append(call(module, *cut, **cut_named))
        new = enumerate(zip(states.cache, before, strict=True))
        after.append({i: state for i, (state, old) in new if state is not old and state is not None})
    for index in after[0]:
        states.record(index, partial(_chosen, [each[index] for each in after]))
    if isinstance(outputs[0], tuple):
        return tuple(mx.concatenate(list(each), axis=1) for each in zip(*outputs, strict=True))
    return mx.concatenate(outputs, axis=1)


def _chosen(states: Sequence[mx.array], kept: mx.array) -> mx.array:
    """Return for each row the state after the last token that it keeps. `states`: after each token."""
    chosen = states[0]
    for t, state in enumerate(states[1:], 1):
        chosen = mx.where((t < kept).reshape(-1, *[1] * (state.ndim - 1)), state, chosen)
    return chosen


def _recurrent_kinds(network: nn.Module) -> list[type[nn.Module]]:
    """Return the innermost classes of layers that are called with an `ArraysCache`."""
    found, deeper = dict[type[nn.Module], None](), list[bool]()

    def observe(call: Callable[..., Any], module: nn.Module, *given: Any, **named: Any) -> Any:
        has_states = any(isinstance(each, ArraysCache) for each in (*given, *named.values()))
        deeper.append(False)
        output = call(module, *given, **named)
        inner = deeper.pop()
        if has_states and not inner:
            found[type(module)] = None
        if deeper and (has_states or inner):
            deeper[-1] = True
        return output

    kinds = [type(each) for each in network.modules() if not type(each).__module__.startswith("mlx.")]
    with wrapped_calls(kinds, observe):
        network(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(network))
    return [*found]


class Recurrent(LayerKind):
    """Recurrent states."""

    classes = ArraysCache, SlotArraysCache
    recurrent = True

    def slots(self, layer: Any, max_draft: int) -> SlotLayer:
        """Return an empty layer for many rows."""
        return SlotArraysCache(len(layer.cache))

    def tried(self, layer: Any) -> Any:
        """Return a layer in slots with the same states."""
        states = SlotArraysCache(len(layer.cache))
        states.cache = list(layer.cache)
        return states

    def packed(self, rows: Sequence[Any], tokens: Sequence[int], offset: int | mx.array) -> PackedLayer:
        """Return a layer with which rows share a forward. Raises ValueError if only some of the rows have a state."""
        return _PackedArraysCache(rows, tokens)

    def snapshot(self, layer: Any, index: int) -> Any:
        """Return a copy of one row's states."""
        if isinstance(layer, SlotArraysCache):
            return layer.extract(index)
        copied = copy.deepcopy(layer)
        copied.cache = [None if state is None else mx.contiguous(state) for state in copied.cache]
        return copied

    def arrays(self, layer: Any) -> Sequence[mx.array | None]:
        """Return the states."""
        states: list[mx.array | None] = layer.cache
        return states

    def hand_over(self, layer: Any, other: Any) -> None:
        """Let `other` hold the states."""
        other.cache = list(layer.cache)

    def name(self, layer: Any) -> str:
        """Return the name of the kind, for people."""
        return "recurrent"
