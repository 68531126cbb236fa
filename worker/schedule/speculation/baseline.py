"""Keeps the cost of a plain step known while drafts are verified."""

EVERY = 96  # steps from the last measured plain one
MOST = 6  # plain steps in a row: one is timed if it follows two others, and no row joins meanwhile
WANTED = 3  # measurements, of which single slow ones do not count
RETRIED = 32  # steps of rows that no plain one was measured of: it is tried again, since rows left or joined meanwhile


class Baseline:
    """Decides in which steps of a worker no drafts are verified. What drafts gain is judged by the cost of plain steps,
    which changes with the rows' lengths, with the device and with what else runs on it."""

    def __init__(self) -> None:
        self._steps = 0  # since plain steps were measured
        self._measured = 0  # in the plain steps that are due
        self._unknown = 0  # steps in a row of which it is not known what plain ones take

    def advance(self, *, known: bool = True) -> bool:
        """Advance by a step, and return True if it should be a plain one. `known`: it is known what plain steps of as
        many rows take; if not, that is measured first."""
        self._unknown = 0 if known else self._unknown % RETRIED + 1
        self._steps += 1
        if self._steps > EVERY + MOST or self._measured == WANTED:
            self._steps = self._measured = 0
        return self._steps > EVERY or 0 < self._unknown <= MOST

    def observe_plain(self) -> None:
        """Record that a plain step was measured."""
        if self._steps > EVERY:
            self._measured += 1
        else:
            self._steps = 0
