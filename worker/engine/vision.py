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

from worker.engine.families import FAMILIES
from worker.engine.heads import tensor_names
from worker.engine.scene import Family
from worker.engine.upstream import get_classes
from worker.errors import CannotStart

logger = logging.getLogger("sluice.engine")

_SAID_IN = "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"
_TOWERS = "visual.", "vision_tower.", "vision_model.", "vision_encoder."


@dataclass(frozen=True, slots=True)
class Vision:
    network: nn.Module  # mlx-vlm's, with the language model in it
    family: Family
    processor: Any


def sees(folder: Path) -> bool:
    """Whether there is a vision tower, not in the config alone: conversions for text drop its weights. A model of a
    family that we do not know sees nothing: its text can be served."""
    config = _said(folder, "config.json")
    if not config.get("vision_config"):
        return False
    names = (name for file in folder.glob("model*.safetensors") for name in tensor_names(file))
    there = any(tower in name for name in names for tower in _TOWERS)
    if there and config["model_type"] not in FAMILIES:
        logger.warning("Images are not served with a model of type %s, text is.", config["model_type"])
    return there and config["model_type"] in FAMILIES


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
    family = FAMILIES[config["model_type"]](network, mlx_vlm.make_prompt_cache)
    processor = mlx_vlm.load_processor(folder, add_detokenizer=False, trust_remote_code=trusted)
    return twin_of(network, config), config, Vision(network, family, processor)


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
