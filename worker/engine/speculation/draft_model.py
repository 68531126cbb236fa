"""Offers drafts of a small model with the vocabulary of the served one, computed for all rows of a batch at once."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast, overload
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.recurrence import Recurrence
from worker.engine.cache.slot_arrays import SlotArraysCache
from worker.engine.cache.verification import verification
from worker.engine.speculation.network_proposer import NetworkProposer
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.memory import CHUNK, UNLIMITED_TOKENS
from worker.schedule.speculation.offer import MAX_DRAFT, DraftedRow, Offer
from worker.schedule.speculation.reading import MOST_READ, ReadingCosts

DRAFT = "draft"
DEPTH = 4  # tokens of a draft
_WIDEST = 1 + MAX_DRAFT  # tokens of a row in one forward of the batch
_PRIOR = 0.7
# Tokens of a prompt that are read for each token of the answer that is still to come: a draft model reads a token in a
# small part of the time of a decode step.
_READ_PER_TOKEN = 8
_LIKELY_ANSWER = 256  # tokens: `max_tokens` is often far more than an answer has


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
    """The draft's caches of the rows of one batch. For the engine's thread.

    At most one row at a time is outside the batch, so that no more memory than that of a further row is needed."""

    def __init__(self, draft: DraftNetwork, reading: ReadingCosts | None = None) -> None:
        """`reading`: what it costs to compute tokens outside the batch, learned by all batches."""
        self._draft = draft
        self._reading = reading or ReadingCosts()
        self._cache: list[Any] = []
        self._fed: dict[str, int] = {}  # tokens in the cache, by row in the order of the slots
        self._behind: dict[str, _CatchingUp] = {}  # the row outside the batch
        self.caught_up = 0  # tokens that the last call of `draft` has computed outside the batch

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches."""
        return slots.bytes_of(self._cache) + sum(slots.bytes_of(row.cache) for row in self._behind.values())

    def missing(self, id: str, tokens: int) -> int:
        """Return how many of a row's first `tokens` tokens are not computed."""
        behind = self._behind.get(id)
        return tokens - (behind.fed if behind else self._fed.get(id, 0))

    def draft(
        self,
        rows: Mapping[str, Sequence[int]],
        depth: int,
        ends: Mapping[str, int] | None = None,
        read_s: float = inf,
    ) -> dict[str, tuple[int, ...]]:
        """Return `depth` tokens after each row, of those whose tokens are all computed. Blocks. `rows`: all tokens of
        each row of the batch, by its id. If one has no new token since the last call, there are no drafts. `ends`: the
        most tokens that each will have. `read_s`: most seconds to compute tokens outside the batch."""
        self.caught_up = 0
        self.keep(rows.keys())
        fitting = {id: tokens for id, tokens in rows.items() if len(tokens) + depth <= self._draft.context}
        self._catch_up(fitting, ends, read_s)
        widest = min(_WIDEST, max(1, CHUNK // max(1, len(self._fed))))  # memory is reserved for `CHUNK` tokens
        new = {id: rows[id][fed : fed + widest] for id, fed in self._fed.items()}
        if not all(new.values()) or not new:  # each row of a forward keeps at least one token
            return {}
        drafts = self._drafted([*new.values()], depth)
        self._fed = {id: fed + len(new[id]) for id, fed in self._fed.items()}
        drafted = zip(self._fed.items(), drafts, strict=True)
        return {id: tuple(tokens) for (id, fed), tokens in drafted if fed == len(rows[id])}

    def keep(self, ids: Collection[str]) -> None:
        """Drop all other rows."""
        self._behind = {id: row for id, row in self._behind.items() if id in ids}
        self._select(ids)

    def drop(self, id: str) -> None:
        """Drop a row, if it is there."""
        self.keep((self._fed.keys() | self._behind.keys()) - {id})

    def _select(self, ids: Collection[str]) -> None:
        before = [*self._fed]
        leaving = {index for index, id in enumerate(before) if id not in ids}
        if leaving:
            order = slots.compact_order(len(before), leaving)
            slots.select_rows(self._cache, order)
            slots.materialize(self._cache)  # frees the copies of rows that were moved
            self._fed = {before[index]: self._fed[before[index]] for index in order}

    def _catch_up(self, rows: Mapping[str, Sequence[int]], ends: Mapping[str, int] | None, read_s: float) -> None:
        """Compute tokens of rows outside the batch, one row after the other, and add those that have caught up.
        Blocks."""
        late = [
            id for id, tokens in rows.items() if len(tokens) - self._fed.get(id, 0) > _WIDEST or id not in self._fed
        ]
        began = time.perf_counter()
        for id in sorted(late, key=lambda id: id not in self._behind):  # the row that is outside already comes first
            most = min(MOST_READ - self.caught_up, self._reading.tokens_within(read_s - (time.perf_counter() - began)))
            if (self._behind and id not in self._behind) or most <= 0:
                return  # until the row that is outside has caught up
            row = self._taken_out(id)
            self.caught_up += self._read(row, rows[id], most)
            if row.fed == len(rows[id]) - 1 > 0:
                self._join(id, ends[id] + MAX_DRAFT if ends else UNLIMITED_TOKENS)

    def _read(self, row: _CatchingUp, tokens: Sequence[int], most: int) -> int:
        """Compute up to `most` tokens of a row outside the batch, and return their number. Blocks."""
        began = time.perf_counter()
        computed = row.advance(self._draft.network, tokens, most)
        if computed:
            self._reading.observe(computed, time.perf_counter() - began)
        return computed

    def _taken_out(self, id: str) -> _CatchingUp:
        """Return a row that is not in the batch from now on."""
        if id in self._fed:
            at = [*self._fed].index(id)
            self._behind[id] = _CatchingUp(slots.restore(slots.snapshot(self._cache, at)), self._fed[id])
            self._select(self._fed.keys() - {id})
        return self._behind.setdefault(id, _CatchingUp(make_prompt_cache(self._draft.network), 0))

    def _join(self, id: str, end: int) -> None:
        row = self._behind.pop(id)
        if not self._cache:
            self._cache = slots.empty_batch_of(row.cache, MAX_DRAFT)
        slots.join(self._cache, row.cache, end=end)
        self._fed[id] = row.fed

    def _drafted(self, new: Sequence[Sequence[int]], depth: int) -> list[list[int]]:
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


class _RowTokens(Sequence[int]):
    """A row's prompt and answer, of which a few tokens are read at a time."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._prompt, self._answer = prompt, answer

    def __len__(self) -> int:
        return len(self._prompt) + len(self._answer)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...

    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if isinstance(at, int):
            return self[at : at + 1][0]
        start, stop, _ = at.indices(len(self))
        prompt = len(self._prompt)
        answer = self._answer[max(0, start - prompt) : max(0, stop - prompt)]
        return (*self._prompt[start:stop], *answer)


class DraftModelProposer(NetworkProposer):
    """Offers the drafts that `prepare` has computed. For the engine's thread.

    It reads whole prompts, so rows with images or with tokens that were dropped get no drafts."""

    def __init__(self, draft: DraftNetwork, depth: int = DEPTH, reading: ReadingCosts | None = None) -> None:
        """`depth`: most tokens of a draft. `reading`: see `DraftRows`."""
        super().__init__(DRAFT, [_PRIOR] * depth)
        self._draft = draft
        self._reading = reading or ReadingCosts()
        self._batches = WeakKeyDictionary[Any, DraftRows]()
        self._fed: dict[str, int] = {}  # by row: its first tokens that are computed

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the caches."""
        return sum(rows.nbytes for rows in self._batches.values())

    def nbytes_of(self, batch: Any) -> int:
        """Return the part of `nbytes` for the rows of one batch."""
        own = self._batches.get(batch)
        return own.nbytes if own else 0

    def prepare(self, batch: Any, rows: Sequence[DraftedRow], depth: int | None = None, read_s: float = inf) -> bool:
        """Compute drafts for the rows of a batch. Returns False if there are none, or if prompts were computed too,
        since the time is then not that of drafts. Blocks. `rows`: with their next inputs as a part of the answer.
        `depth`: tokens of the drafts; None: the most. `read_s`: most seconds to compute prompts."""
        own = self._batches.setdefault(batch, DraftRows(self._draft, self._reading))
        read = [row for row in rows if self._is_read(row)]
        tokens = {row.id: _RowTokens(row.request.prompt, row.answer) for row in read}
        ends = {row.id: len(row.request.prompt) + row.request.max_tokens for row in read}
        drafts = own.draft(tokens, min(depth or self.depth, self.depth), ends, read_s)
        for row in rows:
            self._fed.pop(row.id, None)
        for row in read:
            self._fed[row.id] = len(tokens[row.id]) - own.missing(row.id, len(tokens[row.id]))
            if row.id in drafts:
                self.hold(row.id, len(row.answer), drafts[row.id])
        return bool(drafts) and not own.caught_up

    def foresee(self, row: DraftedRow) -> Offer | None:
        """Return an offer as `NetworkProposer` does; None for a row whose answer is too short for what it lacks."""
        return super().foresee(row) if self._is_read(row) else None

    def _is_read(self, row: DraftedRow) -> bool:
        request = row.request
        if request.images or request.kept_ranges is not None:
            return False
        tokens = len(request.prompt) + len(row.answer)
        left = min(request.max_tokens - len(row.answer), _LIKELY_ANSWER)
        return tokens < self._draft.context and tokens - self._fed.get(row.id, 0) <= _READ_PER_TOKEN * left + _WIDEST

    def leave(self, id: str) -> None:
        """Free a row's slot in its batch."""
        self._fed.pop(id, None)
        for rows in self._batches.values():
            rows.drop(id)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        super().forget(row)
        self.leave(row.id)
