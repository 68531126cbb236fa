"""A multi-token-prediction (MTP) head, the trunk whose parts it shares, and its keys and values of prompts."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.upstream.mlx_lm import KVCache


class Trunk:
    """A causal language model of mlx-lm in its two parts: the layers up to the final norm, and the output head. It
    stands in for its network, and holds the hidden states of its last forward until they are taken."""

    def __init__(self, network: nn.Module) -> None:
        """`network`: of a layout for which there are heads."""
        self._network = network
        self._text = getattr(network, "language_model", network)
        self._hidden: mx.array | None = None

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


Network = nn.Module | Trunk  # what computes logits from tokens and a cache


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
    trunk: Trunk

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


@dataclass(frozen=True, slots=True)
class PromptEntries:
    """The head's entries of a prompt, which its row takes along when it joins a batch."""

    cache: Any  # an mlx-lm cache
    start: int  # position of the first entry's token


class PromptHead:
    """Computes the head's entries of one prompt, chunk by chunk. It ends at the first token that is not computed, if
    some are dropped."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._cache = KVCache()
        self._start: int | None = None

    def feed(self, hidden: mx.array, after: Sequence[int], position: int) -> None:
        """Add an entry for each hidden state (1, tokens, hidden_size). `after`: the token after each. `position`: of
        the first one's token. Blocks."""
        if self._start is None:
            self._start = position
        if position != self._start + self._cache.offset:
            return
        mask = self._cache.make_mask(len(after), return_array=False, window_size=None)
        self._head.states(mx.array([list(after)]), hidden, mask, self._cache)
        mx.eval(self._cache.state)

    def finish(self) -> PromptEntries | None:
        """Return the entries; None if there are none. The object must not be used afterwards."""
        return None if self._start is None else PromptEntries(self._cache, self._start)
