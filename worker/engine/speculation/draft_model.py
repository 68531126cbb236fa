"""Drafts of a small model with the vocabulary of the served one, computed for all rows of a batch at once."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.recurrent import Recurrence, SlotArraysCache
from worker.engine.cache.slots import verification
from worker.engine.memory import CHUNK, UNLIMITED_TOKENS
from worker.engine.speculation.offer import DraftedRow, NetworkProposer, Offer, RowInput, RowTokens, view
from worker.engine.speculation.tuning import MAX_PREFILL
from worker.engine.step.tuning import MIN_CHUNK
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.outcomes import MAX_DRAFT

DRAFT = "draft"
_WIDEST = 1 + MAX_DRAFT  # tokens of a row in one forward of the batch


class PrefillChunks:
    """Chooses how many tokens of a prompt a draft model computes in a step, by what the last chunk has cost."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0, 0.0  # of the last chunk; 0: none was measured
        self._too_slow = 0  # calls of `next_chunk` in a row without time for a chunk

    def observe(self, tokens: int, seconds: float) -> None:
        """Record how long a chunk has taken."""
        self._tokens, self._seconds = tokens, seconds

    def next_chunk(self, seconds: float) -> int:
        """Return the tokens of the next chunk, which is expected to take at most `seconds`: a longer one takes less for
        each token. 0 if there is no time for `MIN_CHUNK`; the 16th time in a row one of as many is computed all the
        same, since a single slow chunk must not end all prefill."""
        if seconds <= 0:
            return 0
        if seconds == inf:
            return MAX_PREFILL
        if not self._tokens:
            return MIN_CHUNK
        tokens = int(min(MAX_PREFILL, 2 * self._tokens, self._tokens * seconds / max(self._seconds, 1e-9)))
        self._too_slow = 0 if tokens >= MIN_CHUNK else self._too_slow + 1
        if self._too_slow == 16:
            self._too_slow, self._tokens = 0, 0
            return MIN_CHUNK
        return tokens if tokens >= MIN_CHUNK else 0


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """The draft model."""

    network: nn.Module
    recurrence: Recurrence
    context: int  # tokens


