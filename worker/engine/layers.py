"""What a model keeps for each row, layer by layer, and whether rows can share a batch, without computing anything.

A network that is called leaves lazy arrays in its caches, whose shapes are known. So we call it with prompts of two
lengths, compare, and evaluate nothing: not a weight is read. What layers can do and keep decides, not their class.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.cache import cannot_batch, layers
from worker.engine.device import fused_attention
from worker.engine.upstream import make_prompt_cache
from worker.schedule.memory import BUFFER_TOKENS, Costs, Growing

Kind = Literal["kv", "rotating", "compressed", "recurrent", "chunked", "quantized", "unused"]

_HELD: dict[Kind, str] = {"chunked": "in chunks, as Llama 4 does", "quantized": "quantized"}

_FEW, _MANY = 2, 2 + BUFFER_TOKENS  # tokens: one is a special case in many a model
# A layer's intermediate results live for a while: 2.1 to 2.3 times what its linear maps put out was measured for dense
# and MoE layers, in float32.
_LIVE = 2.5
_EXPERTS = "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"
_UNKNOWN_EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """Of a row's context."""

    kind: Kind
    token_bytes: int  # for each token that it keeps
    window: int | None  # it keeps so many at most
    fixed_bytes: int  # however long the row is


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call of MLX's attention. Shapes are (rows, heads, tokens, width)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: mx.Dtype
    sinks: bool
    mask_per_head: bool  # it is part of the scores then, and as large as they are

    @property
    def score_bytes(self) -> int:
        """For each pair of tokens; 0 where the device does not hold the scores."""
        fused = fused_attention(self.queries, self.keys, self.values, self.dtype, sinks=self.sinks)
        held = 0 if fused else 3 if self.sinks else 1  # scores are copied to put the sinks beside them, and back
        return int((held + self.mask_per_head) * self.queries[1] * self.dtype.size)


@dataclass(frozen=True, slots=True)
class Anatomy:
    layers: tuple[Layer, ...]
    attention_calls: int  # in a forward, through MLX's own attention
    score_bytes: int
    chunk_token_bytes: int
    dtype: str  # of the logits, and so of most that is computed
    vocab: int  # their number

    @property
    def token_bytes(self) -> int:
        """Of a row, for each token that all layers keep."""
        return sum(layer.token_bytes for layer in self.layers)

    def costs(self, *, weights_bytes: int, draft_bytes: int = 0) -> Costs:
        kinds = defaultdict[int | None, list[int]](list)
        for layer in self.layers:
            if layer.token_bytes:
                kinds[layer.window].append(layer.token_bytes)
        return Costs(
            weights_bytes=weights_bytes,
            growing=tuple(Growing(sum(each), max(each), window) for window, each in kinds.items()),
            state_bytes=sum(layer.fixed_bytes for layer in self.layers),
            chunk_token_bytes=self.chunk_token_bytes,
            score_bytes=self.score_bytes,
            draft_bytes=draft_bytes,
        )


def weights_bytes(network: nn.Module) -> int:
    """Loaded or not. Some are in two places, as embeddings that are the head, too."""
    return sum({id(array): array.nbytes for _, array in tree_flatten(network.parameters())}.values())


def anatomy(network: nn.Module, config: dict[str, Any]) -> Anatomy:
    """Not while another thread computes: MLX's attention is replaced for the time of the call."""
    with _watched_attention() as calls:
        few, _ = _filled(network, _FEW)
    many, logits = _filled(network, _MANY)
    text, width = config.get("text_config", config), logits.dtype.size
    found = tuple(_layer(one, other) for one, other in zip(layers(few), layers(many), strict=True))
    # Some models write their attention out, and hold all scores.
    unseen = text.get("num_attention_heads", 0) * width if any(layer.token_bytes for layer in found) else 0
    return Anatomy(
        layers=found,
        attention_calls=len(calls),
        score_bytes=max((call.score_bytes for call in set(calls)), default=unseen),
        chunk_token_bytes=int(_LIVE * width * _outputs(network, text)),
        dtype=str(logits.dtype).removeprefix("mlx.core."),
        vocab=logits.shape[-1],
    )


