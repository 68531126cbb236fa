"""Tiny random embedding models, as folders that mlx-embeddings opens, with the tokenizer of the tiny chat model."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, processors

from tests.support.stack import TINY_CHAT

VOCAB = 1034
_BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": 130, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"max_position_embeddings": 131},  # the first is that of the padding
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16, "architectures": ["ModernBertModel"]},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {
        "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 32, "sliding_window_pattern": 2,
        "rms_norm_eps": 1e-6, "rope_global_base_freq": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 16,
        "use_bidirectional_attention": True,
    },
    "llama_bidirec": {},
}  # fmt: skip
_CAUSAL = "qwen3"  # its tokenizer adds an end, and no beginning


def write_checkpoint(
    family: str, folder: Path, *, dtype: mx.Dtype = mx.float32, bits: int | None = None, **changed: Any
) -> Path:
    """Write a model with random weights, spread enough for vectors that differ. `bits`: of its weights, if they are
    quantized; `changed`: of its config."""
    config = {"model_type": family, **_BASE, **FAMILIES[family], **changed}
    module = importlib.import_module(f"mlx_embeddings.models.{family.replace('-', '_')}")
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict(config))
    network.update(tree_map(_spread, network.parameters()))
    network.set_dtype(dtype)
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(network, **config["quantization"])
    weights = dict(tree_flatten(network.parameters()))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if family == _CAUSAL:  # the only one that a chat model has too, and whose config is the same
        (folder / "modules.json").write_text("[]", "utf-8")
    shutil.copyfile(TINY_CHAT / "tokenizer_config.json", folder / "tokenizer_config.json")
    tokenizer = Tokenizer.from_file(str(TINY_CHAT / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>" if family == _CAUSAL else "<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _spread(weight: mx.array) -> mx.array:
    if weight.ndim >= 2:
        return mx.random.normal(weight.shape) * 0.2
    return 1 + 0.1 * mx.random.normal(weight.shape)
