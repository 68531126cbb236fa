"""Drafts: tokens that a row is expected to draw next, offered for verification."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.schedule.request import GenerationRequest

MAX_DRAFT = 7  # tokens of a draft: with the row's next token, MLX's vector attention on Metal takes up to 8 queries


@dataclass(frozen=True)
class Offer:
    """A draft that continues a row after its last known token. A wrong draft costs time, and never changes a token."""

    kind: str
    tokens: tuple[int, ...]
    acceptance: tuple[float, ...]  # of each token: the probability that it is accepted if all before it are
    kinds: tuple[str, ...] = ()  # of each token, if they differ

    def part(self, start: int, end: int) -> "Offer":
        """Return the tokens from `start` to before `end`, for a row that has drawn those before them."""
        own = slice(start, end)
        return Offer(self.kind, self.tokens[own], self.acceptance[own], self.kinds[own])


class DraftedRow(Protocol):
    """The part of a row that proposers of drafts use."""

    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def request(self) -> GenerationRequest:
        """The request."""

    @property
    def answer(self) -> Sequence[int]:
        """Tokens of the answer, by all attempts, up to the one that a draft would continue. It only grows, unless the
        row is recomputed."""
