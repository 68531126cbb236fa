"""Prefill of one prompt, in chunks."""

from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from worker.engine import slots
from worker.engine.prefix import PrefixCache
from worker.engine.row import Row
from worker.engine.rows import Drawn, forward
from worker.engine.scene import Scene
from worker.engine.upstream import make_prompt_cache
from worker.schedule.prefix import LONGEST_RUN
from worker.schedule.sequence import Outcome, Prefilled

Phase = Literal["encoding", "scoring", "prefill"]


class Prefill:
    """Computes all tokens of the prompt but the last one, which is the row's first input when it decodes. A resumed
    request's earlier tokens count as prompt."""

    def __init__(
        self, network: nn.Module, row: Row, prefix: PrefixCache | None = None, scene: Scene | None = None
    ) -> None:
        """`scene`: the inputs of a prompt with images. It must have the features of all images that are not in the
        cached prefix. `prefix`: None if no prefix is loaded or inserted."""
        self.row, self.done, self.waited = row, 0, 0
        self.cached = 0  # tokens taken from the prefix cache
        *tokens, self._last = row.sequence.known
        self._tokens, self._space, self._scene = tuple(tokens), row.sequence.space, scene
        self._keys = row.sequence.keys(self._tokens)
        self._network, self._cache = network, make_prompt_cache(network)
        self._prefix, self._seen, self._found, self._kept = prefix, -1, 0, 0
        self.cuts = prefix.cuts(row.sequence.boundaries, self.total) if prefix else ()

    @property
    def phase(self) -> Phase:
        """Phase for progress reports and budgets, always "prefill"."""
        return "prefill"

    @property
    def begun(self) -> bool:
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
        return max(self.done, self._found)

    def look(self) -> None:
        """Find the longest cached prefix again if the prefix cache has changed. Copies nothing."""
        if self._prefix and self._seen != self._prefix.version:
            self._seen, self._found = self._prefix.version, self._prefix.length(self._space, self._keys)

    def advance(self, tokens: int) -> int:
        """Compute up to `tokens` tokens, and insert into the prefix cache. Blocks. Returns the number computed, which
        differs from `tokens` if an image must be computed in one piece."""
        start, end = self.done, self._end(min(self.total, self.done + tokens))
        while self.done < end:
            self._compute(self._end(next((cut for cut in self.cuts if self.done < cut < end), end)))
            self._keep()
        return self.done - start

    def skip(self) -> None:
        """Load the prefix that `match_prefix` found in place of the own cache, if it is longer. Blocks."""
        if self._prefix and self._found > self.done:
            cache, length = self._prefix.fetch(self._space, self._keys)
            if length > self.done:
                self.cached += length - self.done
                self._cache, self.done, self._kept = cache, length, length
        self._found = 0

    def _end(self, end: int) -> int:
        return self._scene.end(self.done, end) if self._scene else end

    def _compute(self, end: int) -> None:
        if self._scene:
            self._scene.read(self._cache, range(self.done, end))
        else:
            self._network(mx.array([self._tokens[self.done : end]]), cache=self._cache)
        slots.settle(self._cache)
        self.done = end

    def _keep(self) -> None:
        """Insert what is computed into the prefix cache, at checkpoints or every `MAX_SEGMENT_TOKENS`."""
        if self._prefix and (self.done in self.cuts if self._prefix.stateful else self._is_worth_it()):
            self._prefix.keep(self._space, self._keys[: self.done], self._cache)
            self._kept = self.done

    def _is_worth_it(self) -> bool:
        return self.done == self.total or self.done - self._kept >= LONGEST_RUN

    def news(self) -> list[Outcome]:
        """Return the progress since the last call as outcomes."""
        return [Prefilled(self.row.id, self.done, self.total, self.cached)]

    def end_at(self, tokens: int) -> None:
        """Stop after the first `tokens` tokens of the prompt. The rest is computed on the detached cache."""
        self._tokens, self._keys = self._tokens[:tokens], self._keys[:tokens]
        self._seen, self._found = -1, 0

    def taken(self) -> tuple[list[Any], int]:
        """Return the cache and the number of tokens in it. The caller owns the cache; the prefill must not be used
        afterwards."""
        return self._cache, self.done

    def finish(self) -> tuple[list[Any], Drawn, int | None]:
        """Return the row's cache, its next input, and the position of that input, or None if it equals the cache's
        length. The caller owns the cache; the prefill must not be used afterwards. Lazy."""
        assert self.done == self.total, "tokens are missing"
        last = mx.array([self._last])
        if self.done:
            position = self.total + self._scene.rope_delta if self._scene else None
            return self._cache, Drawn(last, mx.array([True]), {}), position
        # A cache without tokens cannot join a batch: for some models an absent state differs from a state of zeros.
        self.row.fresh = False
        return self._cache, forward(self._network, self._cache, [self.row], last), None
