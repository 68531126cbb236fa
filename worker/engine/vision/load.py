"""Recognize and load a vision model: mlx-vlm loads it once, and mlx-lm gets a text model on the same weights.

The text model uses the same arrays, so it takes no memory. All rows decode with it, and requests without images never
call mlx-vlm."""

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.checkpoint import read_json, refuse_code, tensor_names
from worker.engine.upstream.mlx_lm import get_classes, make_prompt_cache
from worker.engine.vision.families import DeepQwen, Gemma3, Gemma4, MakeFamily, Mistral3, Pixtral, Qwen
from worker.engine.vision.inputs import Family
from worker.engine.vision.processors import (
    Gemma3ImageProcessor,
    Gemma4ImageProcessor,
    ImageProcessor,
    PixtralImageProcessor,
    QwenImageProcessor,
)
from worker.errors import CannotStart
from worker.schedule.request import ProcessedImage

logger = logging.getLogger("sluice.engine")

TEXT_ONLY = "serve it for text only with SLUICE_VISION=off"  # the alternative that errors suggest

_TOWERS = "visual.", "vision_tower.", "vision_model.", "vision_encoder."
# Supported families by the model_type in the config.
_KNOWN: dict[str, tuple[MakeFamily, type[ImageProcessor]]] = {
    "qwen2_vl": (Qwen, QwenImageProcessor),
    "qwen2_5_vl": (Qwen, QwenImageProcessor),
    "qwen3_vl": (DeepQwen, QwenImageProcessor),
    "qwen3_vl_moe": (DeepQwen, QwenImageProcessor),
    "qwen3_5": (DeepQwen, QwenImageProcessor),
    "qwen3_5_moe": (DeepQwen, QwenImageProcessor),
    "gemma3": (Gemma3, Gemma3ImageProcessor),
    "gemma4": (Gemma4, Gemma4ImageProcessor),
    "pixtral": (Pixtral, PixtralImageProcessor),
    "mistral3": (Mistral3, PixtralImageProcessor),
}
_TRIED_IMAGE = 160, 96  # pixels
_TRIED_TOKENS, _COMPARED = 128, 16  # not all positions: the logits of a large vocabulary take much memory
# Largest relative difference. The same arithmetic in another order gave 0.003 in bfloat16, another rope base 0.7.
_ALIKE = 0.2


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision part of a loaded model."""

    network: nn.Module  # mlx-vlm's model, its language model included
    family: Family
    image_processor: ImageProcessor
    template: str | None  # the processor's, which supports images; the tokenizer's may not, or be missing


def is_vision_model(folder: Path) -> bool:
    """Return True if images are served with the model in this folder. Logs the reason if the model has vision but is
    served without."""
    config = read_json(folder, "config.json")
    names = (name for file in folder.glob("model*.safetensors") for name in tensor_names(file))
    why_not = vision_unsupported_reason(config, names)
    if why_not and config.get("vision_config"):
        logger.warning(why_not)
    return why_not is None


def vision_unsupported_reason(config: dict[str, Any], names: Iterable[str] | None) -> str | None:
    """Return why images are not served with a model whose text can be served; None if they are. `names`: names of its
    tensors, or None if unknown."""
    if not config.get("vision_config"):
        return "Its config has no vision encoder."
    if (family := config.get("model_type")) not in _KNOWN:
        return f"Models of type {family} are served for text only."
    if names is not None and not any(tower in name for name in names for tower in _TOWERS):
        return "It is served for text only: the weights of its vision encoder are missing, as in conversions for text."
    return None


def open_vision(folder: Path, *, trusted: bool) -> tuple[nn.Module, dict[str, Any], Vision]:
    """Return the text model, its config, and the vision part. Lazy: no weight is read. `trusted`: code in the folder
    may run.

    Raises `CannotStart`, and what the libraries raise while loading."""
    refuse_unready(folder, trusted=trusted)
    from worker.engine.upstream import mlx_vlm as mlx_vlm

    network = mlx_vlm.load_model(folder, lazy=True, trust_remote_code=trusted)
    config = _filled(read_json(folder, "config.json"), network.config.text_config)
    processor = mlx_vlm.load_processor(folder, add_detokenizer=False, trust_remote_code=trusted)
    twin = text_model_of(network, config)
    make_family, make_eyes = _KNOWN[config["model_type"]]
    family = make_family(network, twin, mlx_vlm.make_prompt_cache)
    _refuse_other_caches(family, twin)
    eyes = make_eyes(processor, family.placeholder)
    _refuse_other_tokens(family, eyes.preprocess(mlx_vlm.new_image("RGB", _TRIED_IMAGE), b"tried"))
    return twin, config, Vision(network, family, eyes, processor.chat_template or processor.tokenizer.chat_template)


def refuse_unready(folder: Path, *, trusted: bool) -> None:
    """Raise `CannotStart` if images cannot be served, as far as can be checked without the weights."""
    if not trusted:
        refuse_code(folder, "model_file", "auto_map")
    _refuse_unprepared(folder)
    try:
        import worker.engine.upstream.mlx_vlm  # noqa: F401  an optional extra, slow to import
    except ImportError as error:
        raise CannotStart(
            f"This is a vision model, and mlx-vlm cannot be imported ({error}): "
            f"pip install 'mlx-vlm>=0.7.10' 'pillow>=12', or {TEXT_ONLY}."
        ) from error


def refuse_unlike(seeing: nn.Module, twin: nn.Module, vocab: int) -> None:
    """Raise `CannotStart` if mlx-lm's and mlx-vlm's language models compute different logits: the two read some
    settings under different names. Computes a few tokens, so it loads the weights. Blocks."""
    tokens = (mx.arange(_TRIED_TOKENS) * 7919 % vocab)[None]
    logits = twin(tokens), seeing.language_model(tokens).logits
    ours, theirs = (each[:, -_COMPARED:].astype(mx.float32) for each in logits)
    away = mx.linalg.norm(ours - theirs, axis=-1) / mx.linalg.norm(theirs, axis=-1)
    if bool(mx.median(away) > _ALIKE):
        raise CannotStart(
            "mlx-lm and mlx-vlm compute different logits with this model's weights and settings, so answers about "
            f"images would be wrong: {TEXT_ONLY}."
        )


def _filled(config: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Add mlx-vlm's default settings of the language model that the checkpoint omits; mlx-lm has other defaults."""
    text = config.get("text_config", config)
    text.update(copy.deepcopy({name: value for name, value in vars(settings).items() if name not in text}))
    return config


