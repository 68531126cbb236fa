"""Folders of tiny models with MTP heads, named as the original checkpoints name them, and what such a head computes
for a single row, written out from the layouts' descriptions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.engine.tiny import CONFIGS, VOCAB, write_checkpoint

Tensors = dict[str, mx.array]

_SIZE, _HEADS, _KV_HEADS, _DIM, _FFN = 64, 4, 2, 16, 96
_EXPERTS, _EXPERT_FFN, _PER_TOKEN = 4, 32, 2
_QWEN_MOE = {
    "num_experts": _EXPERTS,
    "num_experts_per_tok": _PER_TOKEN,
    "moe_intermediate_size": _EXPERT_FFN,
    "shared_expert_intermediate_size": _EXPERT_FFN,
    "norm_topk_prob": True,
}
_TEXT = CONFIGS["qwen3_5"]["text_config"]
MTP_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": CONFIGS["qwen3_5"],
    "qwen3_5_moe": {
        **CONFIGS["qwen3_5"],
        "model_type": "qwen3_5_moe",
        "text_config": {**_TEXT, **_QWEN_MOE, "model_type": "qwen3_5_moe_text"},
    },
    "qwen3_next": {
        **{key: value for key, value in _TEXT.items() if key != "rope_parameters"},
        **_QWEN_MOE,
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe": {
        **CONFIGS["qwen3"],
        "model_type": "glm4_moe",
        "moe_intermediate_size": _EXPERT_FFN,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": _EXPERTS,
        "routed_scaling_factor": 1.5,
        "num_experts_per_tok": _PER_TOKEN,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
}


def write_with_head(name: str, folder: Path, *, seed: int = 3) -> Path:
    """Write a folder with a trunk and, in a file that mlx-lm does not read, its head."""
    write_checkpoint(MTP_CONFIGS[name], folder)
    mx.save_safetensors(str(folder / "mtp.safetensors"), head_tensors(name, seed=seed))
    return folder


def write_head_alone(name: str, folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Write a folder with a head, and the config of its model with these changes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MTP_CONFIGS[name], **config}))
    mx.save_safetensors(str(folder / "model-00002-of-00002.safetensors"), tensors)
    return folder


def head_tensors(name: str, *, seed: int = 3) -> Tensors:
    """Return random tensors of a head."""
    mx.random.seed(seed)
    return _glm_tensors() if name == "glm4_moe" else _qwen_tensors(moe=name != "qwen3_5", stacked=name == "qwen3_5_moe")


def _qwen_tensors(*, moe: bool, stacked: bool) -> Tensors:
    layer = "mtp.layers.0."
    tensors = {
        "mtp.pre_fc_norm_embedding.weight": _norm(_SIZE),
        "mtp.pre_fc_norm_hidden.weight": _norm(_SIZE),
        "mtp.fc.weight": _matrix(_SIZE, 2 * _SIZE),
        "mtp.norm.weight": _norm(_SIZE),
        **_attention(layer, queries=2 * _HEADS * _DIM, bias=False),
    }
    if not moe:
        return tensors | _ffn(f"{layer}mlp.", _FFN)
    tensors |= {
        f"{layer}mlp.gate.weight": _matrix(_EXPERTS, _SIZE),
        f"{layer}mlp.shared_expert_gate.weight": _matrix(1, _SIZE),
        **_ffn(f"{layer}mlp.shared_expert.", _EXPERT_FFN),
    }
    experts = [_ffn("", _EXPERT_FFN) for _ in range(_EXPERTS)]
    if not stacked:
        return tensors | {f"{layer}mlp.experts.{i}.{k}": v for i, each in enumerate(experts) for k, v in each.items()}
    both = [mx.concatenate([each["gate_proj.weight"], each["up_proj.weight"]]) for each in experts]
    return tensors | {
        f"{layer}mlp.experts.gate_up_proj": mx.stack(both),
        f"{layer}mlp.experts.down_proj": mx.stack([each["down_proj.weight"] for each in experts]),
    }


def _glm_tensors() -> Tensors:
    layer = f"model.layers.{MTP_CONFIGS['glm4_moe']['num_hidden_layers']}."
    experts = (_ffn(f"{layer}mlp.experts.{i}.", _EXPERT_FFN) for i in range(_EXPERTS))
    return {
        f"{layer}enorm.weight": _norm(_SIZE),
        f"{layer}hnorm.weight": _norm(_SIZE),
        f"{layer}eh_proj.weight": _matrix(_SIZE, 2 * _SIZE),
        f"{layer}shared_head.norm.weight": _norm(_SIZE),
        f"{layer}shared_head.head.weight": _matrix(VOCAB, _SIZE),
        f"{layer}embed_tokens.weight": _matrix(VOCAB, _SIZE),
        f"{layer}mlp.gate.weight": _matrix(_EXPERTS, _SIZE),
        f"{layer}mlp.gate.e_score_correction_bias": 0.3 * mx.random.normal((_EXPERTS,)),
        **_attention(layer, queries=_HEADS * _DIM, bias=True),
        **_ffn(f"{layer}mlp.shared_experts.", _EXPERT_FFN),
        **{name: value for each in experts for name, value in each.items()},
    }


def _attention(layer: str, *, queries: int, bias: bool) -> Tensors:
    outputs = {"q_proj": queries, "k_proj": _KV_HEADS * _DIM, "v_proj": _KV_HEADS * _DIM}
    attention = f"{layer}self_attn."
    biases = {f"{attention}{name}.bias": 0.1 * mx.random.normal((size,)) for name, size in outputs.items() if bias}
    return {
        f"{layer}input_layernorm.weight": _norm(_SIZE),
        f"{layer}post_attention_layernorm.weight": _norm(_SIZE),
        f"{attention}q_norm.weight": _norm(_DIM),
        f"{attention}k_norm.weight": _norm(_DIM),
        f"{attention}o_proj.weight": _matrix(_SIZE, _HEADS * _DIM),
        **{f"{attention}{name}.weight": _matrix(size, _SIZE) for name, size in outputs.items()},
        **biases,
    }


def _ffn(prefix: str, width: int) -> Tensors:
    return {
        f"{prefix}gate_proj.weight": _matrix(width, _SIZE),
        f"{prefix}up_proj.weight": _matrix(width, _SIZE),
        f"{prefix}down_proj.weight": _matrix(_SIZE, width),
    }


def _matrix(outputs: int, inputs: int) -> mx.array:
    return 1.8 * mx.random.uniform(-1, 1, (outputs, inputs)) / inputs**0.5


def _norm(size: int) -> mx.array:
    return 1 + 0.1 * mx.random.normal((size,))


# What a head computes, for one row, without any cache


@dataclass(frozen=True)
class ReferenceHead:
    """A head by its tensors, whose norms are whole, and the trunk's embedding and output matrices."""

    name: str
    tensors: Tensors
    embedding: mx.array
    output: mx.array

    def hidden(self, tokens: list[int], trunk_hidden: mx.array) -> mx.array:
        """Return the states of all entries. tokens: those of the entries, each after the token of its hidden state."""
        t, glm = self.tensors, self.name == "glm4_moe"
        prefix = f"model.layers.{MTP_CONFIGS['glm4_moe']['num_hidden_layers']}." if glm else "mtp."
        layer = prefix if glm else f"{prefix}layers.0."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm") if glm else _QWEN_NAMES
        enorm, hnorm, fc, norm = (t[f"{prefix}{each}.weight"] for each in names)
        table = t[f"{prefix}embed_tokens.weight"] if glm else self.embedding
        x = mx.concatenate([_rms(table[mx.array(tokens)], enorm), _rms(trunk_hidden, hnorm)], axis=-1) @ fc.T
        x = x + self._attend(layer, _rms(x, t[f"{layer}input_layernorm.weight"]))
        x = x + self._mix(f"{layer}mlp.", _rms(x, t[f"{layer}post_attention_layernorm.weight"]))
        return _rms(x, norm)

    def drafts(self, tokens: list[int], trunk_hidden: mx.array, depth: int) -> list[int]:
        """Return the greedy drafts after the last token. trunk_hidden (tokens - 1, size): of all tokens but the
        last."""
        inputs, hidden, drafts = tokens[1:], trunk_hidden, list[int]()
        for _ in range(depth):
            last = self.hidden(inputs, hidden)[-1:]
            drafts.append(int(mx.argmax(last @ self._output.T).item()))
            inputs, hidden = [*inputs, drafts[-1]], mx.concatenate([hidden, last])
        return drafts

    @property
    def _output(self) -> mx.array:
        return next((v for k, v in self.tensors.items() if k.endswith("shared_head.head.weight")), self.output)

    def _attend(self, layer: str, x: mx.array) -> mx.array:
        t, length = self.tensors, x.shape[0]

        def linear(name: str) -> mx.array:
            weight = f"{layer}self_attn.{name}"
            return x @ t[f"{weight}.weight"].T + t.get(f"{weight}.bias", mx.array(0.0))

        q, gate = linear("q_proj").reshape(length, _HEADS, -1), None
        if q.shape[-1] == 2 * _DIM:
            q, gate = mx.split(q, 2, axis=-1)
        q = _rotated(_rms(q, t[f"{layer}self_attn.q_norm.weight"]))
        k = _rotated(_rms(linear("k_proj").reshape(length, _KV_HEADS, _DIM), t[f"{layer}self_attn.k_norm.weight"]))
        v = linear("v_proj").reshape(length, _KV_HEADS, _DIM)
        k, v = (mx.repeat(each, _HEADS // _KV_HEADS, axis=1).transpose(1, 0, 2) for each in (k, v))
        scores = q.transpose(1, 0, 2) @ k.transpose(0, 2, 1) * _DIM**-0.5
        later = mx.triu(mx.full((length, length), -1e9), k=1)
        out = (mx.softmax(scores + later, axis=-1) @ v).transpose(1, 0, 2)
        out = out if gate is None else out * mx.sigmoid(gate)
        return out.reshape(length, -1) @ t[f"{layer}self_attn.o_proj.weight"].T

    def _mix(self, prefix: str, x: mx.array) -> mx.array:
        t = self.tensors
        if self.name == "qwen3_5":
            return _swiglu(t, prefix, x)
        scores = x @ t[f"{prefix}gate.weight"].T
        if self.name == "glm4_moe":
            scores = mx.sigmoid(scores)
            chosen = mx.argsort(-(scores + t[f"{prefix}gate.e_score_correction_bias"]), axis=-1)[:, :_PER_TOKEN]
            scale, shared = 1.5, _swiglu(t, f"{prefix}shared_experts.", x)
        else:
            scores = mx.softmax(scores, axis=-1)
            chosen = mx.argsort(-scores, axis=-1)[:, :_PER_TOKEN]
            shared = mx.sigmoid(x @ t[f"{prefix}shared_expert_gate.weight"].T) * _swiglu(
                t, f"{prefix}shared_expert.", x
            )
            scale = 1.0
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights = scale * weights / weights.sum(axis=-1, keepdims=True)
        routed = [
            sum(
                weight * _swiglu(self._expert(prefix, expert), "", x[i])
                for weight, expert in zip(own, experts, strict=True)
            )
            for i, (own, experts) in enumerate(zip(weights.tolist(), chosen.tolist(), strict=True))
        ]
        return mx.stack(routed) + shared

    def _expert(self, prefix: str, index: int) -> Tensors:
        t = self.tensors
        if f"{prefix}experts.gate_up_proj" in t:
            gate, up = mx.split(t[f"{prefix}experts.gate_up_proj"][index], 2, axis=0)
            down = t[f"{prefix}experts.down_proj"][index]
            return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
        own = f"{prefix}experts.{index}."
        return {name.removeprefix(own): value for name, value in t.items() if name.startswith(own)}


_QWEN_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def _rms(x: mx.array, weight: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def _swiglu(t: Tensors, prefix: str, x: mx.array) -> mx.array:
    gate = x @ t[f"{prefix}gate_proj.weight"].T
    return (gate * mx.sigmoid(gate) * (x @ t[f"{prefix}up_proj.weight"].T)) @ t[f"{prefix}down_proj.weight"].T


def _rotated(x: mx.array, rotary: int = _DIM // 2, base: float = 10000.0) -> mx.array:
    """Rotate the first `rotary` values of each head, (tokens, heads, dim), by the index of the token."""
    half = rotary // 2
    angles = mx.arange(x.shape[0])[:, None, None] * base ** (-mx.arange(half) / half)
    a, b = x[..., :half], x[..., half:rotary]
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., rotary:]], axis=-1)
