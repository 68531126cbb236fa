"""Answers of single requests, by the single-request paths of mlx-lm and mlx-vlm."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from mlx_vlm.generate import generate_step as generate_step_with_images

from tests.engine.machine import grammars
from tests.engine.machine.families import Family, request
from tests.engine.prefill.test_sparse import kept_logits
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt
from tests.engine.vision.test_specprefill import kept_logits_with_images
from worker.engine.sampling.sampler import draw, draw_key, sampling_kind
from worker.request import GenerationRequest, Range, Sampling

SHORT, LONGEST = 3, 12  # tokens of an answer

Answer = list[tuple[int, float]]  # tokens with their logprobs, up to the end of the sequence
Steps = Iterable[tuple[int, mx.array]]  # each token, and the logprobs (vocab,) that it was drawn from


class Chooser:
    """Chooses the tokens of one answer, as its request demands, from logits of the upstream libraries."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request, self.kind = request, sampling_kind(request.sampling)
        self._grammar = request.grammar
        self._accepted, self._drawn = len(request.prompt), 0

    def next_key(self) -> tuple[int, int]:
        key = draw_key(self.request.sampling.seed, self._drawn)
        self._drawn += 1
        return key >> 32, key & 0xFFFFFFFF

    def process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        logits = processed(self.request.sampling, tokens, len(self.request.prompt), logits)
        return self._masked(tokens, logits) if self._grammar else logits

    def _masked(self, tokens: mx.array, logits: mx.array) -> mx.array:
        assert self._grammar is not None
        for token in tokens[self._accepted :].tolist():  # type: ignore[union-attr]
            self._grammar.accept(int(token))  # type: ignore[arg-type]
        self._accepted = tokens.size
        if (mask := self._grammar.bitmask()) is None:
            return logits
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = np.resize(np.pad(bits, (0, max(0, logits.shape[-1] - bits.size))), logits.shape[-1])
        return mx.where(mx.array(allowed.astype(bool)), logits, -mx.inf)

    def draw(self, logprobs: mx.array) -> mx.array:
        return draw(logprobs, [self])


def processed(sampling: Sampling, tokens: mx.array, prompt_tokens: int, logits: mx.array) -> mx.array:
    """Return the logits (1, vocab) of a row with these tokens after bias and penalties, by mlx-lm's own processors."""
    all_, answer = {"repetition_context_size": tokens.size}, tokens[prompt_tokens:]
    own = {"presence_context_size": tokens.size, "frequency_context_size": tokens.size}
    for process in make_logits_processors(dict(sampling.logit_bias), sampling.repetition_penalty, **all_):
        logits = process(tokens, logits)
    penalties = {"presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty}
    for process in make_logits_processors(**penalties, **own):
        logits = process(answer, logits)
    return logits


@cache
def alone(
    family: Family,
    prompt: Prompt,
    sampling: Sampling,
    grammar: grammars.Plan | None,
    kept: tuple[Range, ...] | None = None,
    tokens: int = LONGEST,
) -> Answer:
    """Return the answer of at most `tokens` tokens to a prompt of which only the tokens in `kept` are computed; None:
    all of them."""
    state = grammars.make(family, grammar)
    chooser = Chooser(request(family, "alone", prompt, tokens, sampling=sampling, grammar=state))
    answer: Answer = []
    for token, logprobs in _steps(family, prompt, kept, chooser):
        if token == family.end or len(answer) == tokens:
            break
        answer.append((token, logprobs[token].item()))
    return answer


def _steps(family: Family, prompt: Prompt, kept: tuple[Range, ...] | None, chooser: Chooser) -> Steps:
    most = chooser.request.max_tokens
    how: dict[str, Any] = {"sampler": chooser.draw, "logits_processors": [chooser.process], "max_tokens": most}
    if kept is not None and prompt.images:
        return _chosen(prompt, *kept_logits_with_images(family.name, prompt, kept), chooser)
    if kept is not None:
        return _chosen(prompt, *kept_logits(family.model.network, prompt.tokens, kept), chooser)
    if family.sees:
        return _with_images(family, prompt, how)
    return (
        (int(token), logprobs)
        for token, logprobs in generate_step(mx.array(prompt.tokens), family.model.network, **how)
    )


def _with_images(family: Family, prompt: Prompt, how: dict[str, Any]) -> Steps:
    assert family.model.vision is not None
    tokens, (pixels, more) = mx.array([prompt.tokens]), cases.as_one_prompt(prompt.images)
    if family.name.startswith("gemma4"):  # as its processor does
        more["mm_token_type_ids"] = (tokens == family.model.vision.family.placeholder).astype(mx.int32)
    steps = generate_step_with_images(
        tokens, family.model.vision.network, pixels, mx.ones_like(tokens), prefill_step_size=None, **how, **more
    )
    return ((int(token), logprobs) for token, logprobs in steps)


def _chosen(
    prompt: Prompt, logits: mx.array, next_: Callable[[int, int], mx.array], chooser: Chooser
) -> Iterator[tuple[int, mx.array]]:
    tokens = list(prompt.tokens)
    for number in range(chooser.request.max_tokens + 1):
        processed = chooser.process(mx.array(tokens), logits[:, -1])
        logprobs = processed - mx.logsumexp(processed, axis=-1, keepdims=True)
        tokens.append(int(chooser.draw(logprobs)[0]))
        yield tokens[-1], logprobs[0]
        logits = next_(tokens[-1], number)
