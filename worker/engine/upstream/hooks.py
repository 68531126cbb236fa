"""Replacements of upstream functions while the graph of one forward is built: MLX's rope and attention, recurrences and
convolutions, the layers of a model and those of an encoder.

Models read these names at each call, so one replacement serves all families. A name of a module is replaced in the
whole process; other threads that call it meanwhile get the original. `tests/engine/upstream/test_hooks.py` checks that
the models still call what is replaced here. Written against mlx 0.32.4."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_held = threading.Lock()  # by the hook that is open


class UnsupportedRope(Exception):
    """A model called MLX's rope with something other than the positions of a row's next tokens."""


@contextmanager
def _replaced(owner: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Set the attribute to `replace(original)` while the context is open, and restore the original however it closes.
    Raises RuntimeError while any other hook is open, in this thread or another."""
    with _alone(name):
        original = getattr(owner, name)
        setattr(owner, name, replace(original))
        try:
            yield
        finally:
            setattr(owner, name, original)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    if not _held.acquire(blocking=False):
        raise RuntimeError(f"{name}: another upstream name is replaced at this moment; open one hook at a time.")
    try:
        yield
    finally:
        _held.release()


@contextmanager
def _wrapped(owners: Iterable[tuple[Any, str]], wrap: Callable[..., Any]) -> Iterator[None]:
    """Replace these attributes by functions that call `wrap(original, *arguments)` in this thread. The lock of the
    hooks must be held."""
    with ExitStack() as stack:
        for owner, name in owners:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _for_this_thread(partial(wrap, original), original))
        yield


def _for_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def call(*given: Any, **named: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*given, **named)

    return call


@contextmanager
def rope_at(positions: list[int], first: int) -> Iterator[None]:
    """Replace MLX's rope by one that rotates by `positions` when it is called for the tokens from index `first` on. It
    raises `UnsupportedRope` when it is called for anything else. Only while the graph of one forward is built; the
    graph keeps its positions."""

    def replace(rope: Callable[..., mx.array]) -> Callable[..., mx.array]:
        at = mx.array(positions)

        def rope_at_positions(a: mx.array, dims: int, *, offset: Any, **named: Any) -> mx.array:
            if int(offset) != first or a.shape[0] != 1 or a.shape[-2] != len(positions):
                raise UnsupportedRope(
                    f"{a.shape} at {offset} are not the {len(positions)} tokens of a row from {first} on"
                )
            # Rope takes one position per row, so each token becomes a row.
            return rope(a.swapaxes(0, -2), dims, offset=at, **named).swapaxes(0, -2)

        return _for_this_thread(rope_at_positions, rope)

    with _replaced(mx.fast, "rope", replace):
        yield


@contextmanager
def observed_attention(observe: Callable[..., object]) -> Iterator[None]:
    """Call `observe` with the arguments of each call of MLX's attention, before the call. The results are unchanged."""

    def replace(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def observed(*given: Any, **named: Any) -> mx.array:
            observe(*given, **named)
            return attend(*given, **named)

        return _for_this_thread(observed, attend)

    with _replaced(mx.fast, "scaled_dot_product_attention", replace):
        yield


@contextmanager
def recorded_layers(encoder: Any, name: str, outputs: list[mx.array]) -> Iterator[None]:
    """Append the output of each of the encoder's layers to `outputs` while the context is open. `name`: the encoder's
    attribute that holds the layers."""

    def recording(layer: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*given: Any, **named: Any) -> mx.array:
            outputs.append(layer(*given, **named))
            return outputs[-1]

        return call

    def replace(layers: Iterable[Callable[..., mx.array]]) -> list[Callable[..., mx.array]]:
        return [recording(layer) for layer in layers]

    with _replaced(encoder, name, replace):
        yield


@contextmanager
def replaced_recurrence(
    modules: Iterable[str],
    gated_delta: Callable[..., Any],
    ssm: Callable[..., Any],
    convolve: Callable[[mx.array], object],
) -> Iterator[None]:
    """Call `gated_delta(original, ...)` and `ssm(original, ...)` in place of the functions `gated_delta_update` and
    `ssm_update` that these modules, given by name, have imported or define; and `convolve` with the input of each
    `nn.Conv1d` before its call."""
    loaded = [sys.modules[name] for name in modules]

    def users(name: str) -> list[tuple[Any, str]]:
        return [(module, name) for module in loaded if hasattr(module, name)]

    def convolving(call: Callable[..., mx.array], conv: nn.Conv1d, x: mx.array) -> mx.array:
        convolve(x)
        return call(conv, x)

    with (
        _alone("recurrence"),
        _wrapped(users("gated_delta_update"), gated_delta),
        _wrapped(users("ssm_update"), ssm),
        _wrapped([(nn.Conv1d, "__call__")], convolving),
    ):
        yield


@contextmanager
def wrapped_calls(kinds: Iterable[type[nn.Module]], wrap: Callable[..., Any]) -> Iterator[None]:
    """Call `wrap(call, module, ...)` in place of the modules of these classes. `call` takes the same arguments."""
    # A class that inherits its `__call__` is served by the class that defines it.
    owners = dict.fromkeys(next(each for each in kind.__mro__ if "__call__" in vars(each)) for kind in kinds)
    with _alone("modules"), _wrapped([(owner, "__call__") for owner in owners], wrap):
        yield
