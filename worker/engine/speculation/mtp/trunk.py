"""The parts of a language model that an MTP head shares: its layers, its embedding and its output head."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


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
