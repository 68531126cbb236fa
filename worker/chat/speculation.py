"""Speculation of a job: what the request allows, the predicted text, and the receipt."""

from dataclasses import dataclass, field
from typing import Any

from schemas import ChatRequest
from schemas.speculation import DraftLimit
from worker.chat.context import WorkerContext
from worker.queue.job.claims import Claim
from worker.schedule.outcomes import Speculated
from worker.schedule.speculation.copies import PREDICTION
from worker.settings import Settings


def draft_limit(request: ChatRequest, settings: Settings) -> int | None:
    """Return the most tokens of a draft; 0 for no speculation, None for the engine's own limit."""
    if settings.speculation == "off" or request.speculation is False:
        return 0
    return request.speculation.max_tokens if isinstance(request.speculation, DraftLimit) else None


async def prediction_tokens(request: ChatRequest, context: WorkerContext, claim: Claim) -> tuple[int, ...]:
    """Tokenize the predicted text on a text thread; empty if there is none, or it is not used."""
    if request.prediction is None or draft_limit(request, context.settings) == 0:
        return ()
    return await context.codec.prediction(request.prediction.text, claim.lane, claim.tenant)


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of drafts."""

    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class SpeculationReceipt:
    """Counts of one attempt."""

    requested: bool = False  # by a field of the request: then a receipt is due, even if nothing was drafted
    _kinds: dict[str, Counts] = field(default_factory=dict)

    def record(self, verified: Speculated) -> None:
        """Add a draft that was verified."""
        for place, kind in enumerate(verified.kinds or (verified.kind,) * verified.proposed):
            counts = self.of(kind)
            self._kinds[kind] = Counts(counts.proposed + 1, counts.accepted + (place < verified.accepted))

    def of(self, kind: str) -> Counts:
        """Return the counts of one proposer."""
        return self._kinds.get(kind, Counts())

    @property
    def predicted(self) -> Counts:
        """Counts of drafts from the predicted text."""
        return self.of(PREDICTION)

    def as_result(self, tokens: int) -> dict[str, Any] | None:
        """Return the report for the stored result; None if there is nothing to report. `tokens`: of this attempt."""
        if not self._kinds and not self.requested:
            return None
        proposed = sum(counts.proposed for counts in self._kinds.values())
        accepted = sum(counts.accepted for counts in self._kinds.values())
        kinds = {
            kind: {"proposed": counts.proposed, "accepted": counts.accepted} for kind, counts in self._kinds.items()
        }
        # Each forward of the row draws one token after those that it accepts.
        per_forward = round(tokens / max(1, tokens - accepted), 2) if tokens else 0.0
        return {"proposed": proposed, "accepted": accepted, "tokens_per_forward": per_forward, "kinds": kinds}
