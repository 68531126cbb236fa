"""Speculation of a job: what the request allows, the predicted text, and the receipt."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from schemas import ChatRequest
from schemas.chat import DraftLimit
from worker.chat.context import WorkerContext
from worker.outcomes import PREDICTION, Sampled, Speculated
from worker.queue.job.claims import Claim
from worker.settings import Settings


def draft_limit(request: ChatRequest, settings: Settings) -> int | None:
    """Return the most tokens of a draft; 0 for no speculation, None for the engine's own limit."""
    if settings.speculation == "off" or request.speculation is False:
        return 0
    return request.speculation.max_tokens if isinstance(request.speculation, DraftLimit) else None


def why_no_drafts(request: ChatRequest, settings: Settings) -> str:
    """Return why an answer may have no drafts, for its receipt; empty if the request has no field about them."""
    if request.speculation is None and request.prediction is None:
        return ""
    if settings.speculation == "off":
        return "Speculation is off on this worker (SLUICE_SPECULATION=off)."
    if draft_limit(request, settings) == 0:
        return "The request turns speculation off."
    return "No source had a draft, or none was expected to save time."


async def prediction_tokens(request: ChatRequest, context: WorkerContext, claim: Claim) -> tuple[int, ...]:
    """Tokenize the predicted text on a text thread; empty if there is none, or it is not used."""
    if request.prediction is None or draft_limit(request, context.settings) == 0:
        return ()
    return await context.codec.prediction(request.prediction.text, claim.lane, claim.tenant)


@dataclass(slots=True)
class SpeculationReceipt:
    """Counts of one attempt. Tokens count as accepted once they are a part of the answer: a stop sequence may end it
    within a draft."""

    why_no_drafts: str = ""  # not empty if the request has a field about them: then a receipt is due without drafts too
    _kinds: dict[str, tuple[int, int]] = field(default_factory=dict)  # tokens proposed and accepted, by their kind
    _accepted: Iterator[str] = field(default_factory=lambda: iter(()))  # kinds of the last draft's accepted tokens
    _tokens: int = 0  # of the answer
    _forwards: int = 0  # that have drawn them, or the end of the answer
    _within: bool = False  # the last token was accepted, so the same forward has drawn the next one

    def record(self, verified: Speculated) -> None:
        """Add a draft that was verified, before the tokens that it has brought."""
        kinds = verified.kinds or (verified.kind,) * verified.proposed
        for kind in kinds:
            self._add(kind, proposed=1)
        self._accepted = iter(kinds[: verified.accepted])

    def count(self, step: Sampled) -> None:
        """Add a token of the answer, or its end."""
        self._tokens += step.token is not None
        self._forwards += not self._within
        self._within = step.accepted
        if step.accepted:
            self._add(next(self._accepted), accepted=1)

    def _add(self, kind: str, *, proposed: int = 0, accepted: int = 0) -> None:
        before = self.of(kind)
        self._kinds[kind] = before[0] + proposed, before[1] + accepted

    def of(self, kind: str) -> tuple[int, int]:
        """Return how many tokens of one proposer were proposed, and how many accepted."""
        return self._kinds.get(kind, (0, 0))

    @property
    def predicted(self) -> tuple[int, int]:
        """How many tokens of the predicted text were proposed, and how many accepted."""
        return self.of(PREDICTION)

    def as_result(self) -> dict[str, Any] | None:
        """Return the report for the stored result; None if there is nothing to report."""
        if not self._kinds and not self.why_no_drafts:
            return None
        kinds = {
            kind: {"proposed": proposed, "accepted": accepted} for kind, (proposed, accepted) in self._kinds.items()
        }
        proposed, accepted = (sum(counts[place] for counts in self._kinds.values()) for place in (0, 1))
        per_forward = round(self._tokens / self._forwards, 2) if self._forwards else 0.0
        report = {"proposed": proposed, "accepted": accepted, "tokens_per_forward": per_forward, "kinds": kinds}
        return report if kinds else {**report, "skipped": self.why_no_drafts}
