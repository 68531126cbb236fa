"""A multi-token-prediction (MTP) head, and the parts of its trunk that it shares."""

from collections.abc import Container, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


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

    def embed(self, tokens: mx.array, trunk: "Trunk") -> mx.array:
        """Return the embeddings (rows, tokens, hidden_size) of the head's inputs. Lazy."""
        embedded: mx.array = self.embed_tokens(tokens) if "embed_tokens" in self else trunk.embed(tokens)
        return embedded

    def logits(self, hidden: mx.array, trunk: "Trunk") -> mx.array:
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


class Trunk:
    """A causal language model of mlx-lm in its two parts: the layers up to the final norm, and the output head."""

    def __init__(self, network: nn.Module) -> None:
        """`network`: of a layout for which there are heads."""
        self._text = getattr(network, "language_model", network)

    def hidden(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return the hidden states (rows, tokens, hidden_size) behind the final norm. Lazy; writes to `cache`."""
        states: mx.array = self._text.model(tokens, cache)
        return states

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits (rows, tokens, vocab) of hidden states. Lazy."""
        head = self._text.lm_head if "lm_head" in self._text else self._text.model.embed_tokens.as_linear
        logits: mx.array = head(hidden)
        return logits

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (rows, tokens, hidden_size) of tokens. Lazy."""
        embedded: mx.array = self._text.model.embed_tokens(tokens)
        return embedded


class RecordingTrunk(Trunk):
    """A trunk that stands in for its network, and holds the hidden states of its last forward until they are taken."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self._network = network
        self._hidden: mx.array | None = None

    def __call__(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return the logits (rows, tokens, vocab), as the network does. Lazy; writes to `cache`."""
        self._hidden = self.hidden(tokens, cache)
        return self.logits(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def take_hidden(self) -> mx.array:
        """Return the hidden states (rows, tokens, hidden_size) of the last forward. Lazy. Raises ValueError if there
        was none since the last call."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise ValueError("No forward has run since its hidden states were taken.")
        return hidden


Network = nn.Module | RecordingTrunk  # what computes logits from tokens and a cache
