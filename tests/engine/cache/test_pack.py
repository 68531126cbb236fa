"""Rows that share the forward of a prompt chunk. The oracle is each row computed alone."""

import random
from dataclasses import astuple
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.tiny import CANNOT_BATCH, FAMILIES, ONLY_MLX_VLM, alone, build, network, prompt
from worker.engine.cache.layers import layers
from worker.engine.cache.pack import Pack, packing_of
from worker.engine.cache.slots import batch_of, join, materialize
from worker.engine.upstream.mlx_lm import ArraysCache, make_prompt_cache

ANSWER = 8
PADDING = 77
CHUNKS = (1, 2, 7, 16, 21)  # around the tiny models' window of 16
TOLERANCE = 1e-3  # of fp32 logits, whose magnitude is about 10


class Prompt:
    """A prompt on its way into a cache of its own, and the logits of its last token so far."""

    def __init__(self, family: str, tokens: int, seed: int) -> None:
        self.network, self.tokens = network(family), prompt(tokens, seed)
        self.cache: list[Any] = make_prompt_cache(self.network)
        self.done, self.logits = 0, mx.zeros(())

    @property
    def rest(self) -> int:
        return len(self.tokens) - self.done

    def chunk(self, tokens: int) -> list[int]:
        return [*self.tokens[self.done : self.done + tokens]]

    def advance(self, tokens: int) -> None:
        self.computed(tokens, self.network(mx.array([self.chunk(tokens)]), cache=self.cache)[0, -1])

    def computed(self, tokens: int, logits: mx.array) -> None:
        materialize(self.cache)
        self.done, self.logits = self.done + tokens, logits


def advance_together(prompts: list[Prompt], *tokens: int) -> None:
    """Compute the next tokens of all prompts: the same number, or different ones, with padding."""
    if len(tokens) == 1:
        tokens *= len(prompts)
    pack = Pack([each.cache for each in prompts], [each.done for each in prompts], tokens)
    padded = [[*each.chunk(own), *[PADDING] * (max(tokens) - own)] for each, own in zip(prompts, tokens, strict=True)]
    logits = prompts[0].network(mx.array(padded), cache=pack.layers)
    pack.compute()
    for index, (each, own) in enumerate(zip(prompts, tokens, strict=True)):
        pack.unpack(index)
        each.computed(own, logits[index, own - 1])


@cache
def logits_alone(family: str, tokens: int, seed: int) -> mx.array:
    computed = Prompt(family, tokens, seed)
    computed.advance(tokens)
    return computed.logits


def answers(prompts: list[Prompt]) -> list[list[int]]:
    """Return the greedy answers, decoded in one batch of slots."""
    batch = batch_of(make_prompt_cache(prompts[0].network))
    for each in prompts:
        join(batch, each.cache)
    said = [[int(each.logits.argmax())] for each in prompts]
    for _ in range(ANSWER - 1):
        logits = prompts[0].network(mx.array([[each[-1]] for each in said]), cache=batch)[:, -1]
        for each, token in zip(said, logits.argmax(-1).tolist(), strict=True):
            each.append(token)
    return said


def assert_equals_alone(family: str, prompts: list[Prompt], shapes: list[tuple[int, int]]) -> None:
    for each, shape in zip(prompts, shapes, strict=True):
        assert mx.abs(each.logits - logits_alone(family, *shape)).max().item() < TOLERANCE
    for answer, shape in zip(answers(prompts), shapes, strict=True):
        expected = alone(network(family), prompt(*shape), ANSWER)
        assert answer[: len(expected)] == expected


@pytest.mark.parametrize("family", [*FAMILIES, *ONLY_MLX_VLM])
def test_rows_of_one_length_equal_those_alone(family: str) -> None:
    shapes = [(31, seed) for seed in range(3)]
    prompts = [Prompt(family, *shape) for shape in shapes]
    for tokens in (5, 18, 1, 7):
        advance_together(prompts, tokens)
    assert_equals_alone(family, prompts, shapes)


PACKING = cache(lambda family: packing_of(network(family)))


@pytest.mark.parametrize("family", [*FAMILIES, *ONLY_MLX_VLM])
def test_rows_with_changing_partners_equal_those_alone(family: str) -> None:
    rng = random.Random(family)
    packing = PACKING(family)
    shapes = [(rng.randrange(24, 60), seed) for seed in range(8)]
    prompts = [Prompt(family, *shape) for shape in shapes]
    packs = 0
    while waiting := [each for each in prompts if each.rest]:
        first = rng.choice(waiting)
        partners = [each for each in waiting if packing.key(each.done) == packing.key(first.done)]
        chosen = rng.sample(partners, min(len(partners), rng.randrange(1, 5)))
        most = rng.choice(CHUNKS)
        tokens = [min(most, each.rest) for each in chosen]
        advance_together(chosen, *(tokens if packing.padded else [min(tokens)] * len(chosen)))
        packs += len(chosen) > 1
    assert packs > 4
    assert_equals_alone(family, prompts, shapes)


NOT_PADDED = {"jamba", "recurrent_gemma", "rwkv7"}  # padding enters their states
NOT_RAGGED = {"deepseek_v32"}  # selects columns


@pytest.mark.parametrize("family", [*FAMILIES, *ONLY_MLX_VLM])
def test_rows_that_cannot_share_a_forward_are_known(family: str) -> None:
    recurrent = any(isinstance(layer, ArraysCache) for layer in layers(make_prompt_cache(network(family))))
    assert astuple(PACKING(family)) == (True, family not in NOT_RAGGED, recurrent, family not in NOT_PADDED)


def test_layers_of_other_classes_are_not_packed() -> None:
    assert not packing_of(build(CANNOT_BATCH["llama4"])).possible


def test_row_without_a_state_shares_no_forward_with_one_that_has_a_state() -> None:
    old, new = Prompt("mamba2", 9, 0), Prompt("mamba2", 9, 1)
    old.advance(3)
    assert PACKING("mamba2").key(old.done) != PACKING("mamba2").key(new.done)
    with pytest.raises(ValueError, match="recurrent state"):
        advance_together([old, new], 3)


def test_failed_forward_leaves_the_caches_as_they_were() -> None:
    shapes = [(20, 0), (20, 1)]
    prompts = [Prompt("gemma3", *shape) for shape in shapes]
    for each in prompts:
        each.advance(7)
    Pack([each.cache for each in prompts], [7, 7], [5, 5]).layers[0].update_and_fetch(*[mx.zeros((2, 2, 5, 16))] * 2)
    for each in prompts:
        each.advance(13)
    assert_equals_alone("gemma3", prompts, shapes)
