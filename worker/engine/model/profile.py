"""Derive a model's memory profile and whether its rows can share a batch, without computing anything.

Calling a network leaves lazy arrays with known shapes in its caches. So it is called with prompts of two lengths, the
shapes are compared, and nothing is evaluated: no weight is read. Decided by what layers hold and can do, not by their
class."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.cache.kinds import kind_of
from worker.engine.cache.layers import cannot_batch, layers, mapped
from worker.engine.cache.recurrent import Recurrence, Replay, Stepping
from worker.engine.cache.slots import verification
from worker.engine.checkpoint import text_config
from worker.engine.device import fused_attention
from worker.engine.memory import BUFFER_TOKENS, KVLayers, MemoryModel
from worker.engine.upstream.hooks import observed_attention
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.outcomes import MAX_DRAFT

_HELD = {"chunked": "in chunks, as Llama 4 does", "quantized": "in quantized form"}

_FEW, _MANY = 2, 2 + BUFFER_TOKENS  # tokens: many models treat a single token differently
_EXPERTS = "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"


@dataclass(frozen=True, slots=True)
class _Layer:
    """Memory of one cache layer for one row."""

    kind: str  # name of its kind of cache, or "unused"
    token_bytes: int  # for each token that it holds
    window: int | None  # the most tokens that it holds; None is unlimited
    fixed_bytes: int  # independent of the length of the row


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call of MLX's attention. Shapes are (rows, heads, tokens, head_dim)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: mx.Dtype
    sinks: bool
    mask_per_head: bool  # the mask is then as large as the scores

    @classmethod
    def of(
        cls, q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, sinks: Any = None, **other: Any
    ) -> "_Attention":
        """Return the call with these arguments of `mx.fast.scaled_dot_product_attention`."""
        per_head = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == q.shape[1]
        return cls(q.shape, k.shape, v.shape, q.dtype, sinks is not None, per_head)

    @property
    def score_bytes(self) -> int:
        """Bytes for each pair of tokens; 0 if the device does not materialize the scores."""
        copies = 3 if self.sinks else 1  # scores are copied to append the sinks, and back
        if fused_attention(self.queries, self.keys, self.values, self.dtype, sinks=self.sinks):
            copies = 0
        return int((copies + self.mask_per_head) * self.queries[1] * self.dtype.size)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model's layers and memory use, derived from shapes."""

    layers: tuple[_Layer, ...]
    attention_calls: int  # calls of MLX's attention function in a forward
    score_bytes: int
    chunk_token_bytes: int
    dtype: str  # of the logits, and so of most activations
    vocab: int  # number of logits

    @property
    def token_bytes(self) -> int:
        """Bytes per token of a row, in all layers that hold it."""
        return sum(layer.token_bytes for layer in self.layers)

    def costs(self, *, weights_bytes: int, draft_bytes: int = 0) -> MemoryModel:
        """Return the memory model: for rows of any length, before calibration."""
        kinds = defaultdict[int | None, list[int]](list)
        for layer in self.layers:
            if layer.token_bytes:
                kinds[layer.window].append(layer.token_bytes)
        return MemoryModel(
            weights_bytes=weights_bytes,
            kv_layers=tuple(KVLayers(sum(each), max(each), window) for window, each in kinds.items()),
            state_bytes=sum(layer.fixed_bytes for layer in self.layers),
            state_layer_bytes=max((layer.fixed_bytes for layer in self.layers), default=0),
            chunk_token_bytes=self.chunk_token_bytes,
            score_bytes=self.score_bytes,
            vocab=self.vocab,
            draft_bytes=draft_bytes,
        )


def weights_bytes(network: nn.Module) -> int:
    """Return the bytes of all weights, loaded or not. Weights used in two places, such as tied embeddings, count
    once."""
    return sum({id(array): array.nbytes for _, array in tree_flatten(network.parameters())}.values())


def profile(network: nn.Module, config: dict[str, Any]) -> ModelProfile:
    """Return the profile of a model. Lazy: computes nothing. Must not run while another thread computes or opens a hook
    of `upstream.hooks`."""
    calls = list[_Attention]()
    with observed_attention(lambda *given, **named: calls.append(_Attention.of(*given, **named))):
        few, _ = _filled(network, _FEW)
    many, logits = _filled(network, _MANY)
    text, width = text_config(config), logits.dtype.size
    found = tuple(_layer(one, other) for one, other in zip(layers(few), layers(many), strict=True))
    # Some models do not call MLX's attention, and materialize all scores.
    unfused = text.get("num_attention_heads", 0) * width if any(layer.token_bytes for layer in found) else 0
    # Peak of a layer's intermediate results, relative to the output of its linear maps: 2.1 to 2.3 measured for dense
    # and MoE layers in float32.
    live = 2.5
    return ModelProfile(
        layers=found,
        attention_calls=len(calls),
        score_bytes=max((call.score_bytes for call in set(calls)), default=unfused),
        chunk_token_bytes=int(live * width * _outputs(network, text)),
        dtype=str(logits.dtype).removeprefix("mlx.core."),
        vocab=logits.shape[-1],
    )


