"""Compares the memory that steps take with the predictions of admission."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import ge

import mlx.core as mx

from worker.engine.admission_controller import AdmissionController
from worker.engine.batch.groups import Groups
from worker.engine.memory import NO_IMAGES, ImageDemand, MemoryModel
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import PrefillQueue


@dataclass(frozen=True, slots=True)
class StepDemand:
    """What the memory of a step is predicted from, besides the saved caches of waiting rows."""

    lengths: Sequence[Sequence[int]]  # of the rows, in tokens, by group; each row in prefill is a group of its own
    buffers: Sequence[int]  # allocated bytes of the decoding groups, which come first in `lengths`
    chunk: int = 0  # tokens of the longest chunk
    images: ImageDemand = NO_IMAGES
    drawn: int = 0  # tokens that decoding rows draw

    def covers(self, other: "StepDemand") -> bool:
        """Return True if at least as much memory is predicted for this step as for the other, whatever the model: all
        groups have as many rows, and nothing is shorter or smaller."""
        return (
            [*map(len, self.lengths)] == [*map(len, other.lengths)]
            and len(self.buffers) == len(other.buffers)
            and all(map(ge, _longest(self), _longest(other)))
            and all(map(ge, self.buffers, other.buffers))
            and self.chunk >= other.chunk
            and self.drawn >= other.drawn
            and self.images == other.images
        )


def _longest(demand: StepDemand) -> Iterator[int]:
    """Return the length of the longest row of each group."""
    return (max(group, default=0) for group in demand.lengths)


class StepMemory:
    """Reads the peak memory of every step, and compares it with its prediction, unless that could change nothing: the
    same rows as in the step compared last take no more than was predicted for that one. So a plan of admission uses
    the corrections of all steps before it. For the engine's thread."""

    def __init__(
        self,
        costs: MemoryModel,
        prefills: PrefillQueue,
        running: Groups,
        admission: AdmissionController,
        caches: EngineCaches,
    ) -> None:
        """`costs`: predicts memory. All stay owned by the caller."""
        self._costs = costs
        self._prefills, self._running = prefills, running
        self._admission, self._caches = admission, caches
        self._is_planned = True  # a plan of admission is applied in this step, so other caches may be saved
        self._lengths: list[list[int]] = []  # of this step
        self._buffers: list[int] = []
        self._compared: StepDemand | None = None  # of the step compared last

    def begin_step(self) -> None:
        """Begin to measure the peak."""
        self._is_planned = self._admission.needs_decision
        mx.reset_peak_memory()

    def record_rows(self) -> None:
        """Record the rows that take memory, before any leaves: at no other time of the step are there more."""
        self._lengths = [*self._running.lengths, *([length] for length in self._prefills.lengths)]
        self._buffers = self._running.buffers

    def compare(self, prompt_tokens: int, images: ImageDemand) -> tuple[int, int] | None:
        """Compare the step's memory with its prediction, if that could change something. Returns what
        `AdmissionController.calibrate` returns; None if nothing is compared. `prompt_tokens`: tokens of the longest
        chunk. `images`: encoded in the step."""
        # A decoding row needs as much as one token of a chunk, and as one for each token of a draft.
        drawn = max(sum(map(len, self._lengths[: len(self._buffers)])), self._running.verifications.tokens)
        chunk = max(prompt_tokens, drawn)
        demand = StepDemand(self._lengths, self._buffers, chunk, images, drawn)
        comparable = not self._is_planned and self._compared is not None and demand.covers(self._compared)
        if comparable and self._admission.skip_calibration(self._caches.nbytes):
            return None
        self._compared = demand
        slack_bytes = self._costs.slack_bytes(self._lengths[: len(self._buffers)], self._buffers)
        return self._admission.calibrate(self._lengths, chunk, self._caches.nbytes, images, slack_bytes, drawn)
