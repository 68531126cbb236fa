"""Plan the prefill of a step: the prompts that advance, and by how many tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from worker.schedule.outcomes import Phase
from worker.schedule.request import Lane
from worker.schedule.step.cost import MAX_CHUNK, MIN_CHUNK, PromptCost
from worker.schedule.step.overruns import StepKind
from worker.schedule.step.waiting import Backlog

# A first token within this time counts as good. A prompt that can no longer have one counts as taking this multiple of
# its time: overload then does not make every prompt late, and a late but short one is not the last of all.
FIRST_TOKEN_S = 2.0
LATE = 8
# One step in this many is for the prompts that have waited longest, so a late or long one advances under any load.
OLDEST_FIRST_EVERY = 8
# Each second that a prompt has waited counts as this much less of its own time: it lets shorter ones pass until it has
# waited for eight times the difference.
AGING = 1 / 8
# In steps without enough time for an offline chunk, one in this many has a short one all the same.
OFFLINE_EVERY = 8
# A prompt shares a forward if its remaining tokens take at most this many passes over the weights, or are this many
# times those of the forward. The tokens of a longer one would delay the others, and save little.
SHORT_PASSES = 6
SHORT_CHUNKS = 3
# The last tokens of an interactive prompt are computed with the chunk before them if they take at most this many passes
# over the weights, although the step then lasts longer than planned: in a later step they would take a pass of their
# own. The same holds for its join, which would leave a later step too little time for another chunk.
REMAINDER_PASSES = 0.25


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
    growth: int = 0  # bytes of the batch's buffers that are copied when the row joins
    decode_s: float = 0.0  # that the decode step takes longer once the row has joined
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
    seconds: float = 0.0  # expected, with the joins of its rows and the time that these add to the decode step


def kind_of(forwards: Sequence[Forward]) -> StepKind:
    """Return the kind of a step that computes these forwards."""
    joins = any(chunk.joins for forward in forwards for chunk in forward.chunks)
    return StepKind(joins, shared=any(len(forward.chunks) > 1 for forward in forwards))


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


def in_order(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts, the first to advance first: interactive ones, of these the ones that take the least time,
    less a part of the time that they have waited. The time of a prompt that can no longer have its first token within
    `FIRST_TOKEN_S` counts `LATE` times. One step in `OLDEST_FIRST_EVERY` begins with the oldest instead. `step`: number
    of the step, counting up."""
    return sorted(waiting, key=_age if step % OLDEST_FIRST_EVERY == 0 else _rank)


def _only_joins(row: PromptState) -> bool:
    """Return True if nothing but the join is left of a prompt, which is short."""
    return row.phase == "prefill" and row.done > 0 and not row.remaining


def _whole_s(row: PromptState) -> float:
    """Return the seconds that the rest of a prompt takes in a forward of its own."""
    return row.cost.chunk_s(row.remaining, row.done)


def _age(row: PromptState) -> tuple[bool, float]:
    return row.lane == "batch", -row.waited_s


def _rank(row: PromptState) -> tuple[bool, float]:
    offline = row.lane == "batch"
    if _only_joins(row):
        return offline, -inf
    whole_s = _whole_s(row)
    late = not offline and row.waited_s + whole_s > FIRST_TOKEN_S
    return offline, (LATE if late else 1) * whole_s - AGING * row.waited_s


def backlog(waiting: Iterable[PromptState]) -> Backlog:
    """Return the seconds that the interactive prompts take, each in forwards of its own, and the age of the oldest."""
    rows = [row for row in waiting if row.lane == "interactive"]
    seconds = sum(map(_whole_s, rows))
    return Backlog(seconds, max((row.waited_s for row in rows), default=0.0))


def plan(
    prompts: Iterable[PromptState],
    spare_s: Mapping[Lane, float],
    step: int,
    longest: int,
    *,
    shared_s: float = 0.0,
    enough_s: float = inf,
    order: Callable[[Iterable[PromptState], int], list[PromptState]] = in_order,
) -> list[Forward]:
    """Return the forwards of a step. Spends each lane's seconds on the prompts in order, each in one forward at most;
    the time that interactive ones take is not left for offline ones. The first prompt always advances, if only by a few
    tokens; an offline one does so in one step in `OFFLINE_EVERY`. `step`: number of the step, counting up. `longest`:
    most tokens of a forward. `shared_s`: the first forward may take this long, if that is more, in order that several
    interactive prompts share it. `enough_s`: once prompts have taken this long, no further forward begins, since rows
    that have joined should decode."""
    forwards, spent_s = list[Forward](), 0.0
    rows = order(prompts, step)
    while rows and (not forwards or spent_s < enough_s):
        left_s = spare_s[rows[0].lane] - spent_s
        forced = not forwards and (rows[0].lane == "interactive" or step % OFFLINE_EVERY == 0)
        chunk = _chunk(rows[0], left_s, longest, first=forced)
        if chunk is None:
            break
        most_s = shared_s if rows[0].lane == "interactive" and not forwards else 0.0
        forward = _shared(chunk, rows, max(left_s, most_s), longest)
        forwards.append(forward)
        spent_s += forward.seconds
        computed = {each.id for each in forward.chunks}
        rows = [row for row in rows if row.id not in computed]
    return forwards


