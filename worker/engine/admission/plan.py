"""Plan which rows are admitted and preempted, and how the active ones grow.

Memory of a row whose request states no limit is reserved for a likely answer, and for more as the answer grows. If none
is left then, other rows are preempted by a rule under which the oldest row always goes on."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap

from sluice.contract.keys import Lane
from worker.engine.admission.classes import Bounds, Decoding, Trial, choose_bounds, class_of, rows_after, still_waiting
from worker.engine.admission.decision import (
    AdmissionLimits,
    Admit,
    Decision,
    Refuse,
    RowEstimate,
    Wait,
    admit_in_turn,
    by_group,
    fits,
    group_lengths,
    image_demand,
    longest_answer,
    victims,
)
from worker.engine.admission.tuning import FIRST_ANSWER, KNOWN_ANSWERS, QUANTILE
from worker.engine.memory import BUFFER_TOKENS, CHUNK, NO_IMAGES, ImageDemand, Occupancy
from worker.engine.step.tuning import MAX_CHUNK


class AnswerLengths:
    """Lengths in tokens of the recent answers without a stated limit, by lane."""

    def __init__(self, quantile: float = QUANTILE) -> None:
        self._quantile = quantile
        self._recent: dict[Lane, deque[int]] = {}
        self._at_first: dict[Lane, int] = {}

    def observe(self, lane: Lane, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        recent = self._recent.setdefault(lane, deque(maxlen=256))
        recent.append(tokens)
        if len(recent) >= KNOWN_ANSWERS:
            self._at_first[lane] = sorted(recent)[int(self._quantile * (len(recent) - 1))]

    def likely(self, lane: Lane, drawn: int = 0) -> int:
        """Return the tokens to reserve for an answer of which `drawn` tokens are known."""
        return max(self._at_first.get(lane, FIRST_ANSWER), grown(drawn) if drawn else BUFFER_TOKENS)


def grown(tokens: int) -> int:
    """Return the tokens to reserve at least for an answer that has outgrown its reservation: an eighth more, as buffers
    get."""
    return tokens + max(BUFFER_TOKENS, tokens // 8)


@dataclass(frozen=True, slots=True)
class Growth:
    """What becomes of active rows that outgrow their reservations. Rows are named by the ids of their requests."""

    rows: Sequence[RowEstimate]  # that stay active, as they are after it
    reserve: Mapping[str, int] = field(default_factory=dict)  # tokens of the answer, for each row that grows
    move: Sequence[str] = ()  # of these, rows whose groups have no room for them: they decode in groups of their own
    cut: Mapping[str, int] = field(default_factory=dict)  # tokens after which an answer ends: alone it has no more room
    preempt: Sequence[str] = ()  # in order


def plan_growth(active: Sequence[RowEstimate], limits: AdmissionLimits) -> Growth:
    """Return how the rows that must grow do. `active`: the oldest first, with their groups. Saved caches count as free:
    the caller drops them."""
    rows = {row.id: row for row in active}
    reserve, cut = dict[str, int](), dict[str, int]()
    move, preempt = list[str](), list[str]()
    for row in sorted(filter(must_grow, active), key=lambda row: row.lane == "batch"):
        if row.id not in rows:
            continue
        most = longest_answer(row, limits)
        if most <= row.max_tokens:  # the rows beside it are not to blame
            cut[row.id] = row.max_tokens
            continue
        preempted = [other.id for other in victims(row, [*rows.values()])]
        grows_to = _fewest_preempted(row.bounded(most), rows, preempted, limits)
        preempt += preempted if grows_to else [row.id]
        for id in preempted if grows_to else [row.id]:
            del rows[id]
        if grows_to:
            rows[row.id], reserve[row.id] = grows_to, grows_to.max_tokens
            move += [row.id] if grows_to.group != row.group else []
    reserve = {id: tokens for id, tokens in reserve.items() if id in rows}
    return Growth([*rows.values()], reserve, [id for id in move if id in rows], cut, preempt)


def must_grow(row: RowEstimate) -> bool:
    """Return True if an active row is about to outgrow its reservation."""
    return row.grows and row.least > row.max_tokens


def _fewest_preempted(
    row: RowEstimate, rows: Mapping[str, RowEstimate], preempted: list[str], limits: AdmissionLimits
) -> RowEstimate | None:
    """Return the row as it grows, and reduce `preempted` to those that must be preempted for it; None if all of them
    are too few."""
    for count in range(len(preempted) + 1):
        if grows_to := _grown_beside(row, _without(rows, row.id, *preempted[:count]), limits):
            del preempted[count:]
            return grows_to
    return None


def _without(rows: Mapping[str, RowEstimate], *ids: str) -> list[RowEstimate]:
    return [row for id, row in rows.items() if id not in ids]


def _grown_beside(row: RowEstimate, others: Sequence[RowEstimate], limits: AdmissionLimits) -> RowEstimate | None:
    """Return the row with a reservation that fits, the likely one or the least; in its group, or else in a new one."""
    occupancy = Occupancy(limits.costs, others)
    groups = {other.group for other in others}
    new_group = [] if row.group not in groups else [max(groups) + 1]
    most_bytes = limits.max_bytes if others else limits.alone_bytes
    for group in row.group, *new_group:
        for tokens in row.likely, row.least:
            candidate = row.reserving(tokens).in_group(group)
            if occupancy.peak_with(candidate) <= most_bytes:
                return candidate
    return None


NO_GROUP = -1  # group number of a row that does not decode yet

Decided = Sequence[tuple[RowEstimate, Decision]]


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Use of the memory that active rows and saved caches leave."""

    longest_chunk: int = CHUNK  # most tokens of a forward of one or several prompts
    free_bytes: int = 0  # for caches that outlive a request; negative if memory is short


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory of the active rows."""

    lengths: Sequence[Sequence[int]] = ()  # of the rows at their end, in tokens, by group
    images: ImageDemand = NO_IMAGES
    peak_bytes: int = 0  # predicted, with the weights
    slack_bytes: int = 0  # of the groups' buffers, beyond the needs of their rows; 0 if `must_tighten`
    must_tighten: bool = False  # the memory of the slack is needed: see `Groups.tighten`

    def shares(self, limits: AdmissionLimits, held_bytes: int) -> MemoryShares:
        """Return the use of what is left: longer chunks come first. `held_bytes`: of all saved caches."""
        free = limits.max_bytes - held_bytes - self.slack_bytes
        longest_chunk = limits.costs.longest_chunk(self.lengths, free, self.images)
        peak_bytes = limits.costs.peak_bytes(self.lengths, min(longest_chunk, MAX_CHUNK), self.images)
        return MemoryShares(longest_chunk, free - peak_bytes)


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """One round of decisions. Rows are named by the ids of their requests."""

    admit: Mapping[str, tuple[str, ...]]  # for each admitted row, the rows to preempt for it
    reserve: Mapping[str, int]  # for each admitted row, and each one that grows, the tokens of its answer to reserve
    refuse: Mapping[str, str]  # for each refused row, the message for the client
    overtaken: Mapping[str, int]  # for each row that keeps waiting, the value for its next `RowEstimate`
    drop_caches: tuple[str, ...]  # waiting rows whose saved caches keep other rows out
    growth: Growth  # of active rows; a plan that preempts rows for it admits none
    bounds: Bounds  # of the length classes that rows decode in
    reservation: Reservation  # once the plan is applied
    shares: MemoryShares  # likewise

    @property
    def preempt(self) -> list[str]:
        """The rows to preempt, in order."""
        return [*self.growth.preempt, *(id for ids in self.admit.values() for id in ids)]


def plan_admission(
    waiting: Sequence[RowEstimate],
    active: Sequence[RowEstimate],
    decoding: Decoding,
    bounds: Bounds,
    limits: AdmissionLimits,
) -> AdmissionPlan:
    """Return the plan for these rows. `waiting`: interactive and offline rows, in the order of the queue. `active`:
    rows in prefill and decoding rows, the oldest first. Rows without a group get the one of their length class."""
    waiting, active = in_groups(waiting, decoding, bounds), in_groups(active, decoding, bounds)
    growth = plan_growth(active, limits)
    active = growth.rows
    # Rows that are preempted now come before those that wait, in the next plan.
    decided, dropped = ((), ()) if growth.preempt else _decide(waiting, active, limits)
    held_bytes = _held_bytes(row for row in waiting if row.id not in dropped)
    reservation = _reserve(rows_after(active, decided), decoding.buffers, limits, held_bytes)
    return AdmissionPlan(
        admit={row.id: decision.preempt for row, decision in decided if isinstance(decision, Admit)},
        reserve={**growth.reserve} | {row.id: row.max_tokens for row, each in decided if isinstance(each, Admit)},
        refuse={row.id: decision.message for row, decision in decided if isinstance(decision, Refuse)},
        overtaken={row.id: decision.overtaken for row, decision in decided if isinstance(decision, Wait)},
        drop_caches=dropped,
        growth=growth,
        bounds=bounds,
        reservation=reservation,
        shares=reservation.shares(limits, held_bytes),
    )


def best_bounds(
    waiting: Sequence[RowEstimate],
    active: Sequence[RowEstimate],
    decoding: Decoding,
    bounds_now: Bounds,
    limits: AdmissionLimits,
) -> Bounds:
    """Return the best bounds, assuming that the decoding rows are moved into their classes. Tries the first waiting
    rows only. For the parameters see `plan_admission`."""
    costs, free = limits.costs, limits.max_bytes - _held_bytes(waiting)
    first_rows = sorted(waiting, key=_is_offline)[:32]

    def try_bounds(bounds: Bounds) -> Trial | None:
        rows, waiting_rows = (
            [row.in_group(class_of(row.tokens, bounds)) for row in each] for each in (active, first_rows)
        )
        if not fits(rows, costs, free):
            return None
        decided = admit_in_turn(waiting_rows, rows, limits)
        active_after = rows_after(rows, decided)
        return Trial(bounds, [row.tokens for row in active_after], still_waiting(decided))

    def most_rows(tokens: int) -> int:
        return costs.max_rows(tokens, free)

    lengths = [row.tokens for row in (*active, *waiting)]
    chosen = choose_bounds(bounds_now, lengths, decoding.cost, try_bounds, most_rows)
    if chosen != bounds_now and not fits(in_groups(active, decoding, chosen), costs, limits.max_bytes):
        return bounds_now  # rows in prefill were admitted for these
    return chosen


def in_groups(rows: Iterable[RowEstimate], decoding: Decoding, bounds: Bounds) -> list[RowEstimate]:
    """Return the estimates with the group that each row decodes in or will decode in."""
    group_of = decoding.groups_by_length(bounds)
    return [row.in_group(group_of(row.tokens)) if row.group == NO_GROUP else row for row in rows]


def _decide(
    waiting: Sequence[RowEstimate], active: Sequence[RowEstimate], limits: AdmissionLimits
) -> tuple[Decided, tuple[str, ...]]:
    """Return the decisions, and the rows whose saved caches must be dropped for them: as few as admit the same rows as
    without any saved cache, and preempt the same ones of their lanes, the youngest first. Rows are preempted the
    youngest first, and each one is requeued before the others, so the last in the queue is the youngest."""
    lanes = {row.id: row.lane for row in (*waiting, *active)}

    def decide(dropped: Sequence[str]) -> Decided:
        rows = [row._replace(held_bytes=0) if row.id in dropped else row for row in waiting]
        return admit_in_turn(rows, active, limits)

    def outcome(row: RowEstimate, decision: Decision) -> object:
        # Offline rows that an interactive one preempts do not count: nobody waits for their next token.
        own = isinstance(decision, Admit) and tuple(id for id in decision.preempt if lanes[id] == row.lane)
        return type(decision), own

    dropped, decided = list[str](), decide(())
    holding = [row.id for row in waiting if row.held_bytes]
    best = list(starmap(outcome, decide(holding) if holding else decided))
    while list(starmap(outcome, decided)) != best:
        dropped.append(holding.pop())
        decided = decide(dropped)
    return decided, tuple(dropped)


def _reserve(
    active: Sequence[RowEstimate], buffers: Sequence[int], limits: AdmissionLimits, held_bytes: int
) -> Reservation:
    """Return the reservation for these rows. `buffers`: allocated bytes of each group's buffers."""
    lengths = group_lengths(active)
    images = image_demand(active)
    groups = by_group(active)
    peak_bytes = limits.costs.peak_bytes(lengths, images=images)
    slack_bytes = limits.costs.slack_bytes((groups.get(i, ()) for i in range(len(buffers))), buffers)
    must_tighten = peak_bytes + slack_bytes > limits.max_bytes - held_bytes
    return Reservation(lengths, images, peak_bytes, 0 if must_tighten else slack_bytes, must_tighten)


def _held_bytes(rows: Iterable[RowEstimate]) -> int:
    return sum(row.held_bytes for row in rows)


def _is_offline(row: RowEstimate) -> bool:
    return row.lane == "batch"
