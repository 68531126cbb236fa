"""A model that sees: its folder recognised, loaded once by mlx-vlm, and a twin of its language model for mlx-lm.

The twin's weights are the same arrays, so it takes no memory. Rows decode with it, and whoever sends text alone never
comes near mlx-vlm.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.eyes import Eyes, GridEyes, RowEyes, SoftEyes, SquareEyes
from worker.engine.families import DeepQwen, Gemma3, Gemma4, MakeFamily, Mistral3, Pixtral, Qwen
from worker.engine.heads import tensor_names
from worker.engine.scene import Family
from worker.engine.upstream import get_classes
from worker.errors import CannotStart

logger = logging.getLogger("sluice.engine")

_SAID_IN = "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"
_TOWERS = "visual.", "vision_tower.", "vision_model.", "vision_encoder."
# By the model_type of their configs.
_KNOWN: dict[str, tuple[MakeFamily, type[Eyes]]] = {
    "qwen2_vl": (Qwen, GridEyes),
    "qwen2_5_vl": (Qwen, GridEyes),
    "qwen3_vl": (DeepQwen, GridEyes),
    "qwen3_vl_moe": (DeepQwen, GridEyes),
    "qwen3_5": (DeepQwen, GridEyes),
    "qwen3_5_moe": (DeepQwen, GridEyes),
    "gemma3": (Gemma3, SquareEyes),
    "gemma4": (Gemma4, SoftEyes),
    "pixtral": (Pixtral, RowEyes),
    "mistral3": (Mistral3, RowEyes),
}


@dataclass(frozen=True, slots=True)
class Vision:
    network: nn.Module  # mlx-vlm's, with the language model in it
    family: Family
    eyes: Eyes
    template: str | None  # the processor's own, which shows images; that of the tokenizer may not, or not be there


def sees(folder: Path) -> bool:
    """Whether there is a vision tower, not in the config alone: conversions for text drop its weights. A model of a
    family that we do not know sees nothing: its text can be served."""
    config = _said(folder, "config.json")
    if not config.get("vision_config"):
        return False
    names = (name for file in folder.glob("model*.safetensors") for name in tensor_names(file))
    there = any(tower in name for name in names for tower in _TOWERS)
    if there and config["model_type"] not in _KNOWN:
        logger.warning("Images are not served with a model of type %s, text is.", config["model_type"])
    return there and config["model_type"] in _KNOWN


def open_vision(folder: Path, *, trusted: bool) -> tuple[nn.Module, dict[str, Any], Vision]:
    """The twin, its config, and what sees. Lazily: no weight is read. `trusted`: the folder's own code may run.

    Raises `CannotStart`, and what loading raises."""
    if not trusted:
        _refuse_code(folder)
    try:
        from worker.engine import upstream_vision as mlx_vlm  # an extra of its own, and heavy
    except ImportError as error:
        raise CannotStart(
            f"This model sees images, and mlx-vlm cannot be imported ({error}): pip install 'mlx-sluice[vision]', or "
            "serve it for text alone with SLUICE_VISION=off."
        ) from error
    network, config = mlx_vlm.load_model(folder, lazy=True, trust_remote_code=trusted), _said(folder, "config.json")
    processor = mlx_vlm.load_processor(folder, add_detokenizer=False, trust_remote_code=trusted)
    twin = twin_of(network, config)
    make_family, make_eyes = _KNOWN[config["model_type"]]
    family = make_family(network, twin, mlx_vlm.make_prompt_cache)
    template = processor.chat_template or processor.tokenizer.chat_template
    return twin, config, Vision(network, family, make_eyes(processor, family.placeholder), template)


def twin_of(seeing: nn.Module, config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model, with the very arrays of mlx-vlm's. Raises ValueError where the two have other weights."""
    model_class, args_class = get_classes(config)
    twin = model_class(args_class.from_dict(json.loads(json.dumps(config))))  # some write into what they are given
    quantized = {path: layer for path, layer in seeing.named_modules() if hasattr(layer, "bits")}

    def as_there(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        there = quantized.get(path)
        return there is not None and {"group_size": there.group_size, "bits": there.bits, "mode": there.mode}

    if quantized:
        nn.quantize(twin, class_predicate=as_there)
    weights = {name: array for name, array in tree_flatten(seeing.parameters()) if name.startswith("language_model.")}
    twin.load_weights([*weights.items()], strict=True)
    if any(array is not weights[name] for name, array in tree_flatten(twin.parameters())):
        raise ValueError("mlx-lm's model does not take mlx-vlm's weights as they are")
    twin.eval()
    return twin


def _refuse_code(folder: Path) -> None:
    for name in _SAID_IN:
        for field in "model_file", "auto_map":
            if named := _said(folder, name).get(field):
                raise CannotStart(
                    f"{folder / name} names code of its own ({field}: {json.dumps(named)}), which would run on this "
                    "machine. Where you trust it, allow it with SLUICE_TRUST_MODEL_CODE=true."
                )


def _said(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    return json.loads(file.read_text()) if file.is_file() else {}
