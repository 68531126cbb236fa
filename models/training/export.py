"""Writes a trained network as a folder that mlx_lm.load can open."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from models.training.tokenizer import PADDING, SPECIAL_TOKENS, TURN_END

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def export(network: nn.Module, config: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, tokenizer and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": TURN_END, "do_sample": False})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    tokenizer.save(str(folder / TOKENIZER))
    weights = {name: stored(value) for name, value in tree_flatten(network.parameters())}
    mx.save_safetensors(str(folder / WEIGHTS), weights, {"format": "mlx"})


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[TURN_END],
        "pad_token": SPECIAL_TOKENS[PADDING],
        "model_max_length": config["text_config"]["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE.read_text(encoding="utf-8").rstrip(),
    }


def stored(weight: mx.array) -> mx.array:
    """Return a weight as it is stored: matrices in half precision, vectors unchanged."""
    return weight.astype(mx.float16) if weight.ndim >= 2 else weight


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
