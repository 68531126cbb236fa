"""From logits to a token, for one row."""

from collections.abc import Callable

import mlx.core as mx

from worker.engine.upstream import apply_min_p, apply_top_k, apply_top_p, greedy_sampler
from worker.schedule.sequence import Sampling

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]

_MASK = (1 << 64) - 1
_LEAST = 1e-30  # of a temperature and a top_p: what a float32 can still divide by, and compare with


def sampler_for(sampling: Sampling, vocab: int, *, drawn: int = 0) -> Sampler:
    """Greedy rows share one object, so that the whole batch is one call."""
    if sampling.temperature == 0:
        return greedy_sampler  # type: ignore[no-any-return]
    return SeededSampler(sampling, vocab, drawn)


class SeededSampler:
    """Draw k is keyed by (seed, k), so a row says the same whatever else is in the batch, and goes on where it
    was when it is resumed after `drawn` tokens. Filters in mlx-lm's order: top_p, min_p, top_k, temperature."""

    def __init__(self, sampling: Sampling, vocab: int, drawn: int = 0) -> None:
        self._sampling, self._drawn = sampling, drawn
        self._top_k = sampling.top_k if sampling.top_k < vocab else 0
        self._temperature, self._top_p = max(sampling.temperature, _LEAST), max(sampling.top_p, _LEAST)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """logprobs (1, vocab) to a token (1,)."""
        how = self._sampling
        if self._top_p < 1:
            logprobs = apply_top_p(logprobs, self._top_p)
        if how.min_p > 0:
            logprobs = apply_min_p(logprobs, how.min_p)
        if self._top_k > 0:
            logprobs = apply_top_k(logprobs, self._top_k)
        key = mx.random.key(draw_key(how.seed, self._drawn))
        self._drawn += 1
        # In float16, which ends at 65504, a temperature of 1e-5 would leave no number at all.
        return mx.random.categorical(logprobs.astype(mx.float32) * (1 / self._temperature), key=key)


def draw_key(seed: int, k: int) -> int:
    """64 well-mixed bits of (seed, k): the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def processors_for(sampling: Sampling, prompt_tokens: int) -> tuple[Processor, ...]:
    """Each takes all tokens so far (n,) and logits (1, vocab)."""
    chosen: list[Processor] = []
    if sampling.logit_bias:
        chosen.append(_bias(sampling.logit_bias))
    if sampling.repetition_penalty != 1:
        chosen.append(_repetition(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        chosen.append(_counted(sampling.presence_penalty, sampling.frequency_penalty, prompt_tokens))
    return tuple(chosen)


def _bias(pairs: tuple[tuple[int, float], ...]) -> Processor:
    ids, values = mx.array([i for i, _ in pairs]), mx.array([v for _, v in pairs])
    return lambda tokens, logits: logits.at[:, ids].add(values)


def _repetition(penalty: float) -> Processor:
    """Divides what has been said, prompt included (Keskar et al., arXiv 1909.05858)."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        said = logits[:, tokens]
        logits[:, tokens] = mx.where(said < 0, said * penalty, said / penalty)
        return logits

    return process


def _counted(presence: float, frequency: float, prompt_tokens: int) -> Processor:
    """OpenAI's two: over the answer, without the prompt."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens[prompt_tokens:]
        counts = mx.zeros(logits.shape[-1]).at[answer].add(1.0)
        return logits - (frequency * counts + presence * (counts > 0)).astype(logits.dtype)

    return process
