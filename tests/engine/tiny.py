"""Tiny random models of several families, with the tiny model's tokenizer, and their answers to a prompt alone."""

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

from tests.support.stack import TINY_CHAT
from worker.engine.cache.segments import needs_states
from worker.engine.model.load import Model
from worker.engine.model.profile import drafting, profile, weights_bytes
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.engine.vision.load import LanguageModel, built_by_mlx_vlm

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
_SMALL = {
    **_PLAIN,
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 64,
}
_LATENT = {
    **_SMALL,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **CONFIGS,
    # Each token is routed to experts.
    "qwen3_moe": {
        **_SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    # Latent keys, and values of another width.
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    # Two caches per layer, one of them for the indexer that selects tokens.
    "deepseek_v32": {
        **_LATENT,
        "model_type": "deepseek_v32",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "n_routed_experts": None,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 12,
    },
    # Convolutions, recurrent states and latent layers.
    "kimi_linear": {
        **_LATENT,
        "model_type": "kimi_linear",
        "linear_attn_config": {"num_heads": 2, "head_dim": 16, "kda_layers": [1], "short_conv_kernel_size": 4},
        "model_max_length": 2048,
        "num_experts": 2,
        "num_experts_per_token": 1,
        "num_shared_experts": 1,
        "num_key_value_heads": 4,
    },
    # Recurrent state and keys within one layer.
    "falcon_h1": {
        **_SMALL,
        "model_type": "falcon_h1",
        "mamba_d_head": 16,
        "mamba_d_ssm": 32,
        "mamba_d_state": 16,
        "mamba_n_heads": 2,
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
    },
    # Attention without positions.
    "jamba": {
        **_SMALL,
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 3,
        "expert_layer_period": 4,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    # Fewer caches than layers: some layers read the cache of another.
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": {
            **_SMALL,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": 16,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
    },
    # Here an absent state differs from a state of zeros.
    "recurrent_gemma": {
        **_SMALL,
        "model_type": "recurrent_gemma",
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv7": {
        "model_type": "rwkv7",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "norm_eps": 1e-5,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}
# Families whose caches are of the kinds above. Only drafts are tested with each of them.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "llama_swa": {
        **_PLAIN,
        "model_type": "llama",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "cohere2": {
        **_PLAIN,
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "logit_scale": 0.25,
    },
    # Layers that read the keys of others, wider heads without a window.
    "gemma4_text": {
        **{key: value for key, value in _PLAIN.items() if key != "rope_theta"},
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        **_PLAIN,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    # Fewer caches than layers, attention without positions.
    "nemotron_h": {
        **_PLAIN,
        "model_type": "nemotron_h",
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "time_step_limit": [0.001, 100.0],
    },
    "granitemoehybrid": {
        **_PLAIN,
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
        "tie_word_embeddings": True,
    },
    # Convolutions alone as recurrent states.
    "lfm2": {
        **_PLAIN,
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 96,
        "full_attn_idxs": [1, 3],
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 3,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    },
}
EVERY_FAMILY = {**FAMILIES, **MORE_FAMILIES}
_LATENT_EXPERTS = {
    **_LATENT,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Families that mlx-lm does not have.
ONLY_MLX_VLM: dict[str, dict[str, Any]] = {
    "k2_horizon": {**_PLAIN, "model_type": "k2_horizon"},
    # The text of two models for images.
    "mistral_large3": {
        "model_type": "mistral_large3",
        "text_config": _LATENT_EXPERTS,
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "patch_size": 14,
            "image_size": 28,
        },
    },
    "step3p7": {
        "model_type": "step3p7",
        "text_config": {
            **_SMALL,
            **_WINDOWS,
            "num_attention_groups": 2,
            "moe_intermediate_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 32,
            "moe_layers_enum": [2, 3],
        },
        "vision_config": {"width": 32, "layers": 1, "heads": 2, "image_size": 28},
    },
    "xing4_0": {**_LATENT_EXPERTS, "model_type": "xing4_0", "n_group": 2, "topk_group": 1},
    "cohere2_moe": {
        **_SMALL,
        **_ROUTED,
        "model_type": "cohere2_moe",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "moe_num_shared_experts": 1,
        "logit_scale": 0.25,
    },
    "flint": {**_SMALL, **_WINDOWS, **_ROUTED, "model_type": "flint", "shared_expert_intermediate_size": 32},
    "kolibri1": {**_SMALL, **_WINDOWS, **_ROUTED, "model_type": "kolibri1", "shared_expert_intermediate_size": 32},
}
_ALL = {**EVERY_FAMILY, **ONLY_MLX_VLM}
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
    # It does not use MLX's attention, and takes the rows of a mask for heads.
    "gemma2": {**_PLAIN, "model_type": "gemma2", "query_pre_attn_scalar": 16},
}


@cache
def network(family: str) -> Any:
    return build(_ALL[family])


@cache
def model(family: str) -> Model:
    return model_of(network(family), _ALL[family])


def build(config: dict[str, Any]) -> nn.Module:
    """Return a network with random fp32 weights, spread enough for varied greedy answers."""
    mx.random.seed(1)
    built = _random(config)
    built.update(tree_map(_spread, built.parameters()))
    mx.eval(built.parameters())
    return LanguageModel(built) if config["model_type"] in ONLY_MLX_VLM else built


def _random(config: dict[str, Any]) -> nn.Module:
    """Return the whole model of the library that has this family."""
    if config["model_type"] in ONLY_MLX_VLM:
        return built_by_mlx_vlm(config)
    model_class, args_class = _get_classes(config)
    network: nn.Module = model_class(args_class.from_dict(config))
    return network


def model_of(network: nn.Module, config: dict[str, Any]) -> Model:
    """Return a loaded model without files. Its costs are not calibrated."""
    found = profile(network, config)
    return Model(
        network=network,
        tokenizer=load_tokenizer(TINY_CHAT, eos_token_ids=[EOS]),
        fingerprint=config["model_type"],
        context=2048,
        vocab=VOCAB,
        generation={},
        costs=found.costs(weights_bytes=weights_bytes(network)),
        stateful=needs_states(network),
        drafting=drafting(network, found.layers),
    )


def write_checkpoint(config: dict[str, Any], folder: Path, *, seed: int = 0) -> Path:
    """Write a folder that the family's library opens: random fp32 weights, spread enough for varied greedy answers."""
    mx.random.seed(seed)
    model = _random(config)
    model.update(tree_map(_spread, model.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TINY_CHAT / name, folder / name)
    return folder


def _spread(weight: mx.array) -> mx.array:
    if weight.ndim >= 2:
        return weight.astype(mx.float32) * 1.8
    # Sinks and similar weights start as constants; this makes them matter.
    return weight.astype(mx.float32) + 0.1 * mx.random.normal(weight.shape)


@cache
def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(10, VOCAB) for _ in range(tokens))


def greedy_with_logprobs(network: nn.Module, tokens: tuple[int, ...], max_tokens: int) -> list[tuple[int, float]]:
    """Return the greedy answer of mlx-lm's single-request path, up to the end of the sequence: tokens and logprobs."""
    generated: list[tuple[int, float]] = []
    for token, logprobs in generate_step(mx.array(tokens), network, max_tokens=max_tokens):
        if int(token) == EOS:
            break
        generated.append((int(token), logprobs[int(token)].item()))
    return generated


def alone(network: nn.Module, tokens: tuple[int, ...], max_tokens: int) -> list[int]:
    return [token for token, _ in greedy_with_logprobs(network, tokens, max_tokens)]
