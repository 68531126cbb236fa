"""Prefill of one prompt, in chunks."""

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from worker.engine.batch.decode_batch import PendingTokens, forward
from worker.engine.batch.row import Row
from worker.engine.cache import slots
from worker.engine.cache.prefix import PrefixCache
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.vision.inputs import MultimodalInputs
from worker.schedule.outcomes import Outcome, Prefilled
from worker.schedule.prefix import MAX_SEGMENT_TOKENS

Phase = Literal["encoding", "scoring", "prefill"]


class Prefill:
    """Computes all tokens of the prompt but the last one, which is the row's first input when it decodes. A resumed
    request's earlier tokens count as prompt.

    `done`: tokens in the cache. `waited`: steps since the prompt was added, counted by `PrefillQueue`."""

    def __init__(
        self, network: nn.Module, row: Row, prefix: PrefixCache | None = None, inputs: MultimodalInputs | None = None
    ) -> None:
        """`inputs`: the inputs of a prompt with images. It must have the features of all images that are not in the
        cached prefix. `prefix`: None if no prefix is loaded or inserted."""
        self.row, self.done, self.waited = row, 0, 0
        self.cached = 0  # tokens taken from the prefix cache
        *tokens, self._last = row.request.tokens
        self._tokens, self._namespace, self._inputs = tuple(tokens), row.request.namespace, inputs
        self._key = row.request.cache_key(self._tokens)
        self._network, self._cache = network, make_prompt_cache(network)
        self._prefix, self._matched_version, self._matched, self._inserted = prefix, -1, 0, 0
        self.cuts = prefix.checkpoint_positions(row.request.boundaries, self.total) if prefix else ()

    @property
    def phase(self) -> Phase:
        """Phase for progress reports and budgets, always "prefill"."""
        return "prefill"

    @property
    def started(self) -> bool:
        """True if the cache holds tokens."""
        return self.done > 0

    @property
    def total(self) -> int:
        """Tokens in the cache when the prefill is done."""
        return len(self._tokens)

    @property
    def remaining(self) -> int:
        """Tokens left to compute."""
        return self.total - self.start

    @property
    def start(self) -> int:
        """Index of the first token that is neither computed nor in the prefix cache."""
        return max(self.done, self._matched)

    def match_prefix(self) -> None:
        """Find the longest cached prefix again if the prefix cache has changed. Copies nothing."""
        if self._prefix and self._matched_version != self._prefix.version:
            self._matched_version, self._matched = (
                self._prefix.version,
                self._prefix.match_length(self._namespace, self._key),
            )

    def advance(self, tokens: int) -> int:
        """Compute up to `tokens` tokens, and insert into the prefix cache. Blocks. Returns the number computed, which
        differs from `tokens` if an image must be computed in one piece."""
        start, end = self.done, self._end(min(self.total, self.done + tokens))
        while self.done < end:
            self._compute(self._end(next((cut for cut in self.cuts if self.done < cut < end), end)))
            self._insert_prefix()
        return self.done - start

    def apply_prefix(self) -> None:
        """Load the prefix that `match_prefix` found in place of the own cache, if it is longer. Blocks."""
        if self._prefix and self._matched > self.done:
            cache, length = self._prefix.load(self._namespace, self._key)
            if length > self.done:
                self.cached += length - self.done
                self._cache, self.done, self._inserted = cache, length, length
        self._matched = 0

    def _end(self, end: int) -> int:
        return self._inputs.end(self.done, end) if self._inputs else end

    def _compute(self, end: int) -> None:
        if self._inputs:
            self._inputs.read(self._cache, range(self.done, end))
        else:
            self._network(mx.array([self._tokens[self.done : end]]), cache=self._cache)
        slots.materialize(self._cache)
        self.done = end

    def _insert_prefix(self) -> None:
        """Insert what is computed into the prefix cache, at checkpoints or every `MAX_SEGMENT_TOKENS`."""
        if self._prefix and (self.done in self.cuts if self._prefix.stateful else self._segment_is_due()):
            self._prefix.insert(self._namespace, self._key[: self.done], self._cache)
            self._inserted = self.done

    def _segment_is_due(self) -> bool:
        return self.done == self.total or self.done - self._inserted >= MAX_SEGMENT_TOKENS

    def pop_outcomes(self) -> list[Outcome]:
        """Return the progress since the last call as outcomes."""
        return [Prefilled(self.row.id, self.done, self.total, self.cached)]

    def truncate(self, tokens: int) -> None:
        """Stop after the first `tokens` tokens of the prompt. The rest is computed on the detached cache."""
        self._tokens, self._key = self._tokens[:tokens], self._key[:tokens]
        self._matched_version, self._matched = -1, 0

    def detach_cache(self) -> tuple[list[Any], int]:
        """Return the cache and the number of tokens in it. The caller owns the cache; the prefill must not be used
        afterwards."""
        return self._cache, self.done

    def finish(self) -> tuple[list[Any], PendingTokens, int | None]:
        """Return the row's cache, its next input, and the position of that input, or None if it equals the cache's
        length. The caller owns the cache; the prefill must not be used afterwards. Lazy."""
        assert self.done == self.total, "tokens are missing"
        last = mx.array([self._last])
        if self.done:
            position = self.total + self._inputs.rope_delta if self._inputs else None
            return self._cache, PendingTokens(last, mx.array([True]), {}), position
        # A cache without tokens cannot join a batch: for some models an absent state differs from a state of zeros.
        self.row.awaiting_first_step = False
        return self._cache, forward(self._network, self._cache, [self.row], last), None
