"""Rows that take drafts, what proposers offer them, and how probable it is that a token of a draft is right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, overload

from worker.outcomes import MAX_DRAFT
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
class _RowView:
    """A row with its next input as a part of the answer."""

    id: str
    request: GenerationRequest
    answer: Sequence[int]


def undelivered(row_input: RowInput) -> list[int]:
    """Return the row's next input, unless its answer has it already."""
    return [] if row_input.row.last_unfed else [row_input.token]


def view(row_input: RowInput) -> "DraftedRow":
    """Return the row with its next input as a part of the answer."""
    row = row_input.row
    return _RowView(row.id, row.request, row.answer if row.last_unfed else [*row.answer, row_input.token])


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


class Acceptance:
    """Share of right tokens among those that were compared, by kind of draft, of which recent ones count more: in all
    rows, or in one. That of all rows is the prior of each, so that a new row tries no drafts that were wrong in the
    others."""

    def __init__(
        self, prior: Callable[[Kind], float], memory: float = 0.995, all_rows: "Acceptance | None" = None
    ) -> None:
        """`prior`: the rate of a kind of which no token was compared. `memory`: weight that an observation keeps when
        the next one is made; with 0.995 the last 200 count. `all_rows`: learns from this row too."""
        self._prior = prior
        self._memory = memory
        self._all_rows = all_rows
        self._counts = dict[Kind, tuple[float, float]]()  # right ones, and all

    def of_row(self) -> "Acceptance":
        """Return the acceptance in one row more."""
        # The last ten count, so a row that begins to copy, or ceases to, is noticed at once.
        return Acceptance(self.rate, memory=0.9, all_rows=self)

    def observe(self, kind: Kind, right: bool) -> None:
        """Record if a token of a draft was right. Tokens after a wrong one are not compared."""
        before, compared = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = before * self._memory + right, compared * self._memory + 1
        if self._all_rows:
            self._all_rows.observe(kind, right)

    def rate(self, kind: Kind) -> float:
        """Return the probability that the next token of a draft is right, if those before it were."""
        right, compared = self._counts.get(kind, (0.0, 0.0))
        prior_tokens = 4.0  # that the prior counts as. test_acceptance.py
        return (right + prior_tokens * self._prior(kind)) / (compared + prior_tokens)


class Proposer:
    """Offers drafts. Called by the engine's thread, between forwards; it must not block for long."""

    def begin_step(self, rows: Sequence[DraftedRow]) -> bool:
        """Do a bounded part of the work that offers for these rows need, which are all that take drafts. Called in the
        steps after a row has joined them, until it returns False: nothing is left."""
        return False

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return a draft that continues the row after its last token, or None. It is called at most once
        between two forwards, and not before each of them."""
        raise NotImplementedError

    def observe_accepted(self, row: DraftedRow, proposed: int, accepted: int) -> None:
        """Record that the first `proposed` tokens of this proposer's last offer were verified, and the first `accepted`
        of these were right."""

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row. It may be offered again after that."""


@dataclass(slots=True)
class _Draft:
    answered: int  # tokens of the row's answer that it follows
    tokens: tuple[int, ...]
    compared: int = 0  # of these, with what the row has drawn


class NetworkProposer(Proposer):
    """Holds the drafts that a network computes for all rows of a batch at once, and learns by depth how often they are
    right: from what rows draw, whether the drafts were verified or not."""

    def __init__(self, kind: str, hoped: Sequence[float]) -> None:
        """`hoped`: acceptance rate of each token of a draft, if those before it are right, before any was
        compared. A network that would not pay with these is not tried."""
        self.kind = kind
        self._hoped = tuple(hoped)
        self._drafts: dict[str, _Draft] = {}
        # In all rows, of which single ones have too few drafts to tell: the last 50 of a depth count.
        self._acceptance = Acceptance(lambda kind: self._hoped[kind[1]], memory=0.98)

    @property
    def depth(self) -> int:
        """Most tokens of a draft."""
        return len(self._hoped)

    def prepare(
        self, batch: Any, inputs: Sequence[RowInput], fed: Any = None, depth: int = MAX_DRAFT, prefill_s: float = inf
    ) -> bool:
        """Compute drafts of `depth` tokens for the rows of a batch after their next inputs. Returns False if there are
        none, or if other work took a part of the time. Blocks. `fed`: the last forward of the batch. `prefill_s`: most
        seconds to compute prompts."""
        raise NotImplementedError

    def nbytes_of(self, batch: Any) -> int:
        """Return the allocated bytes for the rows of one batch."""
        return 0

    def leave(self, id: str) -> None:
        """Free a row's slot in its batch."""

    def hold(self, id: str, answered: int, tokens: Sequence[int]) -> None:
        """Hold a row's draft. `answered`: tokens of its answer that the draft follows."""
        self._drafts[id] = _Draft(answered, tuple(tokens))

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return the draft after the row's last token, if it is computed."""
        draft = self._drafts.get(row.id)
        if draft is None or draft.answered != len(row.answer):
            return None
        return Offer(self.kind, draft.tokens, self._rates[: len(draft.tokens)])

    def foresee(self, row: DraftedRow, *, hopeful: bool = False) -> Offer | None:
        """Learn from what the row has drawn since its last draft. Return an offer with the acceptance rates of its next
        one, whose tokens are not computed yet; None if it gets none. `hopeful`: with the rates that are hoped for:
        those of a better time."""
        self._learn(row)
        return Offer(self.kind, (0,) * self.depth, self._hoped if hopeful else self._rates)

    def _learn(self, row: DraftedRow) -> None:
        """Compare the row's draft with the tokens that it has drawn since, up to the first wrong one."""
        draft = self._drafts.get(row.id)
        if draft is None:
            return
        drawn = row.answer[draft.answered + draft.compared : draft.answered + len(draft.tokens)]
        pairs = enumerate(zip(draft.tokens[draft.compared :], drawn, strict=False))
        right = next((index for index, (token, other) in pairs if token != other), len(drawn))
        is_wrong = right < len(drawn)
        self._observe(draft.compared, right, is_wrong=is_wrong)
        draft.compared += right
        if is_wrong or draft.compared == len(draft.tokens):
            del self._drafts[row.id]

    def observe_accepted(self, row: DraftedRow, proposed: int, accepted: int) -> None:
        """Learn from a draft that was verified how often its tokens are right."""
        draft = self._drafts.pop(row.id, None)
        self._observe(0, accepted, is_wrong=accepted < proposed)
        if draft and proposed == accepted < len(draft.tokens):  # the row has drawn the next one too
            draft.compared = accepted
            self._drafts[row.id] = draft

    def _observe(self, depth: int, right: int, *, is_wrong: bool) -> None:
        """Record that the next `right` tokens of a draft were right, and, if `is_wrong`, that the one after them was
        not. `depth`: of the first of them."""
        for index in range(right + is_wrong):
            self._acceptance.observe((self.kind, depth + index), index < right)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        self._drafts.pop(row.id, None)

    @property
    def _rates(self) -> tuple[float, ...]:
        """Acceptance rates by depth."""
        return tuple(self._acceptance.rate((self.kind, depth)) for depth in range(self.depth))