class _RowPrefill:
    """The prefill of a row that is not in the batch yet."""

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
    """The draft's caches of the rows of one batch. For the engine's thread.

    At most one row at a time is outside the batch, so that no more memory than that of a further row is needed."""

    def __init__(self, draft: DraftNetwork, chunks: PrefillChunks | None = None) -> None:
        """`chunks`: chooses those that are computed outside the batch; all batches share it."""
        self._draft = draft
        self._chunks = chunks or PrefillChunks()
        self._cache: list[Any] = []
        self._fed: dict[str, int] = {}  # tokens in the cache, by row in the order of the slots
        self._outside: dict[str, _RowPrefill] = {}  # the row outside the batch
        self.prefilled = 0  # tokens that the last call of `draft` has computed outside the batch

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches."""
        return slots.bytes_of(self._cache) + sum(slots.bytes_of(row.cache) for row in self._outside.values())

    def missing(self, id: str, tokens: int) -> int:
        """Return how many of a row's first `tokens` tokens are not computed."""
        outside = self._outside.get(id)
        return tokens - (outside.fed if outside else self._fed.get(id, 0))

    def draft(
        self,
        rows: Mapping[str, Sequence[int]],
        depth: int,
        ends: Mapping[str, int] | None = None,
        prefill_s: float = inf,
    ) -> dict[str, tuple[int, ...]]:
        """Return `depth` tokens after each row, of those whose tokens are all computed. Blocks. `rows`: all tokens of
        each row of the batch, by its id. If one has no new token since the last call, there are no drafts. `ends`: the
        most tokens that each will have. `prefill_s`: most seconds to compute tokens outside the batch."""
        self.prefilled = 0
        self.keep(rows.keys())
        fitting = {id: tokens for id, tokens in rows.items() if len(tokens) + depth <= self._draft.context}
        self._prefill(fitting, ends, prefill_s)
        widest = min(_WIDEST, max(1, CHUNK // max(1, len(self._fed))))  # memory is reserved for `CHUNK` tokens
        new = {id: rows[id][fed : fed + widest] for id, fed in self._fed.items()}
        if not all(new.values()) or not new:  # each row of a forward keeps at least one token
            return {}
        drafts = self._draft_batch([*new.values()], depth)
        self._fed = {id: fed + len(new[id]) for id, fed in self._fed.items()}
        drafted = zip(self._fed.items(), drafts, strict=True)
        return {id: tuple(tokens) for (id, fed), tokens in drafted if fed == len(rows[id])}

    def keep(self, ids: Collection[str]) -> None:
        """Drop all other rows."""
        self._outside = {id: row for id, row in self._outside.items() if id in ids}
        self._select(ids)

    def drop(self, id: str) -> None:
        """Drop a row, if it is there."""
        self.keep((self._fed.keys() | self._outside.keys()) - {id})

    def _select(self, ids: Collection[str]) -> None:
        before = [*self._fed]
        leaving = {index for index, id in enumerate(before) if id not in ids}
        if leaving:
            order = slots.compact_order(len(before), leaving)
            slots.select_rows(self._cache, order)
            slots.materialize(self._cache)  # frees the copies of rows that were moved
            self._fed = {before[index]: self._fed[before[index]] for index in order}

    def _prefill(self, rows: Mapping[str, Sequence[int]], ends: Mapping[str, int] | None, prefill_s: float) -> None:
        """Compute tokens of rows outside the batch, one row after the other, and add those that have caught up.
        Blocks."""
        late = [
            id for id, tokens in rows.items() if len(tokens) - self._fed.get(id, 0) > _WIDEST or id not in self._fed
        ]
        began = time.perf_counter()
        for id in sorted(late, key=lambda id: id not in self._outside):  # the row that is outside already comes first
            if self._outside and id not in self._outside:
                return  # until the row that is outside has caught up
            left_s = prefill_s - (time.perf_counter() - began)
            chunk = min(MAX_PREFILL - self.prefilled, self._chunks.next_chunk(left_s))
            if chunk <= 0:
                return
            row = self._take_out(id)
            self.prefilled += self._compute(row, rows[id], chunk)
            if row.fed == len(rows[id]) - 1 > 0:
                self._join(id, ends[id] + MAX_DRAFT if ends else UNLIMITED_TOKENS)

    def _compute(self, row: _RowPrefill, tokens: Sequence[int], most: int) -> int:
        """Compute up to `most` tokens of a row outside the batch, and return their number. Blocks."""
        began = time.perf_counter()
        computed = row.advance(self._draft.network, tokens, most)
        if computed:
            self._chunks.observe(computed, time.perf_counter() - began)
        return computed

    def _take_out(self, id: str) -> _RowPrefill:
        """Move a row out of the batch, unless it is outside already, and return it."""
        if id in self._fed:
            at = [*self._fed].index(id)
            self._outside[id] = _RowPrefill(slots.restore(slots.snapshot(self._cache, at)), self._fed[id])
            self._select(self._fed.keys() - {id})
        if id not in self._outside:
            self._outside[id] = _RowPrefill(make_prompt_cache(self._draft.network), 0)
        return self._outside[id]

    def _join(self, id: str, end: int) -> None:
        row = self._outside.pop(id)
        if not self._cache:
            self._cache = slots.empty_batch_of(row.cache, MAX_DRAFT)
        slots.join(self._cache, row.cache, end=end)
        self._fed[id] = row.fed

    def _draft_batch(self, new: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
        """Feed each row its new tokens, and return the greedy continuations."""
        width, counts = max(map(len, new)), [len(tokens) for tokens in new]
        padded = mx.array([[*tokens, *[tokens[-1]] * (width - len(tokens))] for tokens in new])
        if set(counts) == {1}:  # every row keeps its token
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


class DraftModelProposer(NetworkProposer):
    """Offers the drafts that `prepare` has computed. For the engine's thread.

    It computes whole prompts, so rows with images or with tokens that were dropped get no drafts."""

    def __init__(self, draft: DraftNetwork, depth: int = 4, chunks: PrefillChunks | None = None) -> None:
        """`depth`: most tokens of a draft. `chunks`: see `DraftRows`."""
        super().__init__(DRAFT, [0.8] * depth)  # test_networks.py
        self._draft = draft
        self._chunks = chunks or PrefillChunks()
        self._batches = WeakKeyDictionary[Any, DraftRows]()
        self._computed: dict[str, int] = {}  # by row: its first tokens that are computed

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches."""
        return sum(rows.nbytes for rows in self._batches.values())

    def nbytes_of(self, batch: Any) -> int:
        """Return the part of `nbytes` for the rows of one batch."""
        own = self._batches.get(batch)
        return own.nbytes if own else 0

    def prepare(
        self, batch: Any, inputs: Sequence[RowInput], fed: Any = None, depth: int = MAX_DRAFT, prefill_s: float = inf
    ) -> bool:
        """Compute drafts, and parts of the prompts of rows that have none yet."""
        own = self._batches.setdefault(batch, DraftRows(self._draft, self._chunks))
        rows = [view(each) for each in inputs]
        drafted = [row for row in rows if self._gets_drafts(row)]
        tokens = {row.id: RowTokens(row.request.prompt, row.answer) for row in drafted}
        ends = {row.id: len(row.request.prompt) + _least_end(row) for row in drafted}
        drafts = own.draft(tokens, min(depth, self.depth), ends, prefill_s)
        for row in rows:
            self._computed.pop(row.id, None)
        for row in drafted:
            self._computed[row.id] = len(tokens[row.id]) - own.missing(row.id, len(tokens[row.id]))
            if row.id in drafts:
                self.hold(row.id, len(row.answer), drafts[row.id])
        return bool(drafts) and not own.prefilled

    def foresee(self, row: DraftedRow, *, hopeful: bool = False) -> Offer | None:
        """Return an offer as `NetworkProposer` does; None for a row whose answer is too short for what it lacks."""
        return super().foresee(row, hopeful=hopeful) if self._gets_drafts(row) else None

    def _gets_drafts(self, row: DraftedRow) -> bool:
        """Return True if the draft model may compute all of the row's tokens, and its answer is likely to be long
        enough to be worth those that are missing."""
        request = row.request
        if request.images or request.kept_ranges is not None:
            return False
        tokens = len(request.prompt) + len(row.answer)
        left = min(request.max_tokens - len(row.answer), 256)  # `max_tokens` is often far more than an answer has
        missing = tokens - self._computed.get(row.id, 0)
        # 8 tokens a token to come: a draft model computes one in a small part of the time of a decode step.
        return tokens < self._draft.context and missing <= 8 * left + 1 + MAX_DRAFT

    def leave(self, id: str) -> None:
        """Free a row's slot in its batch."""
        self._computed.pop(id, None)
        for rows in self._batches.values():
            rows.drop(id)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        super().forget(row)
        self.leave(row.id)


def _least_end(row: DraftedRow) -> int:
    """Return the tokens of the answer up to which buffers are padded: memory is reserved for these."""
    return len(row.answer) if row.request.grows else row.request.max_tokens
