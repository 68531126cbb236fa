"""Drafts for the rows of a sequence: parts of their answers, half of them with a wrong token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.engine.machine.families import Family
from tests.engine.speculation.oracle import WRONG, Oracle, any_width, pause_nothing, speculator_of
from worker.engine.speculation import speculator
from worker.engine.speculation.speculator import Speculator
from worker.outcomes import MAX_DRAFT


class Drafts:
    """The drafts of one sequence, over all its engines."""

    def __init__(self, family: Family, *, wanted: bool, not_finite: int | None) -> None:
        """`wanted`: rows take drafts. `not_finite`: a token without a finite embedding, which wrong drafts contain."""
        self.wanted = wanted
        self.max_draft = MAX_DRAFT if wanted else 0
        self._family = family
        self._answers = dict[str, Sequence[int]]()
        self._wrong = [*WRONG[:20], *([] if not_finite is None else [not_finite] * 5)]
        self._choose = any_width()
        self._oracles = list[Oracle]()

    def speculator(self) -> Speculator | None:
        """Return the speculator of a new engine."""
        if not self.wanted:
            return None
        self._oracles.append(Oracle(self._answers, seed=len(self._oracles), wrong=self._wrong))
        return speculator_of(self._family.model, self._oracles[-1])

    def expect(self, id: str, answer: Sequence[int]) -> None:
        """Let the drafts of a row be parts of this answer."""
        self._answers[id] = answer

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have forwards of any width while the context is open."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculator, "choose_width", self._choose)
            pause_nothing(patch)
            yield

    @property
    def held(self) -> set[str]:
        """Rows for which the last engine holds drafts."""
        return self._oracles[-1].held if self._oracles else set()

    @property
    def proposed(self) -> int:
        """Drafted tokens that were verified."""
        return sum(oracle.proposed for oracle in self._oracles)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(oracle.accepted for oracle in self._oracles)
