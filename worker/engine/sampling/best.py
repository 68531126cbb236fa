"""The most probable tokens of each row, without sorting the vocabulary."""

import math

import mlx.core as mx

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
