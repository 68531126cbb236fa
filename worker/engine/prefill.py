"""One prompt on its way into a cache, a chunk at a time."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine import slots
from worker.engine.row import Row
from worker.engine.rows import Drawn, forward
from worker.engine.upstream import make_prompt_cache
from worker.schedule.sequence import Sequence


class Prefill:
    """All but the last token of the prompt; that one is the first that the row is fed when it decodes."""

    def __init__(self, network: nn.Module, row: Row) -> None:
        self.row, self.done, self.waited = row, 0, 0
        self._network, self._cache = network, make_prompt_cache(network)
        self._tokens = row.sequence.known

    @property
    def sequence(self) -> Sequence:
        return self.row.sequence

    @property
    def total(self) -> int:
        return len(self._tokens) - 1

    @property
    def remaining(self) -> int:
        return self.total - self.done

    def advance(self, tokens: int) -> None:
        """Blocks until they are computed."""
        if tokens:
            chunk = mx.array([self._tokens[self.done : self.done + tokens]])
            self._network(chunk, cache=self._cache)
            slots.settle(self._cache)
            self.done += tokens

    def finish(self) -> tuple[list[Any], Drawn]:
        """The row's cache, and what it is fed next. The prefill is spent."""
        last = mx.array([self._tokens[-1]])
        if self.done:
            return self._cache, Drawn(last, mx.array([True]), {})
        # A cache without a single token cannot join others: to some models no state is not a state of zeros.
        self.row.fresh = False
        return self._cache, forward(self._network, self._cache, [self.row], last)