def why_not_batched(network: nn.Module, config: dict[str, Any]) -> str | None:
    """Why rows of this model cannot share a batch, and the way out; None where they can."""
    (one, _), (other, _) = _filled(network, 1), _filled(network, 2)
    if kinds := cannot_batch(one):
        held = next((_HELD[kind] for layer in layers(one) if (kind := _kind(layer)) in _HELD), "in a way of its own")
        return (
            f"This model keeps its context {held} ({', '.join(kinds)}), which mlx-lm cannot batch. Serve another "
            "model; mlx_lm.server answers with this one, one request at a time."
        )
    try:
        # By twos and by threes: where a model takes rows for heads, it shows only if they differ in number.
        for rows in [one, other], [one, other, other]:
            batch = [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
            network(mx.zeros((len(rows), 1), mx.int32), cache=batch)
    except (ValueError, TypeError, NotImplementedError) as error:
        return _why_not_together(config, error)
    return None


def _why_not_together(config: dict[str, Any], error: Exception) -> str:
    scaling = config.get("text_config", config).get("rope_scaling") or {}
    if "dynamic" in (scaling.get("type"), scaling.get("rope_type")):
        return (
            "Dynamic-NTK rope scaling stretches positions by the length of the longest row, so rows of different "
            "length cannot share a batch. Set a fixed rope_scaling in the model's config.json, for example "
            '{"type": "linear", "factor": 2.0}, or remove it and stay within the length the model was trained for.'
        )
    return f"Rows of different length do not run together through this model: {error}. Serve another one."


def _filled(network: nn.Module, tokens: int) -> tuple[list[Any], mx.array]:
    """The caches after a prompt of so many tokens, and the logits, all of them lazy."""
    cache = make_prompt_cache(network)
    return cache, network(mx.zeros((1, tokens), mx.int32), cache=cache)


@contextmanager
def _watched_attention() -> Iterator[list[_Attention]]:
    calls, original = list[_Attention](), mx.fast.scaled_dot_product_attention

    def watch(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, sinks: Any = None, **how: Any) -> mx.array:
        per_head = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == q.shape[1]
        calls.append(_Attention(q.shape, k.shape, v.shape, q.dtype, sinks is not None, per_head))
        return original(q, k, v, mask=mask, sinks=sinks, **how)

    mx.fast.scaled_dot_product_attention = watch
    try:
        yield calls
    finally:
        mx.fast.scaled_dot_product_attention = original


def _layer(few: Any, many: Any) -> Layer:
    """From the same layer after prompts that are a step of the buffers apart."""
    grown = -(-(many.nbytes - few.nbytes) // BUFFER_TOKENS)
    return Layer(
        kind=_kind(few, grows=grown > 0),
        token_bytes=grown,
        window=few.max_size if hasattr(few, "max_size") else None,
        fixed_bytes=0 if grown else few.nbytes,
    )


def _kind(layer: Any, *, grows: bool = True) -> Kind:
    if hasattr(layer, "chunk_size"):
        return "chunked"
    if hasattr(layer, "bits"):
        return "quantized"
    if not grows:
        return "recurrent" if layer.nbytes else "unused"
    if hasattr(layer, "max_size"):
        return "rotating"
    return "compressed" if _is_latent(layer) else "kv"


def _is_latent(layer: Any) -> bool:
    """One vector for all heads, and its position apart."""
    if not (hasattr(layer, "keys") and hasattr(layer, "values")):
        return False
    return bool(layer.keys.shape[1] == 1 and layer.keys.shape[-1] != layer.values.shape[-1])


def _outputs(network: nn.Module, text: dict[str, Any]) -> int:
    """Numbers that the linear maps of a layer put out for a token, in the widest one."""
    experts = next((text[name] for name in _EXPERTS if text.get(name)), _UNKNOWN_EXPERTS)

    def outputs(parameters: Sequence[tuple[str, mx.array]]) -> int:
        maps = [array.shape for name, array in parameters if name.endswith("weight") and array.ndim >= 2]
        return sum(shape[-2] * (experts if len(shape) == 3 else 1) for shape in maps)

    return max(outputs(tree_flatten(layer.parameters())) for layer in network.layers)
