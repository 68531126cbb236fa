"""The state of a waiting prompt, as a step is planned from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.schedule.outcomes import Phase
from worker.schedule.request import Lane
from worker.schedule.step.cost import PromptCost


@dataclass(frozen=True, slots=True)
class PromptState:
    """State of an active prompt before its row decodes: its images are encoded, or it is scored, or not all of its
    tokens are in the row's cache, or its row has not joined the decoding rows yet. Token counts are those of the
    current phase."""

    id: str
    done: int  # tokens computed, or found in a prefix cache
    remaining: int  # tokens still to compute
    waited_s: float  # since it was added
    lane: Lane
    cost: PromptCost
    cuts: Sequence[int] = ()  # positions of the prompt, ascending, at which a forward has to end
    join_copy_bytes: int = 0  # of the batch's buffers, which are copied when the row joins
    added_decode_s: float = 0.0  # that the decode step takes longer once the row has joined
    phase: Phase = "prefill"
    started: bool = False  # the phase has begun, and holds memory that is freed at its end
    exclusive: bool = False  # of all prompts in this phase, one at a time may advance
    pack: int | None = None  # prompts with the same value may share a forward; None: this one shares none
    padded: bool = False  # their chunks may differ in length then, and cost as much as the longest

    @property
    def only_joins(self) -> bool:
        """True if nothing is left to compute, and the row has only to join."""
        return self.phase == "prefill" and self.done > 0 and not self.remaining

    @property
    def alone_s(self) -> float:
        """Seconds that the rest of the phase takes in a forward of its own; 0 if the row only joins."""
        return self.cost.rest_s(self.remaining, self.done)
