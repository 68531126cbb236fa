"""Which prompts advance in this step, and by how many tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.schedule.budget import LEAST, PromptCost
from worker.schedule.sequence import Lane

# One step in so many belongs to the prompt that has waited longest. A long one then takes four times as long
# under an endless stream of short ones, instead of for ever, and a short one waits for one chunk more.
OLDEST_FIRST_EVERY = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """A prompt that is not wholly in the cache, of the model or of its draft."""

    id: str
    done: int  # tokens in the cache
    remaining: int  # tokens still to prefill
    waited: int  # steps since it came
    lane: Lane
    cost: PromptCost


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int


def plan(waiting: Iterable[Waiting], spare_s: float, step: int, longest: int) -> list[Chunk]:
    """Spend so many seconds on the prompts that are done soonest; interactive ones first. `step` counts up, and
    `longest` is what a chunk may have in tokens. The first prompt always advances, if only by a few tokens.

    Always one row a chunk: rows padded to one length would pay for the longest, and a recurrent state takes
    the padding in.
    """
    chunks = list[Chunk]()
    for row in sorted(waiting, key=_age if step % OLDEST_FIRST_EVERY == 0 else _length):
        tokens = min(row.remaining, longest, row.cost.within(spare_s, row.done))
        if tokens == row.remaining and _seconds(row, tokens) > spare_s:
            tokens -= 1  # it joins the others in a step that has time for it
        least = min(row.remaining, LEAST)
        if chunks and tokens < least:
            break
        tokens = max(tokens, least)
        chunks.append(Chunk(row.id, tokens))
        spare_s -= _seconds(row, tokens)
    return chunks


def _seconds(row: Waiting, tokens: int) -> float:
    """A prompt of a single token has none to advance by, and costs one."""
    joins = tokens == row.remaining
    return row.cost.of(max(tokens, 1), row.done) + (row.cost.join(row.done + tokens) if joins else 0.0)


def _length(row: Waiting) -> tuple[bool, float]:
    return row.lane == "batch", row.cost.of(row.remaining, row.done)


def _age(row: Waiting) -> tuple[bool, int]:
    return row.lane == "batch", -row.waited
