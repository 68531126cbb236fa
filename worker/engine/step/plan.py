"""Plan the prefill of a step: the order of the waiting prompts, and what each computes in the time of the step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from sluice.contract.keys import Lane
from worker.engine.step.cost import Forward, PromptChunk, PromptCost
from worker.engine.step.tuning import (
    AGING,
    FIRST_TOKEN_S,
    LATE_FACTOR,
    MAX_CHUNK,
    MIN_CHUNK,
    SHORT_CHUNKS,
    TURN_EVERY,
)
from worker.outcomes import Phase


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


# Orders the prompts that wait. The second argument is the number of the step, counting up.
Order = Callable[[Iterable[PromptState], int], list[PromptState]]


def in_order(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts, the first to advance first: interactive ones, of these the ones that take the least time,
    less a part of the time that they have waited. The time of a prompt that can no longer have its first token within
    `FIRST_TOKEN_S` counts `LATE_FACTOR` times. One step in `TURN_EVERY` begins with the oldest instead. `step`:
    number of the step, counting up."""
    return sorted(waiting, key=_age if step % TURN_EVERY == 0 else _rank)


def _age(row: PromptState) -> tuple[bool, float]:
    return row.lane == "batch", -row.waited_s


def _rank(row: PromptState) -> tuple[bool, float]:
    offline = row.lane == "batch"
    if row.only_joins:
        return offline, -inf
    late = not offline and row.waited_s + row.alone_s > FIRST_TOKEN_S
    return offline, (LATE_FACTOR if late else 1) * row.alone_s - AGING * row.waited_s


def may_advance(prompts: Sequence[PromptState]) -> list[PromptState]:
    """Return the prompts that may advance in a step, in the given order. Images of one prompt at a time are encoded,
    and one prompt is scored, since a vision encoder's activations and a draft's cache occupy memory."""
    single = [_first_in(prompts, phase) for phase in {row.phase for row in prompts if row.exclusive}]
    return [row for row in prompts if not row.exclusive or row in single]


def _first_in(prompts: Sequence[PromptState], phase: Phase) -> PromptState:
    """Return the one prompt of this phase that may advance. Prefers a prompt that has started, then interactive
    ones, then the shortest."""
    rows = [row for row in prompts if row.phase == phase]
    return max(rows, key=lambda row: (row.started, row.lane == "interactive", -row.remaining))


PackedTokens = Callable[[int, int, int], int]  # (prompts, tokens of each, tokens that the longest holds): see `plan`


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The time that a step has for prompts, in seconds."""

    spare_s: Mapping[Lane, float]  # that each lane's prompts may take, of the same time
    shared_s: float = 0.0  # that the first forward may take instead, if more, and if interactive prompts share it
    # Once prompts have taken this long, no further forward begins, since rows that have joined should decode.
    enough_s: float = inf


def no_copies(prompts: int, tokens: int, done: int) -> int:
    """Return the tokens of a shared forward for which nothing is copied."""
    return prompts * tokens


def plan(
    prompts: Iterable[PromptState],
    limits: StepLimits,
    step: int,
    longest: int,
    *,
    order: Order = in_order,
    packed_tokens: PackedTokens = no_copies,
) -> list[Forward]:
    """Return the forwards of a step. Spends each lane's seconds on the prompts in order, each in one forward at most;
    the time that interactive ones take is not left for offline ones. The first prompt always advances, if only by a few
    tokens; an offline one does so in one step in `TURN_EVERY`. `step`: number of the step, counting up. `longest`:
    most tokens of a forward. `packed_tokens` returns the tokens of a single prompt's chunk that takes as much memory as
    a shared forward: what its prompts hold is copied."""
    forwards, spent_s = list[Forward](), 0.0
    rows = order(prompts, step)
    while rows and (not forwards or spent_s < limits.enough_s):
        left_s = limits.spare_s[rows[0].lane] - spent_s
        forced = not forwards and (rows[0].lane == "interactive" or step % TURN_EVERY == 0)
        chunk = _chunk(rows[0], left_s, longest, forced=forced)
        if chunk is None:
            break
        most_s = limits.shared_s if rows[0].lane == "interactive" and not forwards else 0.0
        forward = _shared(chunk, rows, max(left_s, most_s), min(longest, MAX_CHUNK), packed_tokens)
        forwards.append(forward)
        spent_s += forward.seconds
        computed = {each.id for each in forward.chunks}
        rows = [row for row in rows if row.id not in computed]
    return forwards


def _shared(
    chunk: PromptChunk, rows: Sequence[PromptState], left_s: float, longest: int, packed_tokens: PackedTokens
) -> Forward:
    """Return the forward that computes the first row's chunk, together with chunks of other rows as far as time and
    `longest` allow. A chunk that others share ends at a cut at the latest. Shorter chunks are padded to the longest,
    unless that takes more time than another forward."""
    row = rows[0]
    tokens = width = min(chunk.tokens, _uncut(row))
    first = PromptChunk(row.id, tokens, chunk.joins and tokens == chunk.tokens)
    members, held = [(row, first)], row.done
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
            more_s += other.cost.joining_s(other.done + other.remaining, 0 if grown else other.join_copy_bytes)
            more_s += other.added_decode_s
        if seconds + more_s > left_s:
            break
        most_held = max(held, other.done)
        if packed_tokens(len(members) + 1, wider, most_held) > longest:
            continue  # another may hold fewer tokens
        members.append((other, PromptChunk(other.id, own, joins)))
        seconds += more_s
        width, held = wider, most_held
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
    return own if other.remaining <= SHORT_CHUNKS * tokens else 0


def _uncut(row: PromptState) -> int:
    """Return the tokens that remain before the next cut."""
    return min([row.remaining, *(cut - row.done for cut in row.cuts if cut > row.done)])


def _chunk(row: PromptState, seconds: float, longest: int, *, forced: bool) -> PromptChunk | None:
    """Return the longest chunk that takes at most `seconds`, or None if it is not worth its pass over the weights. A
    `forced` one is never None, however short.

    If its join does not fit too, the row joins in the next step: leaving a token for that step would cost a pass."""
    tokens = _fitting(row, seconds, longest)
    if tokens < min(row.remaining, row.cost.worthwhile):
        if not forced:
            return None
        tokens = min(row.remaining, max(tokens, MIN_CHUNK))
    joins = tokens == row.remaining and _forward_s(row, tokens) + _join_s(row) <= seconds
    if tokens == 0 and not joins:
        return PromptChunk(row.id, 0, joins=True) if forced else None
    return PromptChunk(row.id, tokens, joins)


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
    return row.cost.joining_s(row.done + row.remaining, row.join_copy_bytes) + row.added_decode_s
