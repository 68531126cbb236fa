"""Which prompts advance in this step, and by how many tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.schedule.sequence import Lane

# A waiting step counts as so many tokens done already. A 32k prompt then passes a stream of 100-token ones
# after about a thousand steps at the most, instead of never.
AGING_TOKENS_PER_STEP = 32


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is not wholly in the cache."""

    id: str
    remaining: int  # tokens still to prefill
    waited: int  # steps since it last advanced
    lane: Lane


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int


def plan(waiting: Iterable[Waiting], budget: int) -> list[Chunk]:
    """Spend `budget` tokens on the prompts that are done soonest; interactive ones first.

    Always one row a chunk: rows padded to one length would pay for the longest, and a recurrent state takes
    the padding in. A chunk of the last tokens costs one at least, so that a step stays bounded.
    """
    chunks = []
    for row in sorted(waiting, key=_urgency):
        if budget <= 0:
            break
        tokens = min(row.remaining, budget)
        chunks.append(Chunk(row.id, tokens))
        budget -= max(tokens, 1)
    return chunks


def _urgency(row: Waiting) -> tuple[bool, int]:
    return row.lane == "batch", row.remaining - AGING_TOKENS_PER_STEP * row.waited
