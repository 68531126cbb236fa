"""The end of an answer, which is known before the next forward of a group that takes drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.engine.speculation.speculator import Speculator
from worker.request import GenerationRequest

END, OTHER = 2, 30


@dataclass(eq=False)
class Row:
    """A row and its next input."""

    token: int
    max_tokens: int = 20
    finite: bool = True
    id: str = "a"
    answer: list[int] = field(default_factory=lambda: [10, 11])
    last_unfed: bool = False
    recomputed: bool = False

    @property
    def row(self) -> "Row":
        return self

    @property
    def request(self) -> GenerationRequest:
        return GenerationRequest(self.id, (1,), self.max_tokens)


class Group:
    """A group without a network: any forward fails."""

    fed = None

    def collect_drawn(self) -> list[str]:
        return ["the last tokens"]


def verified(inputs: Sequence[Row]) -> Any:
    group: Any = Group()
    rows: Any = inputs
    return Speculator(eos_ids=[END]).verify(group, rows, 0.0)


def test_no_forward_follows_the_last_tokens_of_all_rows() -> None:
    assert verified([Row(END), Row(OTHER, max_tokens=3), Row(OTHER, finite=False)]) == ["the last tokens"]


def test_a_row_that_goes_on_needs_a_forward() -> None:
    assert verified([Row(END), Row(OTHER)]) is None


def test_an_end_that_is_delivered_already_is_no_end() -> None:
    assert verified([Row(END, last_unfed=True)]) is None
