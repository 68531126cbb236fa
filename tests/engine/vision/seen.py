"""Images, prompts with images in them, and what mlx-vlm says to each alone."""

import random
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

from tests.engine.vision.checkpoints import EOS, IDS, write_checkpoint
from worker.engine.eyes import Eyes, Sight
from worker.engine.model import Model, open_model
from worker.schedule.sequence import Sequence


@cache
def model(family: str, seed: int = 1) -> Model:
    folder = write_checkpoint(family, Path(mkdtemp(prefix="sluice-vision-")), seed=seed)
    return open_model(str(folder))


@cache
def eyes(family: str) -> Eyes:
    vision = model(family).vision
    assert vision is not None
    return Eyes(vision.processor, vision.family.placeholder)


@cache
def image(seed: int, width: int, height: int) -> Image.Image:
    """Of coarse squares: noise says less the smaller it is made."""
    dice = np.random.default_rng(seed)
    small = dice.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    sights: tuple[Sight, ...] = ()


def prompt(family: str, *parts: int | tuple[int, int, int], seed: int = 0) -> Prompt:
    """Of so many tokens of text, and of images by seed, width and height."""
    dice, tokens, sights = random.Random(seed), list[int](), list[Sight]()
    for part in parts:
        if isinstance(part, int):
            tokens += [dice.randrange(0, 256) for _ in range(part)]
        else:
            sights.append(eyes(family).look(image(*part)))
            tokens += surrounded(family, sights[-1].tokens)
    return Prompt(tuple(tokens), tuple(sights))


def surrounded(family: str, tokens: int) -> list[int]:
    vision = model(family).vision
    assert vision is not None
    return [IDS["<|vision_start|>"], *[vision.family.placeholder] * tokens, IDS["<|vision_end|>"]]


def asked(family: str, id: str, prompt: Prompt, max_tokens: int, **more: Any) -> Sequence:
    return Sequence(id, prompt.tokens, max_tokens, pictures=eyes(family).pictures(prompt.tokens, prompt.sights), **more)


def alone(family: str, prompt: Prompt, max_tokens: int) -> list[int]:
    """Greedy, by mlx-vlm's single-request path, up to the end of the sequence."""
    vision = model(family).vision
    assert vision is not None
    tokens, said = mx.array([prompt.tokens]), list[int]()
    pixels, how = together(prompt.sights)
    steps = generate_step(
        tokens, vision.network, pixels, mx.ones_like(tokens), max_tokens=max_tokens, temperature=0.0,
        prefill_step_size=None, **how,
    )  # fmt: skip
    for token, _ in steps:
        if int(token) == EOS or len(said) == max_tokens:
            break
        said.append(int(token))
    return said


def together(sights: Sequences[Sight]) -> tuple[mx.array | None, dict[str, mx.array]]:
    if not sights:
        return None, {}
    pixels, grids = (np.concatenate([s.seen[name] for s in sights]) for name in ("pixel_values", "image_grid_thw"))
    return mx.array(pixels), {"image_grid_thw": mx.array(grids)}
