"""The head's keys and values of prompts.

Entry t of a head follows from the trunk's hidden state of token t and from token t + 1. A row may lack entries, of
tokens that were loaded from a cache or decoded without drafts: its drafts are then less often right, and its tokens are
the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.speculation.mtp.head import Head
from worker.engine.upstream.mlx_lm import KVCache


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
