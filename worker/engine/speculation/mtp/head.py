"""A multi-token-prediction (MTP) head, alone and together with the trunk whose parts it shares."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.speculation.mtp.trunk import RecordingTrunk, Trunk
from worker.engine.upstream.mlx_lm import KVCache


class MTPHead(nn.Module):
    """One decoder layer that predicts the token after the next one. Its weights are named as those of Qwen3.5 are
    behind `mtp.`; other layouts are renamed to these."""

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        """`layer`: a decoder layer with full attention. `eps`: of all norms."""
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def add_own_vocabulary(self, vocab: int) -> None:
        """Give the head an embedding and an output head of its own, for `vocab` tokens."""
        size = self.norm.weight.shape[0]
        self.embed_tokens = nn.Embedding(vocab, size)
        self.lm_head = nn.Linear(size, vocab, bias=False)

    def drop_unused(self, names: Container[str]) -> None:
        """Share the trunk's embedding or output head if the weights, of these names, have none."""
        for own in ("embed_tokens", "lm_head"):
            if own in self and f"{own}.weight" not in names:
                del self[own]

    def embed(self, tokens: mx.array, trunk: Trunk) -> mx.array:
        """Return the embeddings (rows, tokens, hidden_size) of the head's inputs. Lazy."""
        embedded: mx.array = self.embed_tokens(tokens) if "embed_tokens" in self else trunk.embed(tokens)
        return embedded

    def logits(self, hidden: mx.array, trunk: Trunk) -> mx.array:
        """Return the logits (rows, tokens, vocab) of the head's hidden states. Lazy."""
        logits: mx.array = self.lm_head(hidden) if "lm_head" in self else trunk.logits(hidden)
        return logits

    def __call__(
        self, embedded: mx.array, hidden: mx.array, mask: Any = "causal", cache: Sequence[Any] | None = None
    ) -> mx.array:
        """Return the head's hidden states (rows, tokens, hidden_size), behind its norm: entry t predicts token t + 2.
        `hidden`: of tokens t, behind the norm of the trunk, or of this head for deeper drafts. `embedded`: of tokens
        t + 1. Lazy; writes to `cache`."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(both, axis=-1))
        for layer, layer_cache in zip(self.layers, cache or [None], strict=True):
            x = layer(x, mask, layer_cache)
        states: mx.array = self.norm(x)
        return states


@dataclass(frozen=True, slots=True)
class Head:
    """An MTP head and the trunk that it shares."""

    network: MTPHead
    trunk: RecordingTrunk

    def states(self, tokens: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        """Return the head's hidden states (rows, tokens, hidden_size). `tokens`: those after the tokens of `hidden`.
        Lazy; writes to `cache`."""
        return self.network(self.network.embed(tokens, self.trunk), hidden, mask, [cache])

    def likeliest(self, states: mx.array) -> mx.array:
        """Return the most probable tokens (rows, tokens) by the head's hidden states. Lazy."""
        return mx.argmax(self.network.logits(states, self.trunk), axis=-1)


def entry_shape(head: Head) -> tuple[mx.array, mx.array]:
    """Return keys and values of one entry, which are not computed."""
    cache, token = KVCache(), mx.zeros((1, 1), mx.int32)
    head.states(token, head.network.embed(token, head.trunk), None, cache)
    keys, values = cache.keys_and_values()
    return keys, values
