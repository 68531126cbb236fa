"""Offers drafts of an MTP head, which are computed for all rows of a batch at once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from worker.engine.cache import slots
from worker.engine.speculation.mtp.drafts import HeadDrafts
from worker.engine.speculation.mtp.head import Head
from worker.engine.speculation.mtp.prompt import PromptEntries
from worker.engine.speculation.network_proposer import NetworkProposer
from worker.engine.speculation.offer import DraftedRow

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


class _Batch:
    """The head's cache of a batch, whose rows may be in another order."""

    def __init__(self, head: Head) -> None:
        self.drafts = HeadDrafts(head)
        self.ids: list[str] = []

    def match(self, rows: Sequence[HeadInput], entries: dict[str, PromptEntries]) -> None:
        """Drop the rows that have left the batch, and add those that have joined it."""
        self.keep({row.id for row in rows})
        if joining := [row for row in rows if row.id not in self.ids]:
            self.drafts.add([entries.pop(row.id, None) for row in joining], [row.end for row in joining])
            self.ids += [row.id for row in joining]

    def keep(self, present: Collection[str]) -> None:
        """Drop all other rows. The last rows fill their slots."""
        leaving = {index for index, id in enumerate(self.ids) if id not in present}
        if leaving:
            order = slots.compact_order(len(self.ids), leaving)
            self.drafts.select(order)
            self.ids = [self.ids[index] for index in order]


class HeadProposer(NetworkProposer):
    """Offers the drafts that `prepare` has computed. For the engine's thread.

    A row that moves to another batch leaves its entries behind."""

    def __init__(self, head: Head, depth: int = DEPTH) -> None:
        """`depth`: most tokens of a draft."""
        super().__init__(MTP, [_PRIORS[min(at, len(_PRIORS) - 1)] for at in range(depth)])
        self._head = head
        self._batches = WeakKeyDictionary[Any, _Batch]()
        self._entries: dict[str, PromptEntries] = {}  # of rows that have not drafted yet

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the head's keys and values, without those of prompts that have not drafted yet."""
        return sum(batch.drafts.nbytes for batch in self._batches.values())

    def nbytes_of(self, batch: Any) -> int:
        """Return the part of `nbytes` for the rows of one batch."""
        own = self._batches.get(batch)
        return own.drafts.nbytes if own else 0

    def add_prompt(self, id: str, entries: PromptEntries | None) -> None:
        """Take over the head's entries of a prompt."""
        if entries:
            self._entries[id] = entries

    def prepare(self, batch: Any, rows: Sequence[HeadInput], fed: FedTokens | None, depth: int | None = None) -> bool:
        """Compute drafts for the rows of a batch after their next inputs. Returns False if there are none. Blocks.
        `fed`: the last forward of the batch. `depth`: tokens of the drafts; None: the most."""
        if fed is None or not rows:
            return False
        own = self._batches.setdefault(batch, _Batch(self._head))
        own.match(rows, self._entries)
        drafted = {row.id: row for row in rows}
        fed_at = {id: index for index, id in enumerate(fed.ids)}
        known = [id for id in own.ids if id in fed_at]
        if not known:
            return False
        index = mx.array([fed_at.get(id, 0) for id in own.ids])
        after = [_after(drafted[id], fed_at.get(id), fed) for id in own.ids]
        positions = [fed.positions[fed_at[id]] if id in fed_at else 0 for id in own.ids]
        depth = self.depth if depth is None else min(depth, self.depth)
        drafts = own.drafts.draft(fed.hidden[index], after, positions, depth)
        for id, tokens in zip(own.ids, drafts, strict=True):
            if id in fed_at:
                self.hold(id, drafted[id].answered, tokens)
        return True

    def leave(self, id: str) -> None:
        """Free a row's slot in its batch."""
        for batch in self._batches.values():
            batch.keep({*batch.ids} - {id})

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        super().forget(row)
        self._entries.pop(row.id, None)
        self.leave(row.id)


def _after(row: HeadInput, index: int | None, fed: FedTokens) -> tuple[int, ...]:
    """Return the tokens after those that were fed to the row; none if the forward had not this row."""
    if index is None:
        return ()
    return (row.token,) if fed.after is None else fed.after[index]
