"""Offers drafts of a small model with the vocabulary of the served one, computed for all rows of a batch at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.recurrence import Recurrence
from worker.engine.cache.slot_arrays import SlotArraysCache
from worker.engine.cache.verification import verification
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.speculation.chances import Kind, RowChances, SharedChances
from worker.schedule.speculation.offer import MAX_DRAFT, DraftedRow, Offer

DRAFT = "draft"
DEPTH = 4  # tokens of a draft
_WIDEST = 1 + MAX_DRAFT  # tokens of a row in one forward of the batch
_CATCH_UP = 256  # tokens outside the batch that one step computes, so that a long prompt delays no step
_PRIOR = 0.7


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """The draft model."""

    network: nn.Module
    recurrence: Recurrence
    context: int  # tokens


class _CatchingUp:
    """A row whose tokens are not all in the draft's cache yet."""

    def __init__(self, cache: list[Any], fed: int) -> None:
        self.cache, self.fed = cache, fed

    def advance(self, network: nn.Module, tokens: Sequence[int], most: int) -> int:
        """Compute up to `most` of the tokens, all but the last of them, and return their number. Blocks."""
        chunk = [*tokens[self.fed : min(len(tokens) - 1, self.fed + most)]]
        if chunk:
            network(mx.array([chunk]), cache=self.cache)
            slots.materialize(self.cache)
            self.fed += len(chunk)
        return len(chunk)


