"""Images, prompts with images, and the answers of mlx-vlm to each prompt alone."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.generate import generate_step
from PIL import Image

from models.tiny_vision import EOS, FILES, write_checkpoint
from worker.engine.model.load import Model, open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.vision.families import ImageProcessor
from worker.request import GenerationRequest, ProcessedImage


@cache
def folder(family: str, seed: int = 1) -> Path:
    return write_checkpoint(family, Path(mkdtemp(prefix="sluice-vision-")), seed=seed)


@cache
def model(family: str, seed: int = 1) -> Model:
    return open_model(str(folder(family, seed)))


@cache
def image_processor(family: str) -> ImageProcessor:
    vision = model(family).vision
    assert vision is not None
    return vision.image_processor


@cache
def image(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of coarse squares, which stays distinct when it is scaled down, unlike noise."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


@cache
def processed(family: str, *which: int) -> ProcessedImage:
    """Return a preprocessed `image`."""
    return image_processor(family).preprocess(image(*which), repr(which).encode())


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    images: tuple[ProcessedImage, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """What tells this prompt of a family from others: images themselves cannot be hashed."""
        return self.tokens, tuple(image.digest for image in self.images)


def prompt(family: str, *parts: int | tuple[int, int, int], seed: int = 0) -> Prompt:
    """Return a prompt of text, given as numbers of tokens, and of images, given as (seed, width, height)."""
    rng, tokens, images = random.Random(seed), list[int](), list[ProcessedImage]()
    for part in parts:
        if isinstance(part, int):
            tokens += [rng.randrange(0, 256) for _ in range(part)]
        else:
            images.append(processed(family, *part))
            tokens += encoder(family)(FILES[family]["image"].replace(image_processor(family).marker, images[-1].text))
    return Prompt(tuple(tokens), tuple(images))


@cache
def encoder(family: str) -> Callable[[str], list[int]]:
    return MLXTokenizer(model(family).tokenizer).encode


def image_request(family: str, id: str, prompt: Prompt, max_tokens: int, **more: Any) -> GenerationRequest:
    return GenerationRequest(
        id,
        prompt.tokens,
        max_tokens,
        images=image_processor(family).prompt_images(prompt.tokens, prompt.images),
        **more,
    )


def alone(
    family: str, prompt: Prompt, max_tokens: int, *, first: int | None = None, by: Model | None = None
) -> list[int]:
    """Return the greedy answer of mlx-vlm's single-request path, up to the end of the sequence. `first`: its first
    token. `by`: another model than the family's, whose answers are kept for later calls."""
    if by is not None and by is not model(family):
        return _alone(by, family, prompt, max_tokens, first)
    key = family, prompt.key, max_tokens, first
    if key not in _ANSWERS:
        _ANSWERS[key] = _alone(model(family), family, prompt, max_tokens, first)
    return [*_ANSWERS[key]]


_ANSWERS: dict[object, list[int]] = {}


def _alone(by: Model, family: str, prompt: Prompt, max_tokens: int, first: int | None) -> list[int]:
    vision = by.vision
    assert vision is not None
    tokens, generated = mx.array([prompt.tokens]), list[int]()
    pixels, how = as_one_prompt(prompt.images)
    if family.startswith("gemma4"):  # as its processor sets it
        how["mm_token_type_ids"] = (tokens == vision.family.placeholder).astype(mx.int32)
    steps = generate_step(
        tokens, vision.network, pixels, mx.ones_like(tokens), max_tokens=max_tokens, temperature=0.0,
        prefill_step_size=None, logits_processors=_beginning(len(prompt.tokens), first), **how,
    )  # fmt: skip
    for token, _ in steps:
        if int(token) == EOS or len(generated) == max_tokens:
            break
        generated.append(int(token))
    return generated


def _beginning(prompt: int, token: int | None) -> list[Callable[[mx.array, mx.array], mx.array]]:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size == prompt:
            logits[:, token] = 1e9
        return logits

    return [] if token is None else [process]


def as_one_prompt(images: Sequences[ProcessedImage]) -> tuple[Any, dict[str, Any]]:
    """Return the inputs that a processor makes of several images of one prompt."""
    if not images:
        return None, {}
    pixel_inputs, how = [processed.pixel_inputs for processed in images], dict[str, Any]()
    pixels = [each["pixel_values"] for each in pixel_inputs]
    if "image_grid_thw" in pixel_inputs[0]:
        how["image_grid_thw"] = mx.array(np.concatenate([each["image_grid_thw"] for each in pixel_inputs]))
        pixels = [_filmed(each) for each in pixels]
    elif "image_sizes" in pixel_inputs[0]:
        how["image_sizes"] = [each["image_sizes"][0] for each in pixel_inputs]
        pixels = _padded(pixels)
    elif len({each.shape for each in pixels}) > 1:
        return [mx.array(each[0]) for each in pixels], how
    return mx.array(np.concatenate(pixels)), how


def _filmed(patches: Any) -> Any:
    """Return patches of two equal frames: see `qwen_processor`."""
    return patches.reshape(len(patches), 3, 1, -1).repeat(2, axis=2).reshape(len(patches), -1)


def _padded(pixels: list[Any]) -> list[Any]:
    """Return images of different sizes, padded to the largest."""
    height, width = (max(each.shape[axis] for each in pixels) for axis in (2, 3))
    return [np.pad(p, [(0, 0), (0, 0), (0, height - p.shape[2]), (0, width - p.shape[3])]) for p in pixels]
