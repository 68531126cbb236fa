"""Find out, without computing anything, how a model's rows can take several tokens in one forward and keep some."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.cache.recurrent import NoRecurrence, Recurrence, Replay, SlotArraysCache, Stepping, UnknownRecurrence
from worker.engine.cache.verification import verification
from worker.engine.device import fused_attention
from worker.engine.model.profile import Layer
from worker.engine.upstream.hooks import observed_attention
from worker.engine.upstream.mlx_lm import ArraysCache, CacheList, make_prompt_cache
from worker.outcomes import MAX_DRAFT

# Of recurrent states: "replay" and "stepping" are the classes of these names, "none" a model without states.
States = Literal["none", "replay", "stepping"]

_CONTEXT = 1024  # tokens: attention to fewer may use another kernel
# Of a model that does not take several tokens, whatever it raises: it is served without drafts.
_FAILURES = (
    UnknownRecurrence,
    ValueError,
    TypeError,
    RuntimeError,
    AssertionError,
    AttributeError,
    LookupError,
    StopIteration,
)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How rows of a model take drafts."""

    max_draft: int = 0  # tokens; 0: none
    states: States = "none"
    unsupported_reason: str | None = None  # why there are no drafts; None if there are

    def recurrence(self, network: nn.Module) -> Recurrence:
        """Return how the network's states advance by a part of a forward's tokens. Lazy."""
        match self.states:
            case "replay":
                return Replay(network)
            case "stepping":
                return Stepping(network)
            case "none":
                return NoRecurrence()


NO_DRAFTS = Drafting()


def drafting(network: nn.Module, found: Sequence[Layer]) -> Drafting:
    """Return how rows of a model take drafts. `found`: its layers. Lazy: computes nothing. Must not run while another
    thread computes or opens a hook of `upstream.hooks`."""
    kinds = {layer.kind for layer in found}
    if "compressed" in kinds:
        reason = "its latent attention (MLA) expands the whole context for more than one token"
        return Drafting(unsupported_reason=reason)
    if kinds & {"chunked", "quantized", "unknown"}:
        return Drafting(unsupported_reason="rows of its caches cannot share a batch")
    states = _states(network) if "recurrent" in kinds else "none"
    if states is None:
        return Drafting(unsupported_reason="its recurrent states cannot advance by a part of a forward's tokens")
    max_draft = 0
    with suppress(*_FAILURES):
        max_draft = _longest(network)
    if max_draft == 0:
        return Drafting(unsupported_reason="its attention has no kernel for a few tokens on this device")
    return Drafting(max_draft, states)


def _states(network: nn.Module) -> States | None:
    """Return how the model's states advance, found by a forward of two tokens of which a row keeps one."""
    ways: tuple[tuple[States, type[Replay] | type[Stepping]], ...] = (("replay", Replay), ("stepping", Stepping))
    for states, way in ways:
        with suppress(*_FAILURES):
            batch = _two_rows(network)
            before = _shapes(batch)
            with verification(batch, 2) as verifying:
                with way(network).recording(batch):
                    network(mx.zeros((2, 2), mx.int32), cache=batch)
                verifying.commit([1, 2])
            if _shapes(batch) == before:
                return states
    return None


def _two_rows(network: nn.Module) -> list[Any]:
    """Return a batch of two rows of a few tokens, with slots for its states. Lazy."""
    rows = [make_prompt_cache(network), make_prompt_cache(network)]
    for row in rows:
        network(mx.zeros((1, 3), mx.int32), cache=row)
    return [_with_slots(one.merge([one, other])) for one, other in zip(*rows, strict=True)]


def _with_slots(layer: Any) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*map(_with_slots, layer.caches))
    if not isinstance(layer, ArraysCache):
        return _Uncommitted(layer)
    states = SlotArraysCache(len(layer.cache))
    for index, state in enumerate(layer.cache):
        states[index] = state
    return states


class _Uncommitted:
    """A layer of which nothing is kept: its buffers would be allocated."""

    slot_rows = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def begin(self, width: int) -> None:
        """Do nothing."""

    def commit(self, counts: Sequence[int], clear: Sequence[int] = ()) -> None:
        """Do nothing."""

    def roll_back(self, clear: Sequence[int] = ()) -> None:
        """Do nothing."""


def _shapes(batch: Sequence[Any]) -> list[tuple[int, ...]]:
    recurrent = (layer for layer in layers(batch) if isinstance(layer, SlotArraysCache))
    return [state.shape for layer in recurrent for state in layer.cache if state is not None]


def _longest(network: nn.Module) -> int:
    """Return the tokens of the longest draft whose attention runs on the same kind of kernel as a single token's."""
    calls = set[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], mx.Dtype, bool]]()

    def observe(q: mx.array, k: mx.array, v: mx.array, *, sinks: Any = None, **_: Any) -> None:
        keys, values = _with_tokens(k.shape, _CONTEXT), _with_tokens(v.shape, _CONTEXT)
        calls.add((q.shape, keys, values, q.dtype, sinks is not None))

    with observed_attention(observe):
        network(mx.zeros((1, 2), mx.int32), cache=make_prompt_cache(network))

    def is_fused(tokens: int) -> list[bool]:
        queries = [_with_tokens(q, tokens) for q, *_ in ordered]
        pairs = zip(queries, ordered, strict=True)
        return [fused_attention(q, k, v, dtype, sinks=sinks) for q, (_, k, v, dtype, sinks) in pairs]

    ordered = [*calls]
    single = is_fused(1)
    return next((draft for draft in range(MAX_DRAFT) if is_fused(draft + 2) != single), MAX_DRAFT)


def _with_tokens(shape: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    return (*shape[:2], tokens, *shape[3:])
