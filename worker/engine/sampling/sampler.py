"""Draw tokens from logits, for each row of a batch."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from worker.engine.memory import DRAWN_AT_ONCE
from worker.outcomes import Logprobs
from worker.request import GenerationRequest, Sampling

_LEAST = 1e-30  # the smallest temperature and top_p that float32 can divide by and compare with


class SamplingKind(NamedTuple):
    """Sampling method. Rows of one kind are drawn in one call; their temperatures, seeds, top_p and min_p may
    differ."""

    greedy: bool
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False


GREEDY = SamplingKind(greedy=True)


def sampling_kind(sampling: Sampling) -> SamplingKind:
    """Return the kind of these sampling parameters."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return GREEDY
    return SamplingKind(False, sampling.top_k, sampling.top_p < 1, sampling.min_p > 0)


class _Drawing(Protocol):
    """The part of a row that drawing uses."""

    request: GenerationRequest
    kind: SamplingKind

    def next_key(self) -> tuple[int, int]:
        """Return the random key of the next draw as two 32-bit halves, and advance."""


class Sampler:
    """Draws a token for each of the same rows in every step. What does not change between steps is prepared once. Each
    row draws bit for bit what it would draw alone."""

    def __init__(self, rows: Sequence[_Drawing]) -> None:
        self._indices: dict[SamplingKind, list[int]] = {}
        for index, row in enumerate(rows):
            self._indices.setdefault(row.kind, []).append(index)
        self._alike = [_RowsAlike(kind, [rows[i] for i in at]) for kind, at in self._indices.items()]

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw from `logprobs` (rows, vocab): tokens (rows,). Lazy. Advances the random keys of rows that are not
        greedy."""
        if len(self._alike) == 1:
            return self._alike[0].draw(logprobs)
        indices, inverse = self._order
        drawn = [alike.draw(logprobs[at]) for alike, at in zip(self._alike, indices, strict=True)]
        return mx.concatenate(drawn)[inverse]

    @cached_property
    def _order(self) -> tuple[list[mx.array], mx.array]:
        """The indices of the rows of each kind, and for each row its own among all of these."""
        indices = [*self._indices.values()]
        order = [index for at in indices for index in at]
        return [mx.array(at) for at in indices], mx.array(sorted(range(len(order)), key=order.__getitem__))


def draw(logprobs: mx.array, rows: Sequence[_Drawing]) -> mx.array:
    """Draw one token for each row, as `Sampler` does: `logprobs` (rows, vocab) to tokens (rows,). Lazy."""
    return Sampler(rows)(logprobs)


class _RowsAlike:
    """Rows of one kind, which are drawn in one call."""

    def __init__(self, kind: SamplingKind, rows: Sequence[_Drawing]) -> None:
        self._kind, self._rows = kind, rows
        self._samplings = [row.request.sampling for row in rows]

    @cached_property
    def _sharpness(self) -> mx.array:
        return _column(1 / max(sampling.temperature, _LEAST) for sampling in self._samplings)

    @cached_property
    def _top_p(self) -> mx.array:
        return _column(max(sampling.top_p, _LEAST) for sampling in self._samplings)

    @cached_property
    def _min_p(self) -> mx.array:
        return _column(math.log(sampling.min_p) for sampling in self._samplings)

    def draw(self, logprobs: mx.array) -> mx.array:
        """Draw from `logprobs` (rows, vocab) of these rows. Lazy. Advances their random keys unless they are greedy."""
        kind = self._kind
        if kind.greedy:
            return mx.argmax(logprobs, axis=-1)
        most = max(1, DRAWN_AT_ONCE // logprobs.shape[-1])
        if len(self._rows) > most:
            return self._draw_parts(logprobs, most)
        logprobs = normalized(logprobs)
        if kind.top_k or kind.top_p or kind.min_p:
            logprobs = mx.where(logprobs < self._threshold(logprobs), -math.inf, logprobs)
        keys = mx.array([row.next_key() for row in self._rows], dtype=mx.uint32)
        return _categorical(logprobs * self._sharpness, keys)

    def _draw_parts(self, logprobs: mx.array, most: int) -> mx.array:
        """Draw for `most` rows after the other, so that what filters hold does not grow with the rows."""
        drawn = list[mx.array]()
        for start in range(0, len(self._rows), most):
            part = logprobs[start : start + most]
            if drawn:  # else MLX would compute all parts side by side
                (part,) = mx.depends([part], [drawn[-1]])
            drawn.append(_RowsAlike(self._kind, self._rows[start : start + most]).draw(part))
        return mx.concatenate(drawn)

    def _threshold(self, logprobs: mx.array) -> mx.array:
        """Return the smallest log probability that may be drawn, (rows, 1). Filters apply in mlx-lm's order: top_p over
        all, min_p, top_k, then temperature.

        mlx-lm's own functions are not used, since they are recompiled, in about a second, for each number of rows and
        each top_p (mlx-lm 0.32.2)."""
        kind, candidates = self._kind, logprobs
        least = mx.array(-math.inf)
        if 0 < kind.top_k < logprobs.shape[-1]:
            candidates = best_values(logprobs, kind.top_k)
            least = mx.min(candidates, axis=-1, keepdims=True)
        if kind.top_p:  # over the candidates only: a wider nucleus would be cut to them anyway
            least = mx.maximum(least, _nucleus(candidates, self._top_p))
        if kind.min_p:
            best = mx.max(candidates, axis=-1, keepdims=True)
            least = mx.maximum(least, best + self._min_p)
        return least


_categorical = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))


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
    return mx.array([[value] for value in values], dtype=mx.float32)


def draw_key(seed: int, k: int) -> int:
    """Return 64 well-mixed bits of (seed, k), by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


