"""Tiny random vision models, as folders that the real loaders open: weights, tokenizer, template and processor."""

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_vlm.utils import update_module_configs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# The first ids are the 256 bytes.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>", "<think>", "</think>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"]
SPECIAL += ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>"]
IDS = {name: 256 + at for at, name in enumerate(SPECIAL)}
VOCAB = 320
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
}
_GEMMA_4_TOKENS = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
# By what the template writes for an image.
_NAMED = {"<start_of_image>": _GEMMA_TOKENS, "<|image|>": _GEMMA_4_TOKENS}
EOS = IDS["<|im_end|>"]

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "in_channels": 3,
}
_QWEN = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "vocab_size": VOCAB,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}
_QWEN_2 = {
    **{name: value for name, value in _TEXT.items() if name != "head_dim"},
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_TOWER = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_MISTRAL = {
    "image_token_index": IDS["[IMG]"],
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16, "rope_theta": 10000.0},
}
_GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4",
    "image_token_id": IDS["<|image|>"],
    "video_token_id": IDS["<|video|>"],
    "audio_token_id": IDS["<|audio|>"],
    "hidden_size": 64,
    "vocab_size": VOCAB,
    "eos_token_id": [EOS],
    "tie_word_embeddings": True,
    "vision_soft_tokens_per_image": 16,
    "vision_config": {
        **_TOWER,
        "model_type": "gemma4_vision",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pooling_kernel_size": 2,
        "default_output_length": 16,
        "position_embedding_size": 64,
    },
}
_GEMMA_4_TEXT: dict[str, Any] = {
    **_TEXT,
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}


def _of_experts(config: dict[str, Any], family: str, **more: Any) -> dict[str, Any]:
    """Return the config of the same model as a mixture of experts, of type `family`."""
    text = {**config["text_config"], **_EXPERTS, **more, "model_type": f"{family}_text"}
    return {
        **config,
        "model_type": family,
        "text_config": text,
        "vision_config": {**config["vision_config"], "model_type": family},
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **_QWEN,
        "model_type": "qwen3_5",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5", "deepstack_visual_indexes": []},
    },
    "qwen3_vl": {
        **_QWEN,
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_vl_text",
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1]},
    },
    # These have the language model's settings at the top level of the config.
    "qwen2_vl": {
        **_QWEN,
        **_QWEN_2,
        "model_type": "qwen2_vl",
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen2_vl", "embed_dim": 32, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        **_QWEN,
        **_QWEN_2,
        "model_type": "qwen2_5_vl",
        "vision_config": {
            **_QWEN_TOWER,
            "model_type": "qwen2_5_vl",
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    # Its image tokens lie in layers with a window, too.
    "gemma3": {
        "model_type": "gemma3",
        "image_token_index": IDS["<image_soft_token>"],
        "tie_word_embeddings": False,
        "hidden_size": 64,
        "vocab_size": VOCAB,
        "eos_token_id": EOS,
        "pad_token_id": IDS["<|endoftext|>"],
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 2,
            "rope_theta": 10000.0,  # mlx-lm's name of the next
            "rope_global_base_freq": 10000.0,
            "rope_local_base_freq": 10000.0,
            "mm_tokens_per_image": 4,
        },
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
    },
    # As the smallest ones: layers have inputs of their own, the last ones no keys and values; and it hears.
    "gemma4": {
        **_GEMMA_4,
        "text_config": {**_GEMMA_4_TEXT, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2},
        "vision_config": {**_GEMMA_4["vision_config"], "use_clipped_linears": True},
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 16,
        },
    },
    # As the large ones: tokens of an image attend to each other.
    "gemma4 with experts": {
        **_GEMMA_4,
        "text_config": {
            **_GEMMA_4_TEXT,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        "vision_config": {**_GEMMA_4["vision_config"], "standardize": True},
    },
    "pixtral": {
        **_MISTRAL,
        "model_type": "pixtral",
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 64},
    },
    "mistral3": {
        **_MISTRAL,
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 64},
    },
}
_LOOKS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN_FILES = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "preprocessor_config.json": {
        **_LOOKS,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    },
}
# The format of older repositories.
_QWEN_2_FILES = {
    "image": _QWEN_FILES["image"],
    "preprocessor_config.json": {
        **_LOOKS,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 64,
        "max_pixels": 4096,
    },
}
_PIXTRAL_FILES = {
    "image": "[IMG]",
    "preprocessor_config.json": {
        **_LOOKS,
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 4, "width": 4},
        "size": {"longest_edge": 64},
    },
    "processor_config.json": {"patch_size": 4, "spatial_merge_size": 1},
}
_GEMMA_4_FILES = {
    "image": "<|image|>",
    "processor_config.json": {
        "processor_class": "Gemma4Processor",
        "image_seq_length": 16,
        "image_processor": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "max_soft_tokens": 16,
            "pooling_kernel_size": 2,
        },
    },
}
CONFIGS["qwen3_5_moe"] = _of_experts(CONFIGS["qwen3_5"], "qwen3_5_moe", shared_expert_intermediate_size=48)
CONFIGS["qwen3_vl_moe"] = _of_experts(CONFIGS["qwen3_vl"], "qwen3_vl_moe", decoder_sparse_step=1, mlp_only_layers=[1])
# What a family's template writes for an image, and the files of its processor.
FILES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl"], _QWEN_2_FILES),
    **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], _QWEN_FILES),
    "gemma3": {
        "image": "<start_of_image>",
        "preprocessor_config.json": {
            **_LOOKS,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 16, "width": 16},
        },
        "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    },
    **dict.fromkeys(["gemma4", "gemma4 with experts"], _GEMMA_4_FILES),
    "pixtral": _PIXTRAL_FILES,
    "mistral3": {**_PIXTRAL_FILES, "processor_config.json": {"patch_size": 4, "spatial_merge_size": 2}},
}


