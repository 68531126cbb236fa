"""The gated delta rule in chunks: differentiable, with a few matmuls per chunk instead of one step per token.

The rule is Gated DeltaNet's (arXiv 2412.06464). The chunks are DeltaNet's WY form (arXiv 2406.06484): inside
a chunk all writes to the state are solved at once, as a unit lower triangular system, and only the state
is passed from chunk to chunk.
"""

from typing import NamedTuple

import mlx.core as mx

CHUNK = 32  # of 16, 32 and 64 the fastest for training on two CPU cores; a power of two, for the inverse


class _Chunks(NamedTuple):
    """Tensors by chunk. Every field is [n, B, H, C, ...], so that `_scan` reads whole slices."""

    reads: mx.array  # queries, decayed from the chunk's start
    scores: mx.array  # [.., C, C]: what each query takes from the writes of its own chunk
    writes: mx.array  # what the chunk would write if the state before it were empty
    erasures: mx.array  # keys by which the state before it changes those writes
    stores: mx.array  # keys, decayed to the chunk's end
    decay: mx.array  # [.., 1, 1]: of the state, over the whole chunk


def chunked_gated_delta(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, chunk: int = CHUNK
) -> tuple[mx.array, mx.array]:
    """For each token: decay the state, write beta * (v - state k) at k, and read it at q.

    q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; log_decay, beta [B, T, Hv]; Hv a multiple of Hk. The state starts
    empty. Returns the reads [B, T, Hv, Dv] and the last state [B, Hv, Dv, Dk], as mlx-lm lays it out.
    """
    length, repeats = q.shape[1], v.shape[2] // q.shape[2]
    q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    by_token = q, k, v, log_decay[..., None], beta[..., None]
    read, state = _scan(_solve(*(_in_chunks(x, chunk) for x in by_token)))
    return _in_tokens(read, length), state.swapaxes(-1, -2)


def _in_chunks(x: mx.array, chunk: int) -> mx.array:
    """Convert [B, T, H, D] to [n, B, H, C, D]. The padding at the end neither decays nor writes."""
    batch, length, heads, dim = x.shape
    x = mx.pad(x, [(0, 0), (0, -length % chunk), (0, 0), (0, 0)])
    return x.reshape(batch, -1, chunk, heads, dim).transpose(1, 0, 3, 2, 4)


def _in_tokens(x: mx.array, length: int) -> mx.array:
    chunks, batch, heads, chunk, dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, chunks * chunk, heads, dim)[:, :length]


def _solve(q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array) -> _Chunks:
    since_start = mx.cumsum(log_decay, axis=-2)
    at_end = since_start[..., -1:, :]
    decay = _decay_between(since_start)
    overlap = mx.tril(beta * (k @ k.swapaxes(-1, -2)) * decay, k=-1)
    solved = _inverse(overlap) * beta.swapaxes(-1, -2)
    return _Chunks(
        reads=q * mx.exp(since_start),
        scores=(q @ k.swapaxes(-1, -2)) * decay,
        writes=solved @ v,
        erasures=solved @ (k * mx.exp(since_start)),
        stores=k * mx.exp(at_end - since_start),
        decay=mx.exp(at_end),
    )


def _decay_between(since_start: mx.array) -> mx.array:
    """Convert [.., C, 1] to [.., C, C]: the decay from the column's token to the row's; zero for later tokens."""
    later = mx.triu(mx.ones((since_start.shape[-2],) * 2, dtype=mx.bool_), k=1)
    return mx.exp(mx.where(later, -mx.inf, since_start - since_start.swapaxes(-1, -2)))


def _inverse(strictly_lower: mx.array) -> mx.array:
    """Return the inverse of I + strictly_lower, with its gradient."""
    inverse = mx.stop_gradient(_inverse_by_doubling(strictly_lower))
    # One Newton step from the inverse: its value is the inverse again, and its derivative the inverse's own.
    return 2 * inverse - inverse @ (inverse + strictly_lower @ inverse)


def _inverse_by_doubling(strictly_lower: mx.array) -> mx.array:
    """Invert diagonal blocks of 1, 2, 4, ... rows.

    The product (I - A)(I + A^2)(I + A^4)... is as short, but its terms grow to 1e8 if keys repeat.
    """
    size = strictly_lower.shape[-1]
    place = mx.arange(size)
    inverse = mx.eye(size)
    block = 1
    while block < size:
        row, column = (place // block)[:, None], (place // block)[None, :]
        joins = (row == column + 1) & (row % 2 == 1)
        inverse = inverse - inverse @ mx.where(joins, strictly_lower, 0) @ inverse
        block *= 2
    return inverse


def _scan(chunks: _Chunks) -> tuple[mx.array, mx.array]:
    count, batch, heads, _, key_dim = chunks.reads.shape
    state = mx.zeros((batch, heads, key_dim, chunks.writes.shape[-1]))
    reads = []
    # Split instead of indexed: the gradient of each index would be a whole array of zeros.
    for one in zip(*(mx.split(x, count) for x in chunks), strict=True):
        now = _Chunks(*(x[0] for x in one))
        written = now.writes - now.erasures @ state
        reads.append(now.reads @ state + now.scores @ written)
        state = state * now.decay + now.stores.swapaxes(-1, -2) @ written
    return mx.stack(reads), state
