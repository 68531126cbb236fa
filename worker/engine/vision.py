"""A model that sees: its folder recognised, loaded once by mlx-vlm, and a twin of its language model for mlx-lm.

The twin's weights are the same arrays, so it takes no memory. Rows decode with it, and whoever sends text alone never
comes near mlx-vlm.
"""

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.eyes import Eyes, GridEyes, RowEyes, SoftEyes, SquareEyes
from worker.engine.families import DeepQwen, Gemma3, Gemma4, MakeFamily, Mistral3, Pixtral, Qwen
from worker.engine.folder import read_json, refuse_code
from worker.engine.heads import tensor_names
from worker.engine.scene import Family
from worker.engine.upstream import get_classes, make_prompt_cache
from worker.errors import CannotStart
from worker.schedule.sequence import Sight

logger = logging.getLogger("sluice.engine")

TEXT_ALONE = "serve it for text alone with SLUICE_VISION=off"  # what else can be done

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
_TRIED_IMAGE = 160, 96  # pixels
_TRIED_TOKENS, _COMPARED = 128, 16  # all logits of a large vocabulary would take much memory
# The same arithmetic in bfloat16, in another order, made 0.003 of it; another base of the positions 0.7.
_ALIKE = 0.2


@dataclass(frozen=True, slots=True)
class Vision:
    network: nn.Module  # mlx-vlm's, with the language model in it
    family: Family
    eyes: Eyes
    template: str | None  # the processor's own, which shows images; that of the tokenizer may not, or not be there


def sees(folder: Path) -> bool:
    """Whether images are served."""
    config = read_json(folder, "config.json")
    names = (name for file in folder.glob("model*.safetensors") for name in tensor_names(file))
    why_not = why_blind(config, names)
    if why_not and config.get("vision_config"):
        logger.warning(why_not)
    return why_not is None


def why_blind(config: dict[str, Any], names: Iterable[str] | None) -> str | None:
    """Why images are not served with a model, while its text can be; None where they are. `names`: of its tensors, None
    where those are not known."""
    if not config.get("vision_config"):
        return "Its config tells of no vision tower."
    if (family := config.get("model_type")) not in _KNOWN:
        return f"Images are not served with a model of type {family}, text is."
    if names is not None and not any(tower in name for name in names for tower in _TOWERS):
        return "Images are not served without the vision tower's weights, which conversions for text drop; text is."
    return None


def open_vision(folder: Path, *, trusted: bool) -> tuple[nn.Module, dict[str, Any], Vision]:
    """The twin, its settings as a config has them, and what sees. Lazily: no weight is read. `trusted`: the folder's
    own code may run.

    Raises `CannotStart`, and what loading raises."""
    refuse_unready(folder, trusted=trusted)
    from worker.engine import upstream_vision as mlx_vlm

    network = mlx_vlm.load_model(folder, lazy=True, trust_remote_code=trusted)
    config = _filled(read_json(folder, "config.json"), network.config.text_config)
    processor = mlx_vlm.load_processor(folder, add_detokenizer=False, trust_remote_code=trusted)
    twin = twin_of(network, config)
    make_family, make_eyes = _KNOWN[config["model_type"]]
    family = make_family(network, twin, mlx_vlm.make_prompt_cache)
    _refuse_other_caches(family, twin)
    eyes = make_eyes(processor, family.placeholder)
    _refuse_other_tokens(family, eyes.look(mlx_vlm.new_image("RGB", _TRIED_IMAGE), b"tried"))
    return twin, config, Vision(network, family, eyes, processor.chat_template or processor.tokenizer.chat_template)


def refuse_unready(folder: Path, *, trusted: bool) -> None:
    """What can be told without the weights. Raises `CannotStart`."""
    if not trusted:
        refuse_code(folder, "model_file", "auto_map")
    _refuse_unprepared(folder)
    try:
        import worker.engine.upstream_vision  # noqa: F401  an extra of its own, and heavy
    except ImportError as error:
        raise CannotStart(
            f"This model sees images, and mlx-vlm cannot be imported ({error}): "
            f"pip install 'mlx-vlm>=0.7.10' 'pillow>=12', or {TEXT_ALONE}."
        ) from error


def refuse_unlike(seeing: nn.Module, twin: nn.Module, vocab: int) -> None:
    """Takes the weights in. Raises `CannotStart` where the two would not say the same: mlx-lm and mlx-vlm read some
    settings under other names."""
    tokens = (mx.arange(_TRIED_TOKENS) * 7919 % vocab)[None]
    logits = twin(tokens), seeing.language_model(tokens).logits
    ours, theirs = (each[:, -_COMPARED:].astype(mx.float32) for each in logits)
    away = mx.linalg.norm(ours - theirs, axis=-1) / mx.linalg.norm(theirs, axis=-1)
    if bool(mx.median(away) > _ALIKE):
        raise CannotStart(
            "mlx-lm computes something else with this model's weights and settings than mlx-vlm does, so answers about "
            f"images would be wrong: {TEXT_ALONE}."
        )


def _filled(config: dict[str, Any], settings: Any) -> dict[str, Any]:
    """With mlx-vlm's settings of the language model where the checkpoint says nothing: mlx-lm would take others."""
    text = config.get("text_config", config)
    text.update(copy.deepcopy({name: value for name, value in vars(settings).items() if name not in text}))
    return config


def twin_of(seeing: nn.Module, config: dict[str, Any]) -> nn.Module:
    """mlx-lm's model, with the very arrays of mlx-vlm's. Raises ValueError where the two have other weights."""
    model_class, args_class = get_classes(config)
    twin = model_class(args_class.from_dict(copy.deepcopy(config)))  # some write into what they are given
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


def _refuse_unprepared(folder: Path) -> None:
    """mlx-vlm would guess."""
    own, others = read_json(folder, "preprocessor_config.json"), read_json(folder, "processor_config.json")
    if not (own or others.get("image_processor")):
        raise CannotStart(
            f"How this model's images are prepared is said in preprocessor_config.json or, as image_processor, in "
            f"processor_config.json, and {folder} has neither: take it from the model's repository, or {TEXT_ALONE}."
        )


def _refuse_other_caches(family: Family, twin: nn.Module) -> None:
    """What one library computes, the other one goes on from. Nothing is computed here: see `lent`."""
    token, (positions, _) = mx.array([[0]]), family.positions(1, [])
    try:
        family.read(make_prompt_cache(twin), token, family.embeddings(token), positions, [])
    except NotImplementedError as error:
        raise CannotStart(f"Prompts with images cannot be computed: {error}. You can {TEXT_ALONE}.") from error


def _refuse_other_tokens(family: Family, sight: Sight) -> None:
    """Nothing is computed: the shape is known before."""
    if (rows := len(family.encode(sight.seen, []).rows)) != sight.tokens:
        raise CannotStart(
            f"The config of this model makes {rows} tokens of an image that its processor makes {sight.tokens} of: its "
            "files are not of one model. Copy preprocessor_config.json and processor_config.json from its own "
            f"repository, or {TEXT_ALONE}."
        )
