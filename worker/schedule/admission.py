"""Admission by predicted memory: which waiting rows are admitted, keep waiting, or are refused."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from worker.schedule.memory import MAX_ROWS, NO_IMAGES, ImageDemand, MemoryModel, format_bytes
from worker.schedule.request import Lane

# Rows that may overtake a row that does not fit yet. Then the rows behind it wait too, so memory is freed for it.
MAX_OVERTAKES = 16


@dataclass(frozen=True, slots=True)
class RowEstimate:
    """Predicted memory demand of a request."""

    id: str
    lane: Lane
    prompt_tokens: int
    max_tokens: int  # of the answer
    group: int = 0  # number of the group that it decodes in, or will decode in
    overtaken: int = 0  # rows admitted before it although they were behind it; see `Wait`
    preempted: bool = False  # it was active before, so a later correction of the costs must not refuse it
    held_bytes: int = 0  # bytes of its saved cache while it waits
    images: ImageDemand = NO_IMAGES  # images that are not yet computed

    @property
    def tokens(self) -> int:
        """Length at its end in tokens, if the answer reaches `max_tokens`."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """Admit the row after preempting the rows with these ids."""

    preempt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Keep the row waiting. `overtaken`: the value for its `RowEstimate` at the next decision."""

    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the row: it does not fit even alone. `message` tells the client what to change."""

    message: str


Decision = Admit | Wait | Refuse


def admit_in_turn(
    waiting: Sequence[RowEstimate],
    running: Sequence[RowEstimate],
    costs: MemoryModel,
    limit: int,
    max_rows: int = MAX_ROWS,
) -> list[tuple[RowEstimate, Decision]]:
    """Return the decision for each waiting row, interactive rows first, otherwise in the given order. `running`: active
    rows, the oldest first, including those in prefill. `limit`: bytes that the model and all rows may take. `max_rows`:
    most rows that may be active at once."""
    rows, verdicts, closed = list(running), list[tuple[RowEstimate, Decision]](), False
    held_bytes = sum(row.held_bytes for row in waiting)
    for candidate in sorted(waiting, key=lambda row: row.lane == "batch"):
        decision = admit(candidate, rows, costs, limit, held_bytes - candidate.held_bytes, max_rows)
        if closed and isinstance(decision, Admit):
            decision = Wait(candidate.overtaken)
        match decision:
            case Admit(park):
                rows = [*(row for row in rows if row.id not in park), candidate]
                held_bytes -= candidate.held_bytes
            case Wait() if candidate.overtaken >= MAX_OVERTAKES:
                closed = True  # all interactive rows are decided before an offline row can close admission
        verdicts.append((candidate, decision))
    return _count_overtaken(verdicts)


def admit(
    candidate: RowEstimate,
    running: Sequence[RowEstimate],
    costs: MemoryModel,
    limit: int,
    held_bytes: int = 0,
    max_rows: int = MAX_ROWS,
) -> Decision:
    """Return the decision for one row. An interactive row may preempt offline rows, the youngest first. `held_bytes`:
    saved caches of the other waiting rows; these can be dropped, so they never cause a refusal."""
    if not fits([candidate], costs, limit):
        if not candidate.preempted:
            return Refuse(_refusal(candidate, costs, limit))
        return Wait(candidate.overtaken) if running or held_bytes else Admit()
    free = limit - held_bytes
    if fits([*running, candidate], costs, free, max_rows):
        return Admit()
    if candidate.lane == "batch":
        return Wait(candidate.overtaken)
    staying, parked = list(running), list[str]()
    for youngest in [row for row in reversed(running) if row.lane == "batch"]:
        staying.remove(youngest)
        parked.append(youngest.id)
        if fits([*staying, candidate], costs, free, max_rows):
            return Admit(tuple(parked))
    return Wait(candidate.overtaken)


def group_lengths(rows: Iterable[RowEstimate]) -> list[list[int]]:
    """Return the rows' lengths at their end in tokens, one list per group."""
    return list(by_group(rows).values())


def by_group(rows: Iterable[RowEstimate]) -> dict[int, list[int]]:
    """Return the rows' lengths at their end in tokens, by group number."""
    groups = defaultdict[int, list[int]](list)
    for row in rows:
        groups[row.group].append(row.tokens)
    return dict(groups)


def image_demand(rows: Iterable[RowEstimate]) -> ImageDemand:
    """Return the rows' image demands added up."""
    return sum((row.images for row in rows), NO_IMAGES)


def fits(rows: Sequence[RowEstimate], costs: MemoryModel, limit: int, most: int = MAX_ROWS) -> bool:
    """Return True if there are at most `most` rows and their predicted peak is within `limit` bytes, model included."""
    return len(rows) <= most and _peak_bytes(rows, costs) <= limit


def _peak_bytes(rows: Sequence[RowEstimate], costs: MemoryModel) -> int:
    return costs.peak_bytes(group_lengths(rows), images=image_demand(rows))


def _count_overtaken(verdicts: list[tuple[RowEstimate, Decision]]) -> list[tuple[RowEstimate, Decision]]:
    counted, behind = list[tuple[RowEstimate, Decision]](), 0
    for row, decision in reversed(verdicts):
        counted.append((row, Wait(row.overtaken + behind) if isinstance(decision, Wait) else decision))
        behind += isinstance(decision, Admit)
    return counted[::-1]


def _refusal(candidate: RowEstimate, costs: MemoryModel, limit: int) -> str:
    spare, most = limit - costs.resident_bytes, costs.max_tokens(limit)
    if not most:
        return f"This worker has {format_bytes(max(0, spare))} beside its model, too little for any answer."
    if fits([_with_images(candidate, 0)], costs, limit):
        return _image_refusal(candidate, costs, limit)
    needs = _peak_bytes([candidate], costs) - costs.resident_bytes
    return (
        f"This request needs {format_bytes(needs)} for {candidate.prompt_tokens:,} prompt and "
        f"{candidate.max_tokens:,} answer tokens; this worker has {format_bytes(spare)} beside its model: shorten the "
        f"prompt or max_tokens by about {_rounded_up(candidate.tokens - most):,} tokens."
    )


def _image_refusal(candidate: RowEstimate, costs: MemoryModel, limit: int) -> str:
    needs = _peak_bytes([candidate], costs) - costs.resident_bytes
    percent = bisect(range(1, 100), limit, key=lambda percent: _peak_bytes([_with_images(candidate, percent)], costs))
    return (
        f"This request needs {format_bytes(needs)} while its images are looked at, of which the largest stands for "
        f"{candidate.images.largest:,} tokens; this worker has "
        f"{format_bytes(limit - costs.resident_bytes)} beside its model: "
        + (f"make them smaller, to about {percent} % of their pixels." if percent else "send no images.")
    )


def _with_images(candidate: RowEstimate, percent: int) -> RowEstimate:
    """Return the estimate for images that are scaled to `percent` of their pixels."""
    images = candidate.images.at(percent)
    fewer = candidate.images.total - images.total
    return replace(candidate, prompt_tokens=candidate.prompt_tokens - fewer, images=images)


def _rounded_up(tokens: int) -> int:
    """Return the number rounded up to two significant digits."""
    unit = int(10 ** max(0, len(str(tokens)) - 2))
    return -(-tokens // unit) * unit
