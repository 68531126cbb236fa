"""Plan the prefill of a step: the prompts that advance, and by how many tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.schedule.budget import MIN_CHUNK, PromptCost
from worker.schedule.outcomes import Phase
from worker.schedule.request import Lane

# One step in this many is for the prompt that has waited longest. Under an endless stream of short prompts, a long one
# then takes four times as long instead of forever, and a short one waits for one more chunk.
OLDEST_FIRST_EVERY = 4


@dataclass(frozen=True, slots=True)
class PromptState:
    """State of an active prompt before its row decodes: its images are encoded, or it is scored, or not all of its
    tokens are in the row's cache, or its row has not joined the decoding rows yet. Token counts are those of the
    current phase."""

    id: str
    done: int  # tokens computed, or found in a prefix cache
    remaining: int  # tokens still to compute
    waited: int  # steps since it was added
    lane: Lane
    cost: PromptCost
    cuts: Sequence[int] = ()  # positions of the prompt, ascending, at which a forward has to end
    growth: int = 0  # bytes of the batch's buffers that are copied when the row joins
    phase: Phase = "prefill"
    started: bool = False  # the phase has begun, and holds memory that is freed at its end
    exclusive: bool = False  # of all prompts in this phase, one at a time may advance
    pack: int | None = None  # prompts with the same value may share a forward; None: this one shares none
    padded: bool = False  # their chunks may differ in length then, and cost as much as the longest


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that one prompt advances by in a step."""

    id: str
    tokens: int
    joins: bool = False  # prefill is finished with this chunk, and the row joins the decoding rows


@dataclass(frozen=True, slots=True)
class Forward:
    """Chunks that are computed together. Several chunks belong to prompts with the same `pack`, have at least one token
    and, unless these are `padded`, the same number of tokens. None of them crosses a cut of its prompt, although it may
    end at one."""

    chunks: tuple[Chunk, ...]


def may_advance(prompts: Sequence[PromptState]) -> list[PromptState]:
    """Return the prompts that may advance in a step, in order. Images of one prompt at a time are encoded, and one
    prompt is scored, since a vision encoder's activations and a draft's cache occupy memory."""
    single = [_first_in(prompts, phase) for phase in {row.phase for row in prompts if row.exclusive}]
    return [row for row in prompts if not row.exclusive or row in single]


def _first_in(prompts: Sequence[PromptState], phase: Phase) -> PromptState:
    """Return the one prompt of this phase that may advance. Prefers a prompt that has started, then interactive
    ones, then the shortest."""
    rows = [row for row in prompts if row.phase == phase]
    return max(rows, key=lambda row: (row.started, row.lane == "interactive", -row.remaining))


def plan(prompts: Iterable[PromptState], spare_s: Mapping[Lane, float], step: int, longest: int) -> list[Forward]:
    """Return the forwards of a step. Spends each lane's seconds on the prompts that finish soonest, interactive ones
    first; the time that these take is not left for offline ones. The first prompt always advances, if only by a few
    tokens. `step`: number of the step, counting up. `longest`: most tokens of a forward.

    Every forward has one row: rows padded to one length would pay for the longest, and padding would enter a recurrent
    state."""
    forwards, spent_s = list[Forward](), 0.0
    for row in sorted(prompts, key=_age if step % OLDEST_FIRST_EVERY == 0 else _length):
        left_s = spare_s[row.lane] - spent_s
        chunk = _chunk(row, left_s, longest, first=not forwards)
        if chunk is None:
            break
        forwards.append(Forward((chunk,)))
        spent_s += _forward_s(row, chunk.tokens) + (_join_s(row) if chunk.joins else 0.0)
    return forwards


def _chunk(row: PromptState, seconds: float, longest: int, *, first: bool) -> Chunk | None:
    """Return the longest chunk that takes at most `seconds`, or None if it is not worth its pass over the weights. The
    `first` chunk of a step is never None.

    A row whose join does not fit joins in the next step: leaving a token for that step would cost a pass."""
    tokens = _fitting(row, seconds, longest)
    if tokens < min(row.remaining, row.cost.worthwhile):
        if not first:
            return None
        tokens = min(row.remaining, max(tokens, MIN_CHUNK))
    joins = tokens == row.remaining and _forward_s(row, tokens) + _join_s(row) <= seconds
    if tokens == 0 and not joins:
        return Chunk(row.id, 0, joins=True) if first else None
    return Chunk(row.id, tokens, joins)


def _fitting(row: PromptState, seconds: float, longest: int) -> int:
    """Return the most tokens that can be computed in `seconds`. Each cut within them costs another pass over the
    weights."""
    ends = [*(cut - row.done for cut in row.cuts if 0 < cut - row.done < row.remaining), row.remaining]
    fitting = (
        min(end, longest, row.cost.within(seconds - cuts * row.cost.forward_s, row.done))
        for cuts, end in enumerate(ends)
    )
    return max(fitting)


def _forward_s(row: PromptState, tokens: int) -> float:
    """Return the seconds of a chunk's forwards. A prompt of a single token has no tokens to prefill, and costs as much
    as one token."""
    if tokens == 0 and row.done:
        return 0.0
    cuts = sum(0 < cut - row.done < tokens for cut in row.cuts)
    return row.cost.of(max(tokens, 1), row.done) + cuts * row.cost.forward_s


def _join_s(row: PromptState) -> float:
    return row.cost.join(row.done + row.remaining, row.growth)


def _length(row: PromptState) -> tuple[bool, float]:
    return row.lane == "batch", row.cost.of(row.remaining, row.done)


def _age(row: PromptState) -> tuple[bool, int]:
    return row.lane == "batch", -row.waited
