"""Counts of what a step has done, for its report and for the comparison of its memory with the prediction."""

from dataclasses import dataclass, field

from worker.engine.memory import NO_IMAGES, ImageDemand, StepDemand


@dataclass(slots=True)
class StepCounts:
    """Counts of what a step has done so far."""

    began: float = 0.0
    rows: int = 0  # that decoded at its beginning
    evicted: int = 0  # prefixes and images evicted before it
    preempted: int = 0  # rows
    out_of_memory: int = 0  # rows whose caches were given up, since the device had no memory
    longest_chunk: int = 0  # tokens
    images: ImageDemand = NO_IMAGES  # encoded
    queried_tokens: int = 0  # of prompts whose prefill has finished
    hit_tokens: int = 0  # of these, from the prefix cache
    # Of the rows that take memory: by group, each row in prefill being one; and bytes of the decoding groups' buffers.
    lengths: list[list[int]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)

    def demand(self, drafted: int) -> StepDemand:
        """Return what the step is predicted to take memory for. `drafted`: tokens of a forward that verified drafts."""
        # A decoding row needs as much as one token of a chunk, and as one for each token of a draft.
        drawn = max(sum(map(len, self.lengths[: len(self.buffers)])), drafted)
        return StepDemand(self.lengths, self.buffers, max(self.longest_chunk, drawn), self.images, drawn)
