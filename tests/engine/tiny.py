"""Tiny random models of several families, on disk with the tiny model's tokenizer, and what each says alone."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import _get_classes

from scripts.stack import TINY_CHAT

VOCAB = 1024
EOS = 2

_PLAIN = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_PLAIN, "model_type": "llama"},
    "qwen3": {**_PLAIN, "model_type": "qwen3"},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
        "text_config": {
            **_PLAIN,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
    "gpt_oss": {
        **_PLAIN,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **{k: v for k, v in _PLAIN.items() if k not in ("model_type", "rope_theta")},
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
        "eos_token_id": EOS,
    },
}
CANNOT_BATCH: dict[str, dict[str, Any]] = {
    "llama4": {
        "model_type": "llama4",
        "eos_token_id": EOS,
        "text_config": {
            **_PLAIN,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "attention_bias": False,
            "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "dynamic_ntk": {
        **_PLAIN,
        "model_type": "internlm2",
        "bias": False,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
}


def write_checkpoint(config: dict[str, Any], folder: Path, *, seed: int = 0) -> Path:
    """A folder that `mlx_lm.load` opens: fp32 random weights, wide enough apart for varied greedy answers."""
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(_widen, model.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TINY_CHAT / name, folder / name)
    return folder


def _widen(weight: mx.array) -> mx.array:
    if weight.ndim >= 2:
        return weight.astype(mx.float32) * 1.8
    # Sinks and the like start as constants: make them matter.
    return weight.astype(mx.float32) + 0.1 * mx.random.normal(weight.shape)


@cache
def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(10, VOCAB) for _ in range(tokens))


def alone(network: nn.Module, tokens: tuple[int, ...], max_tokens: int) -> list[int]:
    """Greedy, by mlx-lm's single-request path, up to the end of the sequence."""
    said: list[int] = []
    for token, _ in generate_step(mx.array(tokens), network, max_tokens=max_tokens):
        if int(token) == EOS:
            break
        said.append(int(token))
    return said
