"""Offers of drafts, and their acceptance rates: how probable it is that a token of a draft is right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.request import GenerationRequest


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


Kind = tuple[str, int]  # proposer, and a class of its drafts that it distinguishes, as by the length of an ending

_PRIOR_TOKENS = 4.0  # tokens that a prior counts as
_SHARED_MEMORY = 0.995  # weight that an observation keeps when the next one is made: the last 200 count
_ROW_MEMORY = 0.9  # the last ten, so a row that begins to copy, or ceases to, is noticed at once
_LEAST = 0.005
_MOST = 0.995


class Acceptance:
    """Share of right tokens among those that were compared, of which recent ones count more."""

    def __init__(self, prior: Callable[[], float], memory: float) -> None:
        """`prior`: the share that is expected without observations."""
        self._prior, self._memory = prior, memory
        self._right = self._compared = 0.0

    def observe(self, right: bool) -> None:
        """Record if a token of a draft was right. Tokens after a wrong one are not compared."""
        self._right = self._right * self._memory + right
        self._compared = self._compared * self._memory + 1

    @property
    def compared(self) -> float:
        """Number of tokens that were compared, of which recent ones count more."""
        return self._compared

    @property
    def rate(self) -> float:
        """Probability that the next token is right, if those before it were."""
        share = (self._right + _PRIOR_TOKENS * self._prior()) / (self._compared + _PRIOR_TOKENS)
        return _LEAST if share < _LEAST else min(share, _MOST)


class SharedAcceptance:
    """Acceptance by kind of draft in all rows. It is the prior of each row, so that a new row tries no drafts that were
    wrong in the others."""

    def __init__(self, priors: Callable[[Kind], float]) -> None:
        """`priors`: the rate of a kind that no row has tried."""
        self._kinds = dict[Kind, Acceptance]()
        self._priors = priors

    def of(self, kind: Kind) -> Acceptance:
        """Return the acceptance of a kind."""
        if kind not in self._kinds:
            prior = self._priors(kind)
            self._kinds[kind] = Acceptance(lambda: prior, _SHARED_MEMORY)
        return self._kinds[kind]


class RowAcceptance:
    """Acceptance by kind of draft in one row."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._shared = shared
        self._kinds = dict[Kind, Acceptance]()

    def rate(self, kind: Kind) -> float:
        """Return the probability that the next token of a draft is right."""
        own = self._kinds.get(kind)
        return own.rate if own else self._shared.of(kind).rate

    def observe(self, kind: Kind, right: bool) -> None:
        """Record if a token of a draft was right, for this row and as a prior of all."""
        shared = self._shared.of(kind)
        if kind not in self._kinds:
            self._kinds[kind] = Acceptance(lambda: shared.rate, _ROW_MEMORY)
        self._kinds[kind].observe(right)
        shared.observe(right)
