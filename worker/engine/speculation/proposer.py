"""What a source of drafts is to the engine."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from worker.engine.speculation.offer import DraftedRow, Offer


class Proposer(Protocol):
    """Offers drafts. Called by the engine's thread, between forwards; it must not block for long."""

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return a draft that continues the row after its last token, or None. It is called at most once
        between two forwards, and not before each of them."""

    def observe_accepted(self, row: DraftedRow, proposed: int, accepted: int) -> None:
        """Record that the first `proposed` tokens of this proposer's last offer were verified, and the first `accepted`
        of these were right."""

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row. It may be offered again after that."""


@runtime_checkable
class SteppedProposer(Proposer, Protocol):
    """A proposer that has work in each step, whether or not it is asked in it."""

    def begin_step(self, rows: Sequence[DraftedRow]) -> None:
        """Do a bounded part of the work that later offers for these rows need. They are all rows that take drafts."""
