"""Writes random models of a given size to disk, with the tiny model's tokenizer."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3, qwen3_5

TINY_CHAT = Path(__file__).parent / "tiny-chat"


def random_checkpoint(
    folder: Path,
    *,
    hidden: int = 1024,
    layers: int = 12,
    kv_heads: int | None = None,
    dtype: mx.Dtype = mx.float32,
    never_sampled: Sequence[int] = (),
) -> Path:
    """Write a dense qwen3, and return the folder. With the defaults a step of eight rows takes some 30 to 60 ms on two
    cores. `never_sampled`: tokens whose logit is always 0, which is below the largest."""
    config = {**dense(hidden, layers), "model_type": "qwen3", "eos_token_id": 2}
    if kv_heads:
        config["num_key_value_heads"] = kv_heads
    return _write_random(folder, config, qwen3.Model, qwen3.ModelArgs, dtype, never_sampled)


def hybrid_checkpoint(folder: Path, *, hidden: int = 512, layers: int = 8, never_sampled: Sequence[int] = ()) -> Path:
    """Write a qwen3_5 in fp32: three layers of GatedDeltaNet, then one of attention. Return the folder.

    `never_sampled`: as for `random_checkpoint`.
    """
    text = {
        **dense(hidden, layers), "model_type": "qwen3_5_text", "full_attention_interval": 4,
        "linear_num_value_heads": hidden // 64, "linear_num_key_heads": hidden // 128,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False, "eos_token_id": 2}
    return _write_random(folder, config, qwen3_5.Model, qwen3_5.ModelArgs, mx.float32, never_sampled)


def tiny_chat_in_fp32(folder: Path) -> Path:
    """Write the bundled tiny model in fp32, and return the folder."""
    network, _ = mlx_lm.load(str(TINY_CHAT))
    weights = dict(tree_flatten(tree_map(lambda array: array.astype(mx.float32), network.parameters())))
    return _save(folder, weights, (TINY_CHAT / "config.json").read_text("utf-8"))


def dense(hidden: int, layers: int) -> dict[str, Any]:
    """Return the sizes of a dense network, as a config has them."""
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64, "vocab_size": 1024,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False,
    }  # fmt: skip


def non_word_tokens(word: str = "Ġ?[A-Za-z0-9]+") -> list[int]:
    """Return the tokens that do not match `word`, by default whole ASCII words; Ġ is a space. If a random model never
    samples them, all answers have the same length, and equal texts have equal tokens."""
    config = json.loads((TINY_CHAT / "tokenizer.json").read_text("utf-8"))
    vocab: dict[str, int] = config["model"]["vocab"]
    return [token for text, token in vocab.items() if not re.fullmatch(word, text)] + [
        added["id"] for added in config["added_tokens"]
    ]


def _write_random(
    folder: Path,
    config: dict[str, Any],
    model: type[nn.Module],
    args: Any,
    dtype: mx.Dtype,
    never_sampled: Sequence[int],
) -> Path:
    mx.random.seed(0)
    parameters = tree_map(lambda array: array.astype(dtype), model(args.from_dict(config)).parameters())
    weights = dict(tree_flatten(parameters))
    if never_sampled:
        [head] = (weight for name, weight in weights.items() if name.endswith("lm_head.weight"))
        head[mx.array([*never_sampled])] = 0  # the largest logit is always above 0
    return _save(folder, weights, json.dumps(config))


def _save(folder: Path, weights: dict[str, mx.array], config: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(config, "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TINY_CHAT / name, folder / name)
    return folder
