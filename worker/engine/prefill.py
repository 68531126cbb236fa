"""One prompt on its way into a cache, a chunk at a time."""

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
    """All but the last token of the prompt; that one is the first that the row is fed when it decodes."""

    def __init__(
        self, network: nn.Module, row: Row, prefix: PrefixCache | None = None, scene: Scene | None = None
    ) -> None:
        """`scene`: of a prompt with images. It has the features of all those that are not found in the cache."""
        self.row, self.done, self.waited = row, 0, 0
        self.cached = 0  # tokens that were not computed, but found
        *tokens, self._last = row.sequence.known
        self._tokens, self._space, self._scene = tuple(tokens), row.sequence.space, scene
        self._keys = row.sequence.keys(self._tokens)
        self._network, self._cache = network, make_prompt_cache(network)
        self._prefix, self._seen, self._found, self._kept = prefix, -1, 0, 0
        self.cuts = prefix.cuts(row.sequence.boundaries, self.total) if prefix else ()

    @property
    def phase(self) -> Phase:
        return "prefill"

    @property
    def begun(self) -> bool:
        return self.done > 0

    @property
    def total(self) -> int:
        return len(self._tokens)

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        return self.total - self.start

    @property
    def start(self) -> int:
        """Where the first token is that is neither there nor found."""
        return max(self.done, self._found)

    def look(self) -> None:
        """Whether others have computed by now what would be computed here."""
        if self._prefix and self._seen != self._prefix.version:
            self._seen, self._found = self._prefix.version, self._prefix.length(self._space, self._keys)

    def advance(self, tokens: int) -> int:
        """Blocks until they are computed; says how many they were."""
        start, end = self.done, self._end(min(self.total, self.done + tokens))
        while self.done < end:
            self._compute(self._end(next((cut for cut in self.cuts if self.done < cut < end), end)))
            self._keep()
        return self.done - start

    def skip(self) -> None:
        """What is there already."""
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
        """For those who begin alike."""
        if self._prefix and (self.done in self.cuts if self._prefix.stateful else self._is_worth_it()):
            self._prefix.keep(self._space, self._keys[: self.done], self._cache)
            self._kept = self.done

    def _is_worth_it(self) -> bool:
        return self.done == self.total or self.done - self._kept >= LONGEST_RUN

    def news(self) -> list[Outcome]:
        """What came of it."""
        return [Prefilled(self.row.id, self.done, self.total, self.cached)]

    def end_at(self, tokens: int) -> None:
        """Others compute what comes behind so many: see `taken`."""
        self._tokens, self._keys = self._tokens[:tokens], self._keys[:tokens]
        self._seen, self._found = -1, 0

    def taken(self) -> tuple[list[Any], int]:
        """The cache, and how many tokens are in it. The prefill is spent."""
        return self._cache, self.done

    def finish(self) -> tuple[list[Any], Drawn, int | None]:
        """The row's cache, what it is fed next, and at which position, where that is not its length. The prefill is
        spent."""
        assert self.done == self.total, "tokens are missing"
        last = mx.array([self._last])
        if self.done:
            position = self.total + self._scene.rope_delta if self._scene else None
            return self._cache, Drawn(last, mx.array([True]), {}), position
        # A cache without a single token cannot join others: to some models no state is not a state of zeros.
        self.row.fresh = False
        return self._cache, forward(self._network, self._cache, [self.row], last), None
