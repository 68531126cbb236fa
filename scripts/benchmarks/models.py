"""Random models of a chosen size, on disk, with the tiny model's tokenizer."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from scripts.stack import TINY_CHAT


def random_checkpoint(folder: Path, *, hidden: int = 1024, layers: int = 12) -> Path:
    """A dense qwen3 in fp32; the defaults take some 30 to 60 ms a step of eight rows on two cores."""
    config = {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64, "vocab_size": 1024,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False,
        "eos_token_id": 2,
    }  # fmt: skip
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(TINY_CHAT / name, folder / name)
    return folder
