"""Offers the drafts that a network has computed for all rows of a batch at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.speculation.offer import DraftedRow, Kind, Offer, RowAcceptance, SharedAcceptance

_KNOWN = 12  # drafts, if tokens of each depth were compared often enough
_KNOWN_BY_DEPTH = 6  # tokens
_KNOWN_ANYWAY = 15  # drafts: those of a network that is mostly wrong have few deep tokens to compare


@dataclass(slots=True)
class _Draft:
    answered: int  # tokens of the row's answer that it follows
    tokens: tuple[int, ...]
    compared: int = 0  # of these, with what the row has drawn


class NetworkProposer:
    """Holds the drafts of a network, and learns by depth how often they are right: from what rows draw, whether the
    drafts were verified or not. For the engine's thread."""

    def __init__(self, kind: str, priors: Sequence[float]) -> None:
        """`priors`: acceptance rate of each token of a draft, if those before it are right, before any was compared."""
        self.kind = kind
        self._priors = tuple(priors)
        self._drafts: dict[str, _Draft] = {}
        self._shared = SharedAcceptance(self._prior)
        self._acceptance: dict[str, RowAcceptance] = {}

    @property
    def depth(self) -> int:
        """Most tokens of a draft."""
        return len(self._priors)

    @property
    def is_known(self) -> bool:
        """True if enough drafts were compared to tell how often their tokens are right."""
        first, *deeper = (self._shared.of((self.kind, depth)).compared for depth in range(self.depth))
        return first >= _KNOWN_ANYWAY or (first >= _KNOWN and all(each >= _KNOWN_BY_DEPTH for each in deeper))

    def _prior(self, kind: Kind) -> float:
        return self._priors[kind[1]]

    def hold(self, id: str, answered: int, tokens: Sequence[int]) -> None:
        """Hold a row's draft. `answered`: tokens of its answer that the draft follows."""
        self._drafts[id] = _Draft(answered, tuple(tokens))

    def offer(self, row: DraftedRow) -> Offer | None:
        """Return the draft after the row's last token, if it is computed."""
        draft = self._drafts.get(row.id)
        if draft is None or draft.answered != len(row.answer):
            return None
        return Offer(self.kind, draft.tokens, self._rates_by_depth(row.id)[: len(draft.tokens)])

    def foresee(self, row: DraftedRow) -> Offer | None:
        """Learn from what the row has drawn since its last draft. Return an offer with the acceptance rates of its next
        one, whose tokens are not computed yet; None if it gets none."""
        self._learn(row)
        return Offer(self.kind, (0,) * self.depth, self._rates_by_depth(row.id))

    def foresee_optimistically(self, row: DraftedRow) -> Offer | None:
        """Return `foresee` with the acceptance rates before any draft was compared: those of a better time."""
        offer = self.foresee(row)
        return offer and Offer(self.kind, offer.tokens, self._priors)

    def _learn(self, row: DraftedRow) -> None:
        """Compare the row's draft with the tokens that it has drawn since, up to the first wrong one."""
        draft = self._drafts.get(row.id)
        if draft is None:
            return
        drawn = row.answer[draft.answered + draft.compared : draft.answered + len(draft.tokens)]
        pairs = enumerate(zip(draft.tokens[draft.compared :], drawn, strict=False))
        right = next((index for index, (token, other) in pairs if token != other), len(drawn))
        is_wrong = right < len(drawn)
        self._observe(row.id, draft.compared, right, is_wrong=is_wrong)
        draft.compared += right
        if is_wrong or draft.compared == len(draft.tokens):
            del self._drafts[row.id]

    def observe_accepted(self, row: DraftedRow, proposed: int, accepted: int) -> None:
        """Learn from a draft that was verified how often its tokens are right."""
        draft = self._drafts.pop(row.id, None)
        self._observe(row.id, 0, accepted, is_wrong=accepted < proposed)
        if draft and proposed == accepted < len(draft.tokens):  # the row has drawn the next one too
            draft.compared = accepted
            self._drafts[row.id] = draft

    def _observe(self, id: str, depth: int, right: int, *, is_wrong: bool) -> None:
        """Record that the next `right` tokens of a draft were right, and, if `is_wrong`, that the one after them was
        not. `depth`: of the first of them."""
        acceptance = self._acceptance_of(id)
        for index in range(right + is_wrong):
            acceptance.observe((self.kind, depth + index), index < right)

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        self._drafts.pop(row.id, None)
        self._acceptance.pop(row.id, None)

    def _rates_by_depth(self, id: str) -> tuple[float, ...]:
        acceptance = self._acceptance_of(id)
        return tuple(acceptance.rate((self.kind, depth)) for depth in range(self.depth))

    def _acceptance_of(self, id: str) -> RowAcceptance:
        if id not in self._acceptance:
            self._acceptance[id] = RowAcceptance(self._shared)
        return self._acceptance[id]
