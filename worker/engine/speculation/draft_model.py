"""Offers drafts of a small model with the vocabulary of the served one, computed for all rows of a batch at once."""

from collections.abc import Sequence
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from worker.engine.speculation.draft_prefill import DraftPrefillBudget
from worker.engine.speculation.draft_rows import DraftNetwork, DraftRows
from worker.engine.speculation.inputs import RowTokens
from worker.engine.speculation.network_proposer import NetworkProposer
from worker.engine.speculation.offer import DraftedRow, Offer
from worker.outcomes import MAX_DRAFT

DRAFT = "draft"
DEPTH = 4  # tokens of a draft
_PRIOR = 0.7
# Tokens of a prompt that are computed for each token of the answer that is still to come: a draft model computes a
# token in a small part of the time of a decode step.
_PREFILL_PER_TOKEN = 8
_LIKELY_ANSWER = 256  # tokens: `max_tokens` is often far more than an answer has


class DraftModelProposer(NetworkProposer):
    """Offers the drafts that `prepare` has computed. For the engine's thread.

    It computes whole prompts, so rows with images or with tokens that were dropped get no drafts."""

    def __init__(self, draft: DraftNetwork, depth: int = DEPTH, budget: DraftPrefillBudget | None = None) -> None:
        """`depth`: most tokens of a draft. `budget`: see `DraftRows`."""
        super().__init__(DRAFT, [_PRIOR] * depth)
        self._draft = draft
        self._budget = budget or DraftPrefillBudget()
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

    def prepare(self, batch: Any, rows: Sequence[DraftedRow], depth: int | None = None, prefill_s: float = inf) -> bool:
        """Compute drafts for the rows of a batch. Returns False if there are none, or if prompts were computed too,
        since the time is then not that of drafts. Blocks. `rows`: with their next inputs as a part of the answer.
        `depth`: tokens of the drafts; None: the most. `prefill_s`: most seconds to compute prompts."""
        own = self._batches.setdefault(batch, DraftRows(self._draft, self._budget))
        drafted = [row for row in rows if self._gets_drafts(row)]
        tokens = {row.id: RowTokens(row.request.prompt, row.answer) for row in drafted}
        ends = {row.id: len(row.request.prompt) + _least_end(row) for row in drafted}
        drafts = own.draft(tokens, self.depth if depth is None else min(depth, self.depth), ends, prefill_s)
        for row in rows:
            self._computed.pop(row.id, None)
        for row in drafted:
            self._computed[row.id] = len(tokens[row.id]) - own.missing(row.id, len(tokens[row.id]))
            if row.id in drafts:
                self.hold(row.id, len(row.answer), drafts[row.id])
        return bool(drafts) and not own.prefilled

    def foresee(self, row: DraftedRow) -> Offer | None:
        """Return an offer as `NetworkProposer` does; None for a row whose answer is too short for what it lacks."""
        return super().foresee(row) if self._gets_drafts(row) else None

    def _gets_drafts(self, row: DraftedRow) -> bool:
        """Return True if the draft model may compute all of the row's tokens, and its answer is likely to be long
        enough to be worth those that are missing."""
        request = row.request
        if request.images or request.kept_ranges is not None:
            return False
        tokens = len(request.prompt) + len(row.answer)
        left = min(request.max_tokens - len(row.answer), _LIKELY_ANSWER)
        missing = tokens - self._computed.get(row.id, 0)
        return tokens < self._draft.context and missing <= _PREFILL_PER_TOKEN * left + 1 + MAX_DRAFT

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
