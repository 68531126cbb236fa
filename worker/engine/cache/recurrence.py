"""Record during a forward of several tokens how recurrent states are advanced, so that afterwards each row can keep a
number of tokens of its own.

`Replay`: the inputs of the recurrence, which are small, are recorded, and the recurrence alone runs again over the kept
ones. No weight is read again. For mlx-lm's `gated_delta_update` and `ssm_update`, and for convolutions. mlx-lm's open
pull request 1821 does the same.

`Stepping`: each layer with a state is called once per token, and the states after each token are recorded. For any
other recurrence; reads the weights of these layers once per token."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.cache.slot_arrays import Advance, SlotArraysCache, UnknownRecurrence
from worker.engine.upstream.hooks import replaced_recurrence, wrapped_calls
from worker.engine.upstream.mlx_lm import ArraysCache, make_prompt_cache


class Recurrence(Protocol):
    """Way to advance recurrent states by a part of a forward's tokens."""

    def recording(self, cache: Sequence[Any]) -> AbstractContextManager[None]:
        """Record, while the context is open and a forward builds its graph, how the states of the cache advance."""

    def held_states(self, width: int) -> int:
        """Return the number of states of a row that exist until a forward of `width` tokens is committed."""


class NoRecurrence:
    """For models without recurrent states."""

    @contextmanager
    def recording(self, cache: Sequence[Any]) -> Iterator[None]:
        """Record nothing."""
        yield

    def held_states(self, width: int) -> int:
        """Return 1: there are none to keep."""
        return 1


class Replay:
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
        raise UnknownRecurrence("a recurrence over a state of no cache")

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


class Stepping:
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
