"""Logits processors: bias and penalties, applied to one row's logits before a token is drawn."""

from collections.abc import Callable

import mlx.core as mx

from worker.schedule.request import Sampling

# Takes all tokens so far (n,) and logits (1, vocab), which it may overwrite; returns logits (1, vocab).
Processor = Callable[[mx.array, mx.array], mx.array]

_LEAST_PENALTY = 1e-6  # the smallest divisor that keeps logits finite, in float16 too


def processors_for(sampling: Sampling, prompt_tokens: int) -> tuple[Processor, ...]:
    """Return the logits processors for these parameters, in the order of application. The first `prompt_tokens` of the
    tokens that each takes are the prompt. Lazy."""
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
    """Divide the logits of tokens that occur in prompt or answer (Keskar et al., arXiv 1909.05858); negative ones are
    multiplied."""
    penalty = max(penalty, _LEAST_PENALTY)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        occurring = logits[:, tokens]
        logits[:, tokens] = mx.where(occurring < 0, occurring * penalty, occurring / penalty)
        return logits

    return process


def _counted(presence: float, frequency: float, prompt_tokens: int) -> Processor:
    """Subtract OpenAI's presence and frequency penalties, over the answer without the prompt."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens[prompt_tokens:]
        counts = mx.zeros(logits.shape[-1]).at[answer].add(1.0)
        return logits - (frequency * counts + presence * (counts > 0)).astype(logits.dtype)

    return process
