"""Tiny models, one for each kind of cache and some with vision, each with a draft model, and the prompts for them."""

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from models import tiny_vision
from tests.engine import tiny
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt
from worker.engine.model.load import DraftModel, Model
from worker.engine.model.profile import profile, weights_bytes
from worker.request import GenerationRequest, PromptImage

Part = int | tuple[int, int, int]  # tokens of text, or an image by seed, width and height

DRAFT = "llama"  # shares no class with a model below, so each can be made to fail alone
DRAFT_CONTEXT = 1000


@dataclass(frozen=True)
class Family:
    name: str
    sees: bool = False

    @property
    def model(self) -> Model:
        return _model(self)

    @property
    def end(self) -> int:
        """The end-of-sequence token."""
        return tiny_vision.EOS if self.sees else tiny.EOS

    @property
    def unused(self) -> tuple[int, int, int]:
        """Three tokens that occur in no prompt of `prompt`. A model may sample them."""
        return (300, 301, 302) if self.sees else (5, 6, 7)

    def is_text(self, tokens: Sequence[int]) -> bool:
        """Return True if no token marks an image or a part of one."""
        return not self.sees or not {*tokens} & {*tiny_vision.IDS.values()}


@cache
def _model(family: Family) -> Model:
    own = cases.model(family.name) if family.sees else tiny.model(family.name)
    network = tiny.network(DRAFT)
    costs = profile(network, tiny.FAMILIES[DRAFT]).costs(weights_bytes=weights_bytes(network))
    both = replace(own.costs, draft_bytes=costs.weights_bytes, draft=costs)
    return replace(own, draft=DraftModel(network, DRAFT_CONTEXT), costs=both)


@cache
def prompt(family: Family, *parts: Part, seed: int) -> Prompt:
    """Return a prompt of random tokens and of images. Equal arguments give the same object."""
    if family.sees:
        return cases.prompt(family.name, *parts, seed=seed)
    return Prompt(tiny.prompt(sum(part for part in parts if isinstance(part, int)), seed))


def joined(*parts: Prompt) -> Prompt:
    tokens, sights = (sum(each, ()) for each in zip(*((part.tokens, part.images) for part in parts), strict=True))
    return Prompt(tokens, sights)


def with_other_images(family: Family, prompt: Prompt) -> Prompt:
    """Return the same tokens with images of the same sizes that show something else."""
    shown = [literal_eval(image.digest.decode()) for image in prompt.images]
    return Prompt(prompt.tokens, tuple(cases.processed(family.name, seed + 20, *size) for seed, *size in shown))


def images_of(family: Family, prompt: Prompt) -> tuple[PromptImage, ...]:
    return cases.image_processor(family.name).prompt_images(prompt.tokens, prompt.images) if prompt.images else ()


def request(family: Family, id: str, prompt: Prompt, max_tokens: int, **more: Any) -> GenerationRequest:
    return GenerationRequest(id, prompt.tokens, max_tokens, images=images_of(family, prompt), **more)
