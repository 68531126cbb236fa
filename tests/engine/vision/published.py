"""Checkpoints in the format of Hugging Face's repositories: other names, torch's layouts, several files with an
index."""

import json
import shutil
from pathlib import Path

import mlx.core as mx

from models.tiny_vision import write_checkpoint

_QWEN = {"vision_tower.": "visual.", "language_model.lm_head.": "lm_head.", "language_model.model.": "model."}
_QWEN_3 = {**_QWEN, "vision_tower.": "model.visual.", "language_model.model.": "model.language_model."}
_MISTRAL = {"vision_tower.vision_model.": "vision_tower."}
_GEMMA_4 = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    **{name: f"model.{name}" for name in ("embed_vision.", "audio_tower.", "embed_audio.")},
}
# Prefixes of mlx-vlm's names, and of those in a repository.
_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl"], _QWEN),
    **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"], _QWEN_3),
    **dict.fromkeys(["pixtral", "mistral3"], _MISTRAL),
    **dict.fromkeys(["gemma4", "gemma4 with experts"], _GEMMA_4),
    "gemma3": {},
}
_CONVOLUTIONS = "patch_embed.proj.weight", "patch_embedding.weight", "patch_conv.weight", "conv1d.weight"
_SHIFTED_NORMS = "layernorm.weight", "language_model.norm.weight", "q_norm.weight", "k_norm.weight"


def publish(family: str, folder: Path, *, seed: int, parts: int = 2) -> Path:
    """Write the model of `write_checkpoint` in that format."""
    plain = write_checkpoint(family, folder / "plain", seed=seed)
    weights = mx.load(str(plain / "model.safetensors"))
    (plain / "model.safetensors").unlink()
    published = shutil.copytree(plain, folder / "published")
    names = _published(family, weights)
    files = {name: f"model-{1 + at % parts:05}-of-{parts:05}.safetensors" for at, name in enumerate(names)}
    for file in {*files.values()}:
        mx.save_safetensors(str(published / file), {name: names[name] for name in names if files[name] == file})
    (published / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return published


def _published(family: str, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    named = {_name(family, name): array for name, array in weights.items()}
    if family == "gemma3":  # an array twice, to mlx-vlm
        del named["language_model.lm_head.weight"]
    laid = {name: _as_torch_lays(array) if name.endswith(_CONVOLUTIONS) else array for name, array in named.items()}
    if family.startswith("qwen3_5"):
        shifted = [name for name in laid if name.endswith(_SHIFTED_NORMS) and "visual" not in name]
        laid |= {name: laid[name] - 1 for name in shifted}
        laid["mtp.norm.weight"] = mx.ones(64)
    return _with_experts_put_together(laid, turned=family == "qwen3_vl_moe")


def _name(family: str, name: str) -> str:
    for theirs, published in _NAMES[family].items():
        if name.startswith(theirs):
            return published + name.removeprefix(theirs)
    return name


def _as_torch_lays(convolution: mx.array) -> mx.array:
    return mx.contiguous(mx.moveaxis(convolution, -1, 1))


def _with_experts_put_together(weights: dict[str, mx.array], *, turned: bool) -> dict[str, mx.array]:
    """Return the weights with two of the experts' linear maps in one array. `turned`: transposed."""

    def put(array: mx.array) -> mx.array:
        return mx.contiguous(array.swapaxes(1, 2)) if turned else array

    for gate in [name for name in weights if ".switch_" in name and "gate_proj" in name]:
        up, down = (weights.pop(gate.replace("gate", kind)) for kind in ("up", "down"))
        layer = gate.replace("switch_glu.", "").replace("switch_mlp", "experts").removesuffix("gate_proj.weight")
        weights[f"{layer}gate_up_proj"] = put(mx.concatenate([weights.pop(gate), up], axis=1))
        weights[f"{layer}down_proj"] = put(down)
    return weights