def write_checkpoint(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
    text: dict[str, Any] | None = None,
) -> Path:
    """`bits`: bits of the language model's weights, if quantized; `text`: settings of the language model to change."""
    folder.mkdir(parents=True, exist_ok=True)
    config = changed(CONFIGS[family], text or {})
    model = build(config, seed)
    model.set_dtype(dtype)
    if bits:
        how = {"group_size": 32, "bits": bits, "mode": "affine"}
        nn.quantize(model, **how, class_predicate=_quantized)
        config = {**config, "quantization": how}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": [EOS]})
    image, files = (
        FILES[family]["image"],
        {name: generated for name, generated in FILES[family].items() if name != "image"},
    )
    for name, generated in files.items():
        _write(folder / name, generated)
    template = _TEMPLATE.replace("IMAGE", image)
    (folder / "chat_template.jinja").write_text(template)
    write_tokenizer(folder, template)
    return folder


def changed(config: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Return the config with other settings of the language model; settings that are None are removed."""
    if "text_config" in config:
        return {**config, "text_config": changed(config["text_config"], text)}
    return {name: value for name, value in {**config, **text}.items() if value is not None}


def build(config: dict[str, Any], seed: int) -> nn.Module:
    """Return mlx-vlm's model with random fp32 weights, spread enough for varied greedy answers."""
    family = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    given = copy.deepcopy(config)
    made = update_module_configs(family.ModelConfig.from_dict(given), family, given, ["text", "vision", "audio"])
    mx.random.seed(seed)
    model = family.Model(made)
    model.update(tree_map(_widen, model.parameters()))
    if not hasattr(model.language_model, "lm_head"):  # else it would repeat its prompt
        norm = model.language_model.model.norm
        norm.weight = mx.random.normal(norm.weight.shape)
    mx.eval(model.parameters())
    return model


def _quantized(path: str, layer: nn.Module) -> bool:
    return path.startswith("language_model.") and hasattr(layer, "to_quantized")


def _widen(weight: mx.array) -> mx.array:
    if weight.ndim >= 2:
        return weight.astype(mx.float32) * 1.8
    return weight.astype(mx.float32) + 0.1 * mx.random.normal(weight.shape)


def write_tokenizer(folder: Path, template: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    generated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
        "extra_special_tokens": next((named for sign, named in _NAMED.items() if sign in template), {}),
    }
    _write(folder / "tokenizer_config.json", generated)


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))
