"""Load through mlx-vlm: vision models, and the text of families that mlx-lm does not have.

A vision model is loaded once, and mlx-lm gets a text model on the same weights. It uses the same arrays, so it takes no
memory. All rows decode with it, and requests without images never call mlx-vlm."""

import copy
import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine.checkpoint import read_json, refuse_code, tensor_names, text_config, told_as
from worker.engine.memory import EncoderCost, MemoryModel
from worker.engine.upstream.mlx_lm import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    get_classes,
    make_prompt_cache,
)
from worker.engine.vision.families import (
    Gemma3,
    Gemma4,
    ImageProcessor,
    MakeFamily,
    Pixtral,
    Qwen,
    gemma3_processor,
    gemma4_processor,
    pixtral_processor,
    qwen_processor,
)
from worker.engine.vision.feature_cache import EncoderRun
from worker.engine.vision.inputs import Family
from worker.errors import CannotStart
from worker.request import ProcessedImage, PromptImage

logger = logging.getLogger("sluice.engine")

TEXT_ONLY = "serve it for text only with SLUICE_VISION=off"  # the alternative that errors suggest

_ENCODER_PREFIXES = "visual.", "vision_tower.", "vision_model.", "vision_encoder."
# Supported families by the model_type in the config.
_KNOWN: dict[str, tuple[MakeFamily, Callable[[Any, int], ImageProcessor]]] = {
    "qwen2_vl": (Qwen, qwen_processor),
    "qwen2_5_vl": (Qwen, qwen_processor),
    "qwen3_vl": (Qwen, qwen_processor),
    "qwen3_vl_moe": (Qwen, qwen_processor),
    "qwen3_5": (Qwen, qwen_processor),
    "qwen3_5_moe": (Qwen, qwen_processor),
    "gemma3": (Gemma3, gemma3_processor),
    "gemma4": (Gemma4, gemma4_processor),
    "pixtral": (Pixtral, pixtral_processor),
    "mistral3": (Pixtral, pixtral_processor),
}
# Families that mlx-lm (0.32.2) does not have, and whose rows tests compare with mlx-vlm's path for a single request.
_TEXT_THROUGH_MLX_VLM = "cohere2_moe", "flint", "k2_horizon", "kolibri1", "mistral_large3", "step3p7", "xing4_0"
# Why rows of others cannot share a batch. Pools and indexes are no cache that rows join in place.
_ALONE = {
    "deepseek_v4": "its cache (PoolingCache) holds pools of tokens, which rows cannot join",
    "glm5_next": "its cache (PoolingCache) holds pools of tokens, which rows cannot join",
    "hy_v4": "its cache (HyV4KVCache) holds an index beside the keys, which rows cannot join",
    "qwen4_exp": "its cache (QSAKVCache) holds an index beside the keys, which rows cannot join",
    "minimax_m3": "its cache (MiniMaxM3KVCache) holds an index beside the keys, which rows cannot join",
    "z1t": "its cache (Z1TCache) holds states of its own, which rows cannot join",
    "inkling": "a row in a batch gets other tokens than alone",
    "hrm_text": "it reads a prompt in both directions, and prompts are computed in parts",
    "llada2_moe": "it writes its answer in blocks by diffusion, not token after token",
    "diffusion_gemma": "it writes its answer in blocks by diffusion, not token after token",
}
_TRIAL_IMAGE = 160, 96  # pixels
_TRIAL_TOKENS, _COMPARED = 128, 16  # not all positions: the logits of a large vocabulary take much memory


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
    if names is not None and not any(prefix in name for name in names for prefix in _ENCODER_PREFIXES):
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
    text_model = text_model_of(network, config)
    make_family, make_processor = _KNOWN[config["model_type"]]
    family = make_family(network, text_model, mlx_vlm.make_prompt_cache)
    _refuse_other_caches(family, text_model)
    image_processor = make_processor(processor, family.placeholder)
    _refuse_other_tokens(family, image_processor.preprocess(mlx_vlm.new_image("RGB", _TRIAL_IMAGE), b"tried"))
    return (
        text_model,
        config,
        Vision(network, family, image_processor, processor.chat_template or processor.tokenizer.chat_template),
    )


