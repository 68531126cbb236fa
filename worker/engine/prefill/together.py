"""Prompts that compute a chunk in one forward."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.pack import Pack, packing_of
from worker.engine.memory import MemoryModel
from worker.engine.prefill.reuse import Beginning
from worker.engine.prefill.spans import PackRow
from worker.engine.prefill.task import PromptTask
from worker.engine.speculation.mtp import Head
from worker.engine.step.tuning import MAX_CHUNK


@dataclass(frozen=True, slots=True)
class _Shared:
    """A forward of several prompts."""

    done: tuple[int, ...]  # tokens that each prompt held before
    tokens: int  # of the longest chunk; the others were padded to it
    memory_tokens: int  # tokens of a single prompt's chunk that takes as much memory
    seconds: float


class SharedForwards:
    """Computes chunks of several prompts in one forward. For the engine's thread."""

    def __init__(self, network: nn.Module, costs: MemoryModel, head: Head | None = None) -> None:
        """`costs`: predicts the memory of a forward. `head`: an MTP head, whose trunk is the network."""
        self._network = network
        self._head = head
        self._costs = costs
        self._packing = packing_of(network)

    def keys(self, tasks: Iterable[PromptTask]) -> dict[str, int | None]:
        """Return a value for each prompt, by its id, that is equal for prompts that can share a forward now; None if a
        prompt can share none. Of prompts that begin alike, only the first is packed."""
        beginnings = set[Beginning]()
        keys = dict[str, int | None]()
        for task in tasks:
            stage, beginning = task.stage, task.beginning
            alone = not task.can_share or beginning in beginnings
            keys[task.row.id] = None if alone else self._packing.key(stage.done)
            if beginning:
                beginnings.add(beginning)
        return keys

    @property
    def padded(self) -> bool:
        """True if prompts can share a forward in which they compute different numbers of tokens."""
        return self._packing.padded

    def compute(self, chunks: Sequence[tuple[PromptTask, int]], longest: int) -> _Shared | None:
        """Compute the next tokens of these prompts, of each so many, in one forward, and hand them to the tasks, which
        take them into their caches when they advance. Prompts that cannot share the forward with the first are left
        out. Returns None if nothing was computed. Blocks. `longest`: most tokens of a forward. If it raises, the tasks
        have computed nothing."""
        for task, _ in chunks:
            task.load()
        packed = self._fitting(chunks)
        rows = [*packed.values()]
        done, tokens = tuple(row.length for row in rows), max((len(row.tokens) for row in rows), default=0)
        memory_tokens = self._costs.packed_tokens(len(rows), tokens, max(done, default=0))
        if len(rows) < 2 or memory_tokens > min(longest, MAX_CHUNK):
            return None
        began = time.perf_counter()
        pack = self._computed(rows, tokens)
        hidden = self._head.trunk.take_hidden() if self._head else None
        for index, task in enumerate(packed):
            task.receive(pack, index, len(rows[index].tokens), hidden)
        return _Shared(done, tokens, memory_tokens, time.perf_counter() - began)

    def _fitting(self, chunks: Iterable[tuple[PromptTask, int]]) -> dict[PromptTask, PackRow]:
        """Return the prompts that can share a forward with the first."""
        rows = {task: row for task, tokens in chunks if (row := task.pack_row(tokens))}
        if not rows:
            return {}
        first = next(iter(rows.values()))
        return {task: row for task, row in rows.items() if self._fits(row, first)}

    def _fits(self, row: PackRow, first: PackRow) -> bool:
        key = self._packing.key(row.length)
        equal = len(row.tokens) == len(first.tokens)
        return key is not None and key == self._packing.key(first.length) and (equal or self.padded)

    def _computed(self, rows: Sequence[PackRow], tokens: int) -> Pack:
        pack = Pack([row.cache for row in rows], [row.position for row in rows], [len(row.tokens) for row in rows])
        # A row's own last token as padding: any token would do.
        padded = [[*row.tokens, *row.tokens[-1:] * (tokens - len(row.tokens))] for row in rows]
        self._network(mx.array(padded), cache=pack.layers)
        pack.compute()
        return pack
