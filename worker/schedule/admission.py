"""Who may come in: never more than fits by prediction, and for good reasons only."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from worker.schedule.memory import MAX_ROWS, NO_IMAGES, ImageDemand, MemoryModel, format_bytes
from worker.schedule.request import Lane

# So many may overtake a row that is too large for now. Then those behind it wait too, and memory comes free for it.
MAX_OVERTAKES = 16


@dataclass(frozen=True, slots=True)
class RowEstimate:
    """A sequence, as far as memory is concerned."""

    id: str
    lane: Lane
    prompt_tokens: int
    max_tokens: int  # of the answer
    group: int = 0  # of the rows that it decodes with, or will
    overtaken: int = 0  # by how many; see `Wait`
    preempted: bool = False  # it was inside before: a later correction of the costs shall not end its answer
    held_bytes: int = 0  # that it takes while it waits
    images: ImageDemand = NO_IMAGES  # that its prompt has still to be computed with

    @property
    def tokens(self) -> int:
        """At its end, if it says all that it may."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """Now, once these have been parked."""

    preempt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """`passed` is what the row says when it asks again."""

    overtaken: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """It would not even fit alone."""

    message: str


Decision = Admit | Wait | Refuse


def admit_in_turn(
    waiting: Sequence[RowEstimate],
    running: Sequence[RowEstimate],
    costs: MemoryModel,
    limit: int,
    max_rows: int = MAX_ROWS,
) -> list[tuple[RowEstimate, Decision]]:
    """What becomes of each that waits: the interactive ones first, and else in the order given. `running` has the
    oldest first, and prompts on their way too; `limit` is the bytes that the model and all rows may take, and `most`
    how many rows there may be."""
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
                closed = True  # interactive rows have all had their turn before an offline one can close
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
    """An interactive candidate may have offline rows parked, the youngest first. `held_bytes`: by others who wait; they
    could be given up, so that nobody is refused for them."""
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
    """At the end, by group."""
    return list(by_group(rows).values())


def by_group(rows: Iterable[RowEstimate]) -> dict[int, list[int]]:
    """Return the lengths at the end, under the number of the group."""
    groups = defaultdict[int, list[int]](list)
    for row in rows:
        groups[row.group].append(row.tokens)
    return dict(groups)


def image_demand(rows: Iterable[RowEstimate]) -> ImageDemand:
    """Of all of them."""
    return sum((row.images for row in rows), NO_IMAGES)


def fits(rows: Sequence[RowEstimate], costs: MemoryModel, limit: int, most: int = MAX_ROWS) -> bool:
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
    """The same, if they had so much of their pixels."""
    images = candidate.images.at(percent)
    fewer = candidate.images.total - images.total
    return replace(candidate, prompt_tokens=candidate.prompt_tokens - fewer, images=images)


def _rounded_up(tokens: int) -> int:
    """To two digits."""
    unit = int(10 ** max(0, len(str(tokens)) - 2))
    return -(-tokens // unit) * unit
