"""Memory of rows whose requests state no limit: it is reserved for a likely answer, and for more as the answer grows.
If none is left then, other rows are preempted by a rule under which the oldest row always goes on."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worker.schedule.admission import Limits, RowEstimate, longest_answer, victims
from worker.schedule.memory import BUFFER_TOKENS
from worker.schedule.occupancy import Occupancy
from worker.schedule.request import Lane

_FIRST = 1_024  # tokens reserved for an answer while too few are known: a limit that workers had for all of them
_KNOWN = 16  # answers of a lane
_RECENT = 256  # answers of a lane that count
# Of recent answers, the share that is not longer than what is reserved at admission. `scripts/simulate --memory`
# compares shares: less reserves too little to admit by, and rows are preempted; more leaves memory unused.
QUANTILE = 0.8
_GROWTH = 8  # an answer that outgrows its reservation gets at least 1 / this more, as buffers do: see `padded_shape`


class AnswerLengths:
    """Lengths in tokens of the recent answers without a stated limit, by lane."""

    def __init__(self, quantile: float = QUANTILE) -> None:
        self._quantile = quantile
        self._recent: dict[Lane, deque[int]] = {}
        self._at_first: dict[Lane, int] = {}

    def observe(self, lane: Lane, tokens: int) -> None:
        """Record the length of an answer that has ended."""
        recent = self._recent.setdefault(lane, deque(maxlen=_RECENT))
        recent.append(tokens)
        if len(recent) >= _KNOWN:
            self._at_first[lane] = sorted(recent)[int(self._quantile * (len(recent) - 1))]

    def likely(self, lane: Lane, drawn: int = 0) -> int:
        """Return the tokens to reserve for an answer of which `drawn` tokens are known."""
        return max(self._at_first.get(lane, _FIRST), grown(drawn) if drawn else BUFFER_TOKENS)


def grown(tokens: int) -> int:
    """Return the tokens to reserve at least for an answer that has outgrown its reservation."""
    return tokens + max(BUFFER_TOKENS, tokens // _GROWTH)


@dataclass(frozen=True, slots=True)
class Growth:
    """What becomes of active rows that outgrow their reservations. Rows are named by the ids of their requests."""

    rows: Sequence[RowEstimate]  # that stay active, as they are after it
    reserve: Mapping[str, int] = field(default_factory=dict)  # tokens of the answer, for each row that grows
    move: Sequence[str] = ()  # of these, rows whose groups have no room for them: they decode in groups of their own
    cut: Mapping[str, int] = field(default_factory=dict)  # tokens after which an answer ends: alone it has no more room
    preempt: Sequence[str] = ()  # in order


def plan_growth(active: Sequence[RowEstimate], limits: Limits) -> Growth:
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
        grows_to = _make_room(row.bounded(most), rows, preempted, limits)
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


def _make_room(
    row: RowEstimate, rows: Mapping[str, RowEstimate], preempted: list[str], limits: Limits
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


def _grown_beside(row: RowEstimate, others: Sequence[RowEstimate], limits: Limits) -> RowEstimate | None:
    """Return the row with a reservation that fits, the likely one or the least; in its group, or else in a new one."""
    occupancy = Occupancy(limits.costs, others)
    groups = {other.group for other in others}
    new_group = [] if row.group not in groups else [max(groups) + 1]
    for group in row.group, *new_group:
        for tokens in row.likely, row.least:
            candidate = row.reserving(tokens).in_group(group)
            if occupancy.peak_with(candidate) <= limits.max_bytes:
                return candidate
    return None