_CHUNK = 128  # tokens; with a usual n, all chunks of a vocabulary are about as many as the tokens of the n best chunks


def best_values(values: mx.array, n: int) -> mx.array:
    """Return the n largest log probabilities of each row (rows, n), in no order. `values` (rows, vocab): float32, at
    most 0 up to rounding; n < vocab. Lazy."""
    return mx.topk(_candidates(values, n)[0], n, axis=-1)


def best_ids(values: mx.array, n: int) -> mx.array:
    """Return the ids of the n most probable tokens of each row (rows, n), the most probable first; equal ones by
    ascending id. `values` (rows, vocab): log probabilities, float32, at most 0 up to rounding; n <= vocab. Lazy."""
    candidates, ids = _candidates(values, n)
    # All tokens precede the padding, except NaN, whose ids do not matter: they only have to exist.
    return mx.minimum(_ranked(candidates, ids, n), values.shape[-1] - 1)


def _candidates(values: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """Return the values (rows, m) and the ids, (rows, m) or (m,), of the n chunks with the largest maxima. They contain
    the n largest values: each of the n chunks holds a value that precedes all values of the other chunks."""
    rows, vocab = values.shape
    num_chunks = -(-vocab // _CHUNK)
    if n >= num_chunks:
        return values, mx.arange(vocab, dtype=mx.uint32)
    padded = mx.pad(values, [(0, 0), (0, -vocab % _CHUNK)], constant_values=-math.inf) if vocab % _CHUNK else values
    maxima = mx.max(padded.reshape(rows, num_chunks, _CHUNK), axis=-1)
    chunks = _ranked(maxima, mx.arange(num_chunks, dtype=mx.uint32), n)
    ids = (chunks[:, :, None] * _CHUNK + mx.arange(_CHUNK, dtype=mx.uint32)).reshape(rows, -1)
    return mx.take_along_axis(padded, ids, axis=-1), ids


def _ranked(values: mx.array, ids: mx.array, n: int) -> mx.array:
    """Return the ids of the n largest values of each row, the largest first; equal ones by ascending id.

    A partition does not define which of equal values it picks, so value and id are packed into one number. The bits of
    a negative float, read as an integer, are greater for smaller values."""
    order = (values.view(mx.uint32).astype(mx.uint64) << 32) | ids
    return mx.sort(mx.partition(order, n - 1, axis=-1)[:, :n], axis=-1).astype(mx.uint32)


class StepLogprobs:
    """Log probabilities of the tokens that a forward draws and of the most probable other ones, computed with it.

    A token of probability 0 is never among the others."""

    def __init__(self, logprobs: mx.array, tokens: mx.array, alternatives: list[int]) -> None:
        """`logprobs` (rows, vocab), `tokens` (rows,): the drawn ones. `alternatives`: number of most probable tokens to
        report, by row. Lazy."""
        logprobs = normalized(logprobs)
        self._ids = tokens[:, None]
        if num_best := min(max(alternatives), logprobs.shape[-1]):
            self._ids = mx.concatenate([self._ids, best_ids(logprobs, num_best)], axis=-1)
        # Rounding may yield a probability slightly above 1.
        self._values = mx.minimum(mx.take_along_axis(logprobs, self._ids, axis=-1), 0.0)
        self._alternatives = alternatives

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """The lazy arrays, of a few numbers for each row."""
        return self._ids, self._values

    @cached_property
    def rows(self) -> list[Logprobs]:
        """The log probabilities of each row. Blocks until they are computed."""
        ids, values = cast("list[list[int]]", self._ids.tolist()), cast("list[list[float]]", self._values.tolist())
        return [
            Logprobs(own, tuple(pair for pair in zip(best[:n], others[:n], strict=True) if pair[1] > -math.inf))
            for (_, *best), (own, *others), n in zip(ids, values, self._alternatives, strict=True)
        ]