def why_not_batched(network: nn.Module, config: dict[str, Any]) -> str | None:
    """Return why rows of this model cannot share a batch, and what to do; None if they can. Lazy: computes nothing."""
    (one, _), (other, _) = _filled(network, 1), _filled(network, 2)
    if kinds := cannot_batch(one):
        names = [kind_of(layer).name(layer) for layer in layers(one)]
        layout = next((_HELD[name] for name in names if name in _HELD), "in its own way")
        return (
            f"This model keeps its context {layout} ({', '.join(kinds)}), which mlx-lm cannot batch. Serve another "
            "model; mlx_lm.server can serve this one, one request at a time."
        )
    try:
        # Two rows and three: a model that confuses rows with heads fails only if their numbers differ.
        for rows in [one, other], [one, other, other]:
            batch = [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
            network(mx.zeros((len(rows), 1), mx.int32), cache=batch)
    except (ValueError, TypeError, NotImplementedError) as error:
        return _why_not_together(config, error)
    return None


def _why_not_together(config: dict[str, Any], error: Exception) -> str:
    scaling = text_config(config).get("rope_scaling") or {}
    if "dynamic" in (scaling.get("type"), scaling.get("rope_type")):
        return (
            "Dynamic-NTK rope scaling depends on the length of the longest row, so rows of different "
            "length cannot share a batch. Set a fixed rope_scaling in the model's config.json, for example "
            '{"type": "linear", "factor": 2.0}, or remove it and stay within the length the model was trained for.'
        )
    return f"This model cannot compute rows of different length together: {error}. Serve another one."


def _filled(network: nn.Module, tokens: int) -> tuple[list[Any], mx.array]:
    """Return the caches after a prompt of `tokens` tokens, and its logits. Lazy."""
    cache = make_prompt_cache(network)
    return cache, network(mx.zeros((1, tokens), mx.int32), cache=cache)


def _layer(few: Any, many: Any) -> _Layer:
    """Return the layer by its caches after two prompts whose lengths differ by `BUFFER_TOKENS`."""
    kind, grown = kind_of(few), -(-(many.nbytes - few.nbytes) // BUFFER_TOKENS)
    return _Layer(
        kind=kind.name(few) if few.nbytes else "unused",
        token_bytes=grown,
        window=kind.window(few),
        fixed_bytes=0 if grown else few.nbytes,
    )


def _outputs(network: nn.Module, text: dict[str, Any]) -> int:
    """Return the output values per token of all linear maps in the widest layer."""
    experts = next((text[name] for name in _EXPERTS if text.get(name)), 8)  # 8 if the config does not say

    def outputs(parameters: Sequence[tuple[str, mx.array]]) -> int:
        maps = [array.shape for name, array in parameters if name.endswith("weight") and array.ndim >= 2]
        return sum(shape[-2] * (experts if len(shape) == 3 else 1) for shape in maps)

    return max(outputs(tree_flatten(layer.parameters())) for layer in network.layers)


# Of recurrent states: "replay" and "stepping" are the classes of these names, "none" a model without states.
States = Literal["none", "replay", "stepping"]

# Of a model that does not take several tokens, whatever it raises: it is served without drafts.
_FAILURES = (
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
                return Recurrence()


NO_DRAFTS = Drafting()


def drafting(network: nn.Module, found: Sequence[_Layer]) -> Drafting:
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
    batch = [one.merge([one, other]) for one, other in zip(*rows, strict=True)]
    return mapped(lambda layer: kind_of(layer).tried(layer), batch)


def _shapes(batch: Sequence[Any]) -> list[tuple[int, ...]]:
    recurrent = ((kind, layer) for layer in layers(batch) if (kind := kind_of(layer)).recurrent)
    return [state.shape for kind, layer in recurrent for state in kind.arrays(layer) if state is not None]


def _longest(network: nn.Module) -> int:
    """Return the tokens of the longest draft whose attention runs on the same kind of kernel as a single token's."""
    calls = set[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], mx.Dtype, bool]]()

    def observe(q: mx.array, k: mx.array, v: mx.array, *, sinks: Any = None, **_: Any) -> None:
        context = 1024  # tokens: attention to fewer may use another kernel
        keys, values = _with_tokens(k.shape, context), _with_tokens(v.shape, context)
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
