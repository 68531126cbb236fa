"""Which prompts advance in this step, and by how many tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.schedule.budget import MIN_CHUNK, PromptCost
from worker.schedule.request import Lane

# One step in so many belongs to the prompt that has waited longest. A long one then takes four times as long
# under an endless stream of short ones, instead of for ever, and a short one waits for one chunk more.
OLDEST_FIRST_EVERY = 4


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt that is not wholly in the cache, of the model or of its draft, or that has yet to join the rows that
    decode."""

    id: str
    done: int  # tokens in the cache
    remaining: int  # tokens still to prefill
    waited: int  # steps since it came
    lane: Lane
    cost: PromptCost
    cuts: Sequence[int] = ()  # tokens of the prompt, in order, behind which a forward has to end
    growth: int = 0  # bytes that are copied when it joins, beside its own


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int
    joins: bool = False  # the prompt is then in the cache, and its row joins those that decode


def plan(waiting: Iterable[WaitingPrompt], spare_s: Mapping[Lane, float], step: int, longest: int) -> list[Chunk]:
    """Spend each lane's seconds on the prompts that are done soonest; interactive ones first, and offline ones get what
    those leave of theirs. `step` counts up, and `longest` is what a chunk may have in tokens. The first prompt always
    advances, if only by a few tokens.

    Always one row a chunk: rows padded to one length would pay for the longest, and a recurrent state takes
    the padding in.
    """
    chunks, spent_s = list[Chunk](), 0.0
    for row in sorted(waiting, key=_age if step % OLDEST_FIRST_EVERY == 0 else _length):
        left_s = spare_s[row.lane] - spent_s
        chunk = _chunk(row, left_s, longest, first=not chunks)
        if chunk is None:
            break
        chunks.append(chunk)
        spent_s += _forward_s(row, chunk.tokens) + (_join_s(row) if chunk.joins else 0.0)
    return chunks


def _chunk(row: WaitingPrompt, seconds: float, longest: int, *, first: bool) -> Chunk | None:
    """The longest chunk that takes no longer; None if that is not worth its pass over the weights.

    A row whose join does not fit joins in the next step: to leave a token for that step would cost a pass."""
    tokens = _fitting(row, seconds, longest)
    if tokens < min(row.remaining, row.cost.worthwhile):
        if not first:
            return None
        tokens = min(row.remaining, max(tokens, MIN_CHUNK))
    joins = tokens == row.remaining and _forward_s(row, tokens) + _join_s(row) <= seconds
    if tokens == 0 and not joins:
        return Chunk(row.id, 0, joins=True) if first else None
    return Chunk(row.id, tokens, joins)


def _fitting(row: WaitingPrompt, seconds: float, longest: int) -> int:
    """The most tokens that can be computed in that time. Each cut within them costs another pass over the weights."""
    ends = [*(cut - row.done for cut in row.cuts if 0 < cut - row.done < row.remaining), row.remaining]
    fitting = (
        min(end, longest, row.cost.within(seconds - cuts * row.cost.forward_s, row.done))
        for cuts, end in enumerate(ends)
    )
    return max(fitting)


def _forward_s(row: WaitingPrompt, tokens: int) -> float:
    """A prompt of a single token has none to advance by, and costs one."""
    if tokens == 0 and row.done:
        return 0.0
    cuts = sum(0 < cut - row.done < tokens for cut in row.cuts)
    return row.cost.of(max(tokens, 1), row.done) + cuts * row.cost.forward_s


def _join_s(row: WaitingPrompt) -> float:
    return row.cost.join(row.done + row.remaining, row.growth)


def _length(row: WaitingPrompt) -> tuple[bool, float]:
    return row.lane == "batch", row.cost.of(row.remaining, row.done)


def _age(row: WaitingPrompt) -> tuple[bool, int]:
    return row.lane == "batch", -row.waited
