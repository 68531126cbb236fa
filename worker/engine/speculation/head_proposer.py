"""Offers drafts of an MTP head, which are computed for all rows of a batch at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from worker.engine.speculation.head_drafts import Head, HeadDrafts, PromptEntries
from worker.schedule.speculation.chances import Kind, RowChances, SharedChances
from worker.schedule.speculation.offer import DraftedRow, Offer

MTP = "mtp"
DEPTH = 3  # tokens of a draft: the published heads are trained for one, and their later tokens are right less often
_PRIORS = (0.75, 0.65, 0.55)  # by depth


@dataclass(frozen=True, slots=True)
class FedTokens:
    """The tokens that a forward fed to the rows of a batch and that these keep."""

    ids: tuple[str, ...]  # of the rows, in the order of the arrays
    hidden: mx.array  # (rows, width, hidden_size)
    positions: tuple[int, ...]  # of each row's first token
    after: tuple[tuple[int, ...], ...] | None = None  # the token after each; None: one was fed, the next is not known


@dataclass(frozen=True, slots=True)
class HeadInput:
    """A row and its next input."""

    id: str
    answered: int  # tokens of its answer, its next input included
    token: int
    end: int  # the most tokens that it will have


@dataclass(frozen=True, slots=True)
class _Draft:
    answered: int
    tokens: tuple[int, ...]


class _Batch:
    """The head's cache of a batch, whose rows may be in another order."""

    def __init__(self, head: Head) -> None:
        self.drafts = HeadDrafts(head)
        self.ids: list[str] = []

    def match(self, rows: Sequence[HeadInput], entries: dict[str, PromptEntries]) -> None:
        """Drop the rows that have left the batch, and add those that have joined it."""
        present = {row.id for row in rows}
        order = [index for index, id in enumerate(self.ids) if id in present]
        if len(order) < len(self.ids):
            self.drafts.select(order)
            self.ids = [self.ids[index] for index in order]
        if joining := [row for row in rows if row.id not in self.ids]:
            self.drafts.add([entries.pop(row.id, None) for row in joining], [row.end for row in joining])
            self.ids += [row.id for row in joining]


class HeadProposer:
    """Offers the drafts that `prepare` has computed. For the engine's thread.

    A row that moves to another batch leaves its entries behind."""

    def __init__(self, head: Head, depth: int = DEPTH) -> None:
        """`depth`: tokens of a draft."""
        self._head, self._depth = head, depth
        self._batches = WeakKeyDictionary[Any, _Batch]()
        self._entries: dict[str, PromptEntries] = {}  # of rows that have not drafted yet
        self._drafts: dict[str, _Draft] = {}
        self._shared = SharedChances(_prior)
        self._chances: dict[str, RowChances] = {}

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the head's keys and values, without those of prompts that have not drafted yet."""
        return sum(batch.drafts.nbytes for batch in self._batches.values())

    def add_prompt(self, id: str, entries: PromptEntries | None) -> None:
        """Take over the head's entries of a prompt."""
        if entries:
            self._entries[id] = entries

    def prepare(self, batch: Any, rows: Sequence[HeadInput], fed: FedTokens | None) -> None:
        """Compute drafts for the rows of a batch after their next inputs. Blocks. `fed`: the last forward of the
        batch."""
        if fed is None or not rows:
            return
        own = self._batches.setdefault(batch, _Batch(self._head))
        own.match(rows, self._entries)
        drafted = {row.id: row for row in rows}
        places = {id: index for index, id in enumerate(fed.ids)}
        known = [id for id in own.ids if id in places]
        if not known:
            return
        index = mx.array([places.get(id, 0) for id in own.ids])
        after = [_after(drafted[id], places.get(id), fed) for id in own.ids]
        positions = [fed.positions[places[id]] if id in places else 0 for id in own.ids]
        drafts = dict(zip(own.ids, own.drafts.draft(fed.hidden[index], after, positions, self._depth), strict=True))
        self._drafts |= {id: _Draft(drafted[id].answered, tuple(drafts[id])) for id in known}

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return the draft after the row's last token, if it is computed."""
        draft = self._drafts.get(row.id)
        if draft is None or draft.answered != len(row.answer):
            return None
        return Offer(MTP, draft.tokens, self.foresee(row).chances)

    def foresee(self, row: DraftedRow) -> Offer:
        """Return an offer with the chances of the row's next draft, whose tokens are not computed yet."""
        chances = self._chances_of(row.id)
        return Offer(MTP, (0,) * self._depth, tuple(chances.chance((MTP, depth)) for depth in range(self._depth)))

    def kept(self, row: DraftedRow, offered: int, kept_tokens: int) -> None:
        """Learn from a draft how often its tokens are right."""
        chances = self._chances_of(row.id)
        for depth in range(min(kept_tokens + 1, offered)):
            chances.observe((MTP, depth), depth < kept_tokens)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row, but for its slot in a batch, which is freed when that drafts next or ends."""
        for held in (self._entries, self._drafts, self._chances):
            held.pop(row.id, None)

    def _chances_of(self, id: str) -> RowChances:
        if id not in self._chances:
            self._chances[id] = RowChances(self._shared)
        return self._chances[id]


def _after(row: HeadInput, place: int | None, fed: FedTokens) -> tuple[int, ...]:
    """Return the tokens after those that were fed to the row; none if the forward had not this row."""
    if place is None:
        return ()
    return (row.token,) if fed.after is None else fed.after[place]


def _prior(kind: Kind) -> float:
    return _PRIORS[min(kind[1], len(_PRIORS) - 1)]