class LanguageModel(nn.Module):
    """The language model of mlx-vlm's model, called as mlx-lm's models are, with mlx-lm's caches."""

    def __init__(self, vlm: nn.Module) -> None:
        super().__init__()
        self.language_model = vlm.language_model

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        found: list[nn.Module] = self.language_model.layers
        return found

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Return the logits, (rows, tokens, vocabulary)."""
        logits: mx.array = self.language_model(tokens, cache=cache).logits
        return logits

    def make_cache(self) -> list[Any]:
        """Return mlx-lm's caches of the kinds that mlx-vlm's model would create."""
        from worker.engine.upstream import mlx_vlm

        return [_as_mlx_lm(layer) for layer in mlx_vlm.make_prompt_cache(self.language_model)]


def _as_mlx_lm(layer: Any) -> Any:
    from worker.engine.upstream import mlx_vlm

    kind = type(layer)  # exactly: a subclass may hold other state
    if kind is mlx_vlm.KVCache:
        return KVCache()
    if kind is mlx_vlm.RotatingKVCache:
        return RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    if kind is mlx_vlm.ArraysCache:
        return ArraysCache(len(layer.cache))
    if kind is mlx_vlm.CacheList:
        return CacheList(*map(_as_mlx_lm, layer.caches))
    raise NotImplementedError(f"its cache ({kind.__name__}) is of no kind that rows can share a batch with")


def only_in_mlx_vlm(config: dict[str, Any]) -> bool:
    """Return True if mlx-lm has no model of this type, and mlx-vlm has one. Imports mlx-vlm only if mlx-lm has none."""
    try:
        get_classes(config)
    except ValueError:
        try:
            from worker.engine.upstream import mlx_vlm
        except ImportError:
            return config["model_type"] in (*_TEXT_THROUGH_MLX_VLM, *_ALONE)
        name = mlx_vlm.get_model_type(config)
        return importlib.util.find_spec(f"mlx_vlm.models.{name}") is not None
    return False


def open_language_model(
    folder: Path, config: dict[str, Any], *, trusted: bool, with_weights: bool
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the text model of a family that only mlx-vlm has, and its config with mlx-vlm's defaults. Lazy.
    `with_weights`: False if the files of the weights are not here. Raises `CannotStart`."""
    name = config["model_type"].lower().replace("cohere2moe", "cohere2_moe")
    if name not in _TEXT_THROUGH_MLX_VLM:
        reason = _ALONE.get(name, "no test compares its rows in a batch with those alone")
        raise CannotStart(
            f"{folder} cannot be served. Only mlx-vlm has models of type {name}, and {reason}. Serve another model; "
            "mlx_vlm.server can serve this one if it writes text."
        )
    try:
        from worker.engine.upstream import mlx_vlm
    except ImportError as error:
        raise CannotStart(
            f"Only mlx-vlm has models of type {name}, and it cannot be imported ({error}): "
            "pip install 'mlx-vlm>=0.7.10' 'pillow>=12'."
        ) from error
    with told_as(lambda reason: f"mlx-vlm cannot load {folder}: {reason}"):
        if with_weights:
            vlm = mlx_vlm.load_model(folder, lazy=True, trust_remote_code=trusted)
        else:
            vlm = built_by_mlx_vlm(config)
        ends = read_json(folder, "generation_config.json").get("eos_token_id")
        filled = _filled(config, getattr(vlm.config, "text_config", None) or vlm.config)
        filled["eos_token_id"] = ends or config.get("eos_token_id") or text_config(config).get("eos_token_id")
        network = LanguageModel(vlm)
        network.make_cache()
    return network, filled