def text_model_of(seeing: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return mlx-lm's text model with the arrays of mlx-vlm's model. Lazy. Raises ValueError if the two have different
    weights."""
    model_class, args_class = get_classes(config)
    twin = model_class(args_class.from_dict(copy.deepcopy(config)))  # some classes modify the config that they receive
    quantized = {path: layer for path, layer in seeing.named_modules() if hasattr(layer, "bits")}

    def as_there(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        there = quantized.get(path)
        return there is not None and {"group_size": there.group_size, "bits": there.bits, "mode": there.mode}

    if quantized:
        nn.quantize(twin, class_predicate=as_there)
    weights = {name: array for name, array in tree_flatten(seeing.parameters()) if name.startswith("language_model.")}
    twin.load_weights([*weights.items()], strict=True)
    if any(array is not weights[name] for name, array in tree_flatten(twin.parameters())):
        raise ValueError("mlx-lm's model does not accept mlx-vlm's weights unchanged")
    twin.eval()
    return twin


def _refuse_unprepared(folder: Path) -> None:
    """Raise `CannotStart` if the folder has no settings for preprocessing images; mlx-vlm would guess them."""
    own, others = read_json(folder, "preprocessor_config.json"), read_json(folder, "processor_config.json")
    if not (own or others.get("image_processor")):
        raise CannotStart(
            "The settings for preprocessing images are missing (preprocessor_config.json, or image_processor in "
            f"processor_config.json). Copy them into {folder} from the model's repository, or {TEXT_ONLY}."
        )


def _refuse_other_caches(family: Family, twin: nn.Module) -> None:
    """Raise `CannotStart` if the two libraries cache layers differently, since prefill in one continues in the other.
    Lazy, so nothing is computed: see `borrowed_by`."""
    token, (positions, _) = mx.array([[0]]), family.positions(1, [])
    try:
        family.read(make_prompt_cache(twin), token, family.embeddings(token), positions, [])
    except NotImplementedError as error:
        raise CannotStart(f"Prompts with images cannot be computed: {error}. You can {TEXT_ONLY}.") from error


def _refuse_other_tokens(family: Family, sight: ProcessedImage) -> None:
    """Raise `CannotStart` if encoder and processor disagree on the number of tokens. Lazy: only shapes are compared."""
    if (rows := len(family.encode(sight.pixel_inputs, []).rows)) != sight.tokens:
        raise CannotStart(
            f"The files in this folder belong to different models: one image becomes {rows} tokens by the config and "
            f"{sight.tokens} by the processor. Copy preprocessor_config.json and processor_config.json from the "
            f"model's own repository, or {TEXT_ONLY}."
        )
