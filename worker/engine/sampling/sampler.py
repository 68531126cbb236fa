"""Draw tokens from logits, for each row of a batch."""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

import mlx.core as mx

from worker.schedule.request import GenerationRequest, Sampling

Processor = Callable[[mx.array, mx.array], mx.array]

_MASK = (1 << 64) - 1
_LEAST_PENALTY = 1e-6  # the smallest divisor that keeps logits finite, in float16 too
_LEAST = 1e-30  # the smallest temperature and top_p that float32 can divide by and compare with


class Kind(NamedTuple):
    """Sampling method. Rows of one kind are drawn in one call; their temperatures, seeds, top_p and min_p may
    differ."""

    greedy: bool
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False


GREEDY = Kind(greedy=True)


def kind_of(how: Sampling) -> Kind:
    """Return the kind of these sampling parameters."""
    if how.temperature == 0 or how.top_k == 1:
        return GREEDY
    return Kind(False, how.top_k, how.top_p < 1, how.min_p > 0)


class Drawing(Protocol):
    """The part of a row that drawing uses."""

    request: GenerationRequest
    kind: Kind

    def next_key(self) -> tuple[int, int]:
        """Return the random key of the next draw as two 32-bit halves, and advance."""


def draw(logprobs: mx.array, rows: Many[Drawing]) -> mx.array:
    """Draw one token for each row: `logprobs` (rows, vocab) to tokens (rows,). Each row draws bit for bit what it would
    draw alone. Lazy. Advances the random keys of rows that are not greedy."""
    places: dict[Kind, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.kind, []).append(place)
    if len(places) == 1:
        return _draw_alike(rows[0].kind, logprobs, rows)
    drawn = [_draw_alike(kind, logprobs[mx.array(at)], [rows[i] for i in at]) for kind, at in places.items()]
    came_from = [place for at in places.values() for place in at]
    back = sorted(range(len(rows)), key=came_from.__getitem__)
    return mx.concatenate(drawn)[mx.array(back)]


def _draw_alike(kind: Kind, logprobs: mx.array, rows: Many[Drawing]) -> mx.array:
    if kind.greedy:
        return mx.argmax(logprobs, axis=-1)
    hows = [row.request.sampling for row in rows]
    logprobs = normalized(logprobs)
    if kind.top_k or kind.top_p or kind.min_p:
        logprobs = mx.where(logprobs < _threshold(kind, logprobs, hows), -math.inf, logprobs)
    sharpness = _column(1 / max(how.temperature, _LEAST) for how in hows)
    keys = mx.array([row.next_key() for row in rows], dtype=mx.uint32)
    return _categorical(logprobs * sharpness, keys)


_categorical = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))


def _threshold(kind: Kind, logprobs: mx.array, hows: list[Sampling]) -> mx.array:
    """Return the smallest log probability that may be drawn, (rows, 1). Filters apply in mlx-lm's order: top_p over
    all, min_p, top_k, then temperature.

    mlx-lm's own functions are not used, since they are recompiled, in about a second, for each number of rows and each
    top_p (mlx-lm 0.32.2)."""
    candidates, least = logprobs, mx.array(-math.inf)
    if 0 < kind.top_k < logprobs.shape[-1]:
        candidates = mx.topk(logprobs, kind.top_k, axis=-1)
        least = mx.min(candidates, axis=-1, keepdims=True)
    if kind.top_p:  # over the candidates only: a wider nucleus would be cut to them anyway
        least = mx.maximum(least, _nucleus(candidates, _column(max(how.top_p, _LEAST) for how in hows)))
    if kind.min_p:
        best = mx.max(candidates, axis=-1, keepdims=True)
        least = mx.maximum(least, best + _column(math.log(how.min_p) for how in hows))
    return least


def _nucleus(candidates: mx.array, top_p: mx.array) -> mx.array:
    """Return the smallest log probability in the nucleus, (rows, 1): the tokens before it cover less than top_p."""
    ranked = mx.sort(candidates, axis=-1)
    mass_before = mx.cumsum(mx.exp(ranked), axis=-1, reverse=True, inclusive=False)
    return mx.min(mx.where(mass_before < top_p, ranked, math.inf), axis=-1, keepdims=True)


def normalized(logprobs: mx.array) -> mx.array:
    """Return log probabilities in float32, renormalized if they were not: in half precision mlx-lm's do not sum to one.
    (rows, vocab), lazy."""
    if logprobs.dtype == mx.float32:
        return logprobs
    logprobs = logprobs.astype(mx.float32)
    return logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)


def _column(values: Iterable[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def draw_key(seed: int, k: int) -> int:
    """Return 64 well-mixed bits of (seed, k), by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def processors_for(sampling: Sampling, prompt_tokens: int) -> tuple[Processor, ...]:
    """Return the logits processors for these parameters. Each takes all tokens so far (n,), of which the first
    `prompt_tokens` are the prompt, and logits (1, vocab). Lazy."""
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
        said = logits[:, tokens]
        logits[:, tokens] = mx.where(said < 0, said * penalty, said / penalty)
        return logits

    return process


def _counted(presence: float, frequency: float, prompt_tokens: int) -> Processor:
    """Subtract OpenAI's presence and frequency penalties, over the answer without the prompt."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens[prompt_tokens:]
        counts = mx.zeros(logits.shape[-1]).at[answer].add(1.0)
        return logits - (frequency * counts + presence * (counts > 0)).astype(logits.dtype)

    return process