def built_by_mlx_vlm(config: dict[str, Any]) -> nn.Module:
    """Return mlx-vlm's model with random weights, built as its `load_model` does. Lazy."""
    from worker.engine.upstream import mlx_vlm

    given = {"text_config": {}, "vision_config": {}, "audio_config": {}, **copy.deepcopy(config)}
    module, _ = mlx_vlm.get_model_and_args(given)
    settings = module.ModelConfig.from_dict(given)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    vlm: nn.Module = module.Model(mlx_vlm.update_module_configs(settings, module, given, parts))
    vlm.eval()
    return vlm


def refuse_unready(folder: Path, *, trusted: bool) -> None:
    """Raise `CannotStart` if images cannot be served, as far as can be checked without the weights."""
    if not trusted:
        refuse_code(folder, "model_file", "auto_map")
    _refuse_missing_settings(folder)
    try:
        import worker.engine.upstream.mlx_vlm  # noqa: F401  an optional extra, slow to import
    except ImportError as error:
        raise CannotStart(
            f"This is a vision model, and mlx-vlm cannot be imported ({error}): "
            f"pip install 'mlx-vlm>=0.7.10' 'pillow>=12', or {TEXT_ONLY}."
        ) from error


def refuse_unlike(vlm: nn.Module, text_model: nn.Module, vocab: int) -> None:
    """Raise `CannotStart` if mlx-lm's and mlx-vlm's language models compute different logits: the two read some
    settings under different names. Computes a few tokens, so it loads the weights. Blocks."""
    tokens = (mx.arange(_TRIAL_TOKENS) * 7919 % vocab)[None]
    logits = text_model(tokens), vlm.language_model(tokens).logits
    mlx_lm_logits, mlx_vlm_logits = (each[:, -_COMPARED:].astype(mx.float32) for each in logits)
    difference = mx.linalg.norm(mlx_lm_logits - mlx_vlm_logits, axis=-1) / mx.linalg.norm(mlx_vlm_logits, axis=-1)
    # The same arithmetic in another order gave 0.003 in bfloat16, another rope base 0.7.
    if bool(mx.median(difference) > 0.2):
        raise CannotStart(
            "mlx-lm and mlx-vlm compute different logits with this model's weights and settings, so answers about "
            f"images would be wrong: {TEXT_ONLY}."
        )


def _filled(config: dict[str, Any], settings: Any) -> dict[str, Any]:
    """Add mlx-vlm's default settings of the language model that the checkpoint omits; mlx-lm has other defaults."""
    text = text_config(config)
    text.update(copy.deepcopy({name: value for name, value in vars(settings).items() if name not in text}))
    return config


