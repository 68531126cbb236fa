"""Which prompts advance in this step, and by how many tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.schedule.sequence import Lane

# One step in so many belongs to the prompt that has waited longest. A long one then takes four times as long
# under an endless stream of short ones, instead of for ever, and a short one waits for one chunk more.
OLDEST_FIRST_EVERY = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is not wholly in the cache."""

    id: str
    remaining: int  # tokens still to prefill
    waited: int  # steps since it came
    lane: Lane


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int


def plan(waiting: Iterable[Waiting], budget: int, step: int, chunk_tokens: int = 0) -> list[Chunk]:
    """Spend `budget` tokens on the prompts that are done soonest; interactive ones first. `step` counts
    up. Every chunk but one costs `chunk_tokens` beside its own.

    Always one row a chunk: rows padded to one length would pay for the longest, and a recurrent state takes
    the padding in. A chunk of the last tokens costs one at least, so that a step stays bounded.
    """
    chunks = []
    for row in sorted(waiting, key=_age if step % OLDEST_FIRST_EVERY == 0 else _length):
        if budget <= 0:
            break
        tokens = min(row.remaining, budget)
        chunks.append(Chunk(row.id, tokens))
        budget -= max(tokens, 1) + chunk_tokens
    return chunks


def _length(row: Waiting) -> tuple[bool, int]:
    return row.lane == "batch", row.remaining


def _age(row: Waiting) -> tuple[bool, int]:
    return row.lane == "batch", -row.waited