def _shared(chunk: Chunk, rows: Sequence[PromptState], left_s: float, longest: int) -> Forward:
    """Return the forward that computes the first row's chunk, together with chunks of other rows as far as time and
    `longest` allow. A chunk that others share ends at a cut at the latest. Shorter chunks are padded
    to the longest, unless that takes more time than another forward."""
    row = rows[0]
    tokens = width = min(chunk.tokens, _uncut(row))
    first = Chunk(row.id, tokens, chunk.joins and tokens == chunk.tokens)
    members = [(row, first)]
    seconds = _forward_s(row, tokens) + (_join_s(row) if first.joins else 0.0)
    for other in rows[1:]:
        if (own := _tokens_to_share(row, other, width)) == 0:
            continue
        wider = max(width, own)
        padding_s = _own_s(other, wider) - _own_s(other, own)
        if wider > width:
            padding_s += sum(_own_s(each, wider) - _own_s(each, width) for each, _ in members)
        if padding_s > row.cost.forward_s:
            continue
        joins = own == other.remaining
        more_s = padding_s + _own_s(other, own)
        if joins:  # rows of one forward join together, and buffers grow once for all of them
            grown = any(each.joins for _, each in members)
            more_s += other.cost.joining_s(other.done + other.remaining, 0 if grown else other.growth) + other.decode_s
        if (len(members) + 1) * wider > min(longest, MAX_CHUNK) or seconds + more_s > left_s:
            break
        members.append((other, Chunk(other.id, own, joins)))
        seconds += more_s
        width = wider
    if len(members) == 1:
        return Forward((chunk,), _forward_s(row, chunk.tokens) + (_join_s(row) if chunk.joins else 0.0))
    return Forward(tuple(each for _, each in members), seconds)


def _own_s(row: PromptState, tokens: int) -> float:
    """Return the seconds of a row's chunk without the pass over the weights, which it shares."""
    return row.cost.chunk_s(tokens, row.done) - row.cost.forward_s


def _tokens_to_share(row: PromptState, other: PromptState, tokens: int) -> int:
    """Return the tokens that the other row should compute in one forward with `tokens` tokens of this one. 0 if it may
    not share it, if too few tokens would remain for another pass, or if its prompt is long."""
    if row.pack is None or other.pack != row.pack or other.lane != row.lane or tokens == 0:
        return 0
    uncut = _uncut(other)
    # With padding, a row that has a few tokens more or fewer computes all of them.
    padding = int(row.cost.forward_s / max(row.cost.token_s, 1e-9)) if row.padded and other.padded else 0
    own = uncut if abs(uncut - tokens) <= padding else tokens
    left = other.remaining - own
    if own > uncut or (left and min(left, own) < row.cost.worthwhile):
        return 0
    short_s = max(SHORT_PASSES * other.cost.forward_s, SHORT_CHUNKS * tokens * other.cost.token_s)
    return own if other.remaining * other.cost.token_s <= short_s else 0


def _uncut(row: PromptState) -> int:
    """Return the tokens that remain before the next cut."""
    return min([row.remaining, *(cut - row.done for cut in row.cuts if cut > row.done)])


def _chunk(row: PromptState, seconds: float, longest: int, *, first: bool) -> Chunk | None:
    """Return the longest chunk that takes at most `seconds`, or None if it is not worth its pass over the weights. The
    `first` chunk of a step is never None.

    A row whose join takes much more joins in the next step: leaving a token for that step would cost a pass."""
    tokens = _fitting(row, seconds, longest)
    more_s = seconds + REMAINDER_PASSES * row.cost.forward_s
    if row.lane == "interactive" and 0 < tokens < row.remaining == _fitting(row, more_s, longest):
        tokens, seconds = row.remaining, more_s
    if tokens < min(row.remaining, row.cost.worthwhile):
        if not first:
            return None
        tokens = min(row.remaining, max(tokens, MIN_CHUNK))
    limit_s = more_s if row.lane == "interactive" else seconds
    joins = tokens == row.remaining and _forward_s(row, tokens) + _join_s(row) <= limit_s
    if tokens == 0 and not joins:
        return Chunk(row.id, 0, joins=True) if first else None
    return Chunk(row.id, tokens, joins)


def _fitting(row: PromptState, seconds: float, longest: int) -> int:
    """Return the most tokens that can be computed in `seconds`. Each cut within them costs another pass over the
    weights."""
    ends = [*(cut - row.done for cut in row.cuts if 0 < cut - row.done < row.remaining), row.remaining]
    fitting = (
        min(end, longest, row.cost.longest_chunk(seconds - cuts * row.cost.forward_s, row.done))
        for cuts, end in enumerate(ends)
    )
    return max(fitting)


def _forward_s(row: PromptState, tokens: int) -> float:
    """Return the seconds of a chunk's forwards. A prompt of a single token has no tokens to prefill, and costs as much
    as one token."""
    if tokens == 0 and row.done:
        return 0.0
    cuts = sum(0 < cut - row.done < tokens for cut in row.cuts)
    return row.cost.chunk_s(max(tokens, 1), row.done) + cuts * row.cost.forward_s


def _join_s(row: PromptState) -> float:
    return row.cost.joining_s(row.done + row.remaining, row.growth) + row.decode_s