class DraftRows:
    """The draft's caches of the rows of one batch. For the engine's thread."""

    def __init__(self, draft: DraftNetwork) -> None:
        self._draft = draft
        self._cache: list[Any] = []
        self._fed: dict[str, int] = {}  # tokens in the cache, by row in the order of the slots
        self._behind: dict[str, _CatchingUp] = {}

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches."""
        return slots.bytes_of(self._cache) + sum(slots.bytes_of(row.cache) for row in self._behind.values())

    def draft(self, rows: Mapping[str, Sequence[int]], depth: int) -> dict[str, tuple[int, ...]]:
        """Return `depth` tokens after each row, of those whose tokens are all computed. Blocks. `rows`: all tokens of
        each row of the batch, by its id; at least one is new since the last call."""
        self._keep(rows.keys())
        self._move_behind(id for id, fed in list(self._fed.items()) if len(rows[id]) - fed > _WIDEST)
        self._catch_up({id: tokens for id, tokens in rows.items() if len(tokens) + depth <= self._draft.context})
        new = [[*rows[id][fed:]] for id, fed in self._fed.items()]
        if not new:
            return {}
        drafts = self._drafted(new, depth)
        self._fed = {id: len(rows[id]) for id in self._fed}
        return dict(zip(self._fed, map(tuple, drafts), strict=True))

    def _keep(self, ids: Iterable[str]) -> None:
        """Drop all other rows."""
        ids = {*ids}
        self._behind = {id: row for id, row in self._behind.items() if id in ids}
        order = [index for index, id in enumerate(self._fed) if id in ids]
        if len(order) < len(self._fed):
            slots.select_rows(self._cache, order)
            self._fed = {id: fed for id, fed in self._fed.items() if id in ids}

    def _move_behind(self, ids: Iterable[str]) -> None:
        """Take rows with many new tokens out of the batch."""
        for id in ids:
            index = [*self._fed].index(id)
            self._behind[id] = _CatchingUp(slots.restore(slots.snapshot(self._cache, index)), self._fed[id])
            self._keep(self._fed.keys() - {id} | self._behind.keys())

    def _catch_up(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Compute tokens of the rows outside the batch, and add those that have caught up. Blocks."""
        left = _CATCH_UP
        for id, tokens in rows.items():
            if id in self._fed:
                continue
            behind = self._behind.setdefault(id, _CatchingUp(make_prompt_cache(self._draft.network), 0))
            left -= behind.advance(self._draft.network, tokens, left)
            if behind.fed and behind.fed == len(tokens) - 1:
                self._join(id, self._behind.pop(id))
            if left <= 0:
                return

    def _join(self, id: str, row: _CatchingUp) -> None:
        if not self._cache:
            self._cache = slots.empty_batch_of(row.cache, MAX_DRAFT)
        slots.join(self._cache, row.cache)
        self._fed[id] = row.fed

    def _drafted(self, new: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
        """Feed each row its new tokens, and return the greedy continuations."""
        width, counts = max(map(len, new)), [len(tokens) for tokens in new]
        padded = mx.array([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in new])
        if width == 1:  # every row keeps its token
            logits = self._draft.network(padded, cache=self._cache)
        else:
            with verification(self._cache, width) as verifying:
                with self._draft.recurrence.recording(self._cache):
                    logits = self._draft.network(padded, cache=self._cache)
                verifying.commit(counts)
        last = mx.array(counts)[:, None, None] - 1
        drafts = [mx.argmax(mx.take_along_axis(logits, last, axis=1), axis=-1)]
        self._continue(drafts, depth)
        return cast("list[list[int]]", mx.concatenate(drafts, axis=1).tolist())

    def _continue(self, drafts: list[mx.array], depth: int) -> None:
        """Append further drafts, and return the caches to their state before. Lazy."""
        states = [layer for layer in layers(self._cache) if isinstance(layer, SlotArraysCache)]
        for layer in states:
            layer.begin(1)  # notes the states
        while len(drafts) < depth:
            drafts.append(mx.argmax(self._draft.network(drafts[-1], cache=self._cache), axis=-1))
        for layer in layers(self._cache):
            layer.roll_back() if isinstance(layer, SlotArraysCache) else layer.drop_last(depth - 1)


class DraftModelProposer:
    """Offers the drafts that `prepare` has computed. For the engine's thread."""

    kind = DRAFT

    def __init__(self, draft: DraftNetwork, depth: int = DEPTH) -> None:
        """`depth`: tokens of a draft."""
        self._draft, self._depth = draft, depth
        self._batches = WeakKeyDictionary[Any, DraftRows]()
        self._drafts: dict[str, tuple[int, tuple[int, ...]]] = {}  # by row: tokens of its answer, and those after them
        self._shared = SharedChances(_prior)
        self._chances: dict[str, RowChances] = {}

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches."""
        return sum(rows.nbytes for rows in self._batches.values())

    def prepare(self, batch: Any, rows: Sequence[DraftedRow]) -> None:
        """Compute drafts for the rows of a batch. Blocks. `rows`: with their next inputs as a part of the answer."""
        own = self._batches.setdefault(batch, DraftRows(self._draft))
        tokens = {row.id: (*row.request.prompt, *row.answer) for row in rows}
        drafts = own.draft(tokens, self._depth)
        self._drafts |= {row.id: (len(row.answer), drafts[row.id]) for row in rows if row.id in drafts}

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return the draft after the row's last token, if it is computed."""
        answered, tokens = self._drafts.get(row.id, (None, ()))
        return Offer(DRAFT, tokens, self.foresee(row).chances) if answered == len(row.answer) else None

    def foresee(self, row: DraftedRow) -> Offer:
        """Return an offer with the chances of the row's next draft, whose tokens are not computed yet."""
        chances = self._chances_of(row.id)
        return Offer(DRAFT, (0,) * self._depth, (chances.chance((DRAFT, 0)),) * self._depth)

    def kept(self, row: DraftedRow, offered: int, kept_tokens: int) -> None:
        """Learn from a draft how often its tokens are right."""
        self._chances_of(row.id).observe_draft((DRAFT, 0), offered, kept_tokens)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row, but for its slot in a batch, which is freed when that drafts next or ends."""
        self._drafts.pop(row.id, None)
        self._chances.pop(row.id, None)

    def _chances_of(self, id: str) -> RowChances:
        if id not in self._chances:
            self._chances[id] = RowChances(self._shared)
        return self._chances[id]


def _prior(kind: Kind) -> float:
    return _PRIOR