def text_model_of(vlm: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return mlx-lm's text model with the arrays of mlx-vlm's model. Lazy. Raises ValueError if the two have different
    weights."""
    model_class, args_class = get_classes(config)
    # A copy, since some classes modify the config that they receive.
    text_model = model_class(args_class.from_dict(copy.deepcopy(config)))
    quantized = {path: layer for path, layer in vlm.named_modules() if hasattr(layer, "bits")}

    def as_loaded(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        loaded = quantized.get(path)
        return loaded is not None and {"group_size": loaded.group_size, "bits": loaded.bits, "mode": loaded.mode}

    if quantized:
        nn.quantize(text_model, class_predicate=as_loaded)
    weights = {name: array for name, array in tree_flatten(vlm.parameters()) if name.startswith("language_model.")}
    text_model.load_weights([*weights.items()], strict=True)
    if any(array is not weights[name] for name, array in tree_flatten(text_model.parameters())):
        raise ValueError("mlx-lm's model does not accept mlx-vlm's weights unchanged")
    text_model.eval()
    return text_model


def _refuse_missing_settings(folder: Path) -> None:
    """Raise `CannotStart` if the folder has no settings for preprocessing images; mlx-vlm would guess them."""
    preprocessor, processor = read_json(folder, "preprocessor_config.json"), read_json(folder, "processor_config.json")
    if not (preprocessor or processor.get("image_processor")):
        raise CannotStart(
            "The settings for preprocessing images are missing (preprocessor_config.json, or image_processor in "
            f"processor_config.json). Copy them into {folder} from the model's repository, or {TEXT_ONLY}."
        )


def _refuse_other_caches(family: Family, text_model: nn.Module) -> None:
    """Raise `CannotStart` if the two libraries cache layers differently, since prefill in one continues in the other.
    Lazy, so nothing is computed: see `lent_to`."""
    token, (positions, _) = mx.array([[0]]), family.positions(1, [])
    try:
        family.read(make_prompt_cache(text_model), token, family.embeddings(token), positions, [])
    except NotImplementedError as error:
        raise CannotStart(f"Prompts with images cannot be computed: {error}. You can {TEXT_ONLY}.") from error


def _refuse_other_tokens(family: Family, image: ProcessedImage) -> None:
    """Raise `CannotStart` if encoder and processor disagree on the number of tokens. Lazy: only shapes are compared."""
    if (rows := len(family.encode(image.pixel_inputs, []).rows)) != image.tokens:
        raise CannotStart(
            f"The files in this folder belong to different models: one image becomes {rows} tokens by the config and "
            f"{image.tokens} by the processor. Copy preprocessor_config.json and processor_config.json from the "
            f"model's own repository, or {TEXT_ONLY}."
        )


# Measure the memory that a vision encoder needs for an image. It grows with the image, and with its square if the
# device materializes attention scores. Encoders' layers differ too much to derive it from a config.

# Pixels per side: some 250 and 1,000 patches, enough for attention scores to show and quick enough for a start. The
# larger sizes are for processors that give the first two the same number of tokens.
_SIDES = 256, 512, 1024, 2048


def with_encoder_cost(costs: MemoryModel, vision: Vision, sides: Sequence[int] = _SIDES) -> MemoryModel:
    """Return the costs with the measured costs of images. `sides`: sizes of blank test images in pixels. Encodes some,
    so it loads the encoder's weights. Blocks."""
    blanks = _blank(vision, sides)
    small = next(blanks)
    large = next((image for image in blanks if image.tokens > small.tokens), small)
    _measure(vision, small)  # some encoders build tables at first use
    (small_bytes, features, _), (large_bytes, _, seconds) = (_most(vision, image) for image in (small, large))
    encoder_cost = EncoderCost.of(
        (small.tokens, small_bytes), (large.tokens, large_bytes), -(-features // small.tokens)
    )
    encoder_cost = replace(encoder_cost, tokens_per_s=large.tokens / seconds)
    if not vision.family.bidirectional_images:
        return replace(costs, encoder=encoder_cost)
    # A bidirectional mask takes a byte for each pair of tokens, and exists twice while it is built.
    return replace(costs, encoder=replace(encoder_cost, single_chunk=True), score_bytes=costs.score_bytes + 2)


def _blank(vision: Vision, sides: Sequence[int]) -> Iterator[ProcessedImage]:
    from worker.engine.upstream.mlx_vlm import new_image  # slow to import

    for side in sides:
        yield vision.image_processor.preprocess(new_image("RGB", (side, side)), b"blank")


def _most(vision: Vision, image: ProcessedImage) -> tuple[int, int, float]:
    """Return the most bytes and the fewest seconds of several measurements, with the bytes of the features."""
    # How much is held at once depends on how far evaluation runs ahead of the device: with small images beside other
    # work it varied by a quarter.
    measured = [_measure(vision, image) for _ in range(4)]
    return max(measured)[0], measured[0][1], min(seconds for *_, seconds in measured)


def _measure(vision: Vision, image: ProcessedImage) -> tuple[int, int, float]:
    """Return the peak bytes while encoding an image, the bytes of its features, and the seconds."""
    mx.clear_cache()  # else cached buffers would be reused, and the peak would be too low
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    run = EncoderRun(PromptImage(image.digest, (0, image.tokens), image.pixel_inputs), vision.family.encode)
    while (features := run.features) is None:
        run.advance(1)
    return mx.get_peak_memory() - before, features.nbytes, max(time.perf_counter() - began, 1e-6)
