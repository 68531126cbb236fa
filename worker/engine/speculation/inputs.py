"""Rows and their next inputs, which drafts continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, overload

from worker.request import GenerationRequest


class SpeculatingRow(Protocol):
    """The part of a row that decides about its drafts."""

    request: GenerationRequest
    answer: list[int]
    recomputed: bool

    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def end(self) -> int:
        """The most tokens that it will have in the cache."""

    @property
    def last_unfed(self) -> bool:
        """True if its next input is in the answer already."""


class RowInput(Protocol):
    """The next input of a row."""

    @property
    def row(self) -> SpeculatingRow:
        """The row."""

    @property
    def token(self) -> int:
        """The token."""

    @property
    def finite(self) -> bool:
        """False if it was drawn from non-finite logits."""


@dataclass(frozen=True, slots=True)
class RowView:
    """A row with its next input as a part of the answer."""

    id: str
    request: GenerationRequest
    answer: Sequence[int]


def undelivered(row_input: RowInput) -> list[int]:
    """Return the row's next input, unless its answer has it already."""
    return [] if row_input.row.last_unfed else [row_input.token]


def view(row_input: RowInput) -> RowView:
    """Return the row with its next input as a part of the answer."""
    row = row_input.row
    return RowView(row.id, row.request, row.answer if row.last_unfed else [*row.answer, row_input.token])


class RowTokens(Sequence[int]):
    """A row's prompt and answer as one sequence. Nothing is copied but the tokens of a slice."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._prompt, self._answer = prompt, answer

    def __len__(self) -> int:
        return len(self._prompt) + len(self._answer)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...

    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        prompt = len(self._prompt)
        if isinstance(at, int):
            index = range(len(self))[at]  # raises IndexError
            return self._prompt[index] if index < prompt else self._answer[index - prompt]
        start, stop, step = at.indices(len(self))
        if step != 1:
            return tuple(self[index] for index in range(start, stop, step))
        return (*self._prompt[start:stop], *self._answer[max(0, start - prompt) : max(0, stop - prompt)])
