"""Who may come in: never more than fits by prediction, and for good reasons only."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from worker.schedule.memory import MOST_ROWS, NO_IMAGES, Costs, Images, size
from worker.schedule.sequence import Lane

# So many may overtake a row that is too large for now. Then those behind it wait too, and memory comes free for it.
PATIENCE = 16


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence, as far as memory is concerned."""

    id: str
    lane: Lane
    prompt_tokens: int
    max_tokens: int  # of the answer
    group: int = 0  # of the rows that it decodes with, or will
    passed: int = 0  # by how many; see `Wait`
    begun: bool = False  # it was inside before: a later correction of the costs shall not end its answer
    held_bytes: int = 0  # that it takes while it waits
    images: Images = NO_IMAGES  # that its prompt has still to be computed with

    @property
    def tokens(self) -> int:
        """At its end, if it says all that it may."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Admit:
    """Now, once these have been parked."""

    park: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """`passed` is what the row says when it asks again."""

    passed: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """It would not even fit alone."""

    sentence: str


Decision = Admit | Wait | Refuse


def admit_in_turn(
    waiting: Sequence[Row], running: Sequence[Row], costs: Costs, limit: int, most: int = MOST_ROWS
) -> list[tuple[Row, Decision]]:
    """What becomes of each that waits: the interactive ones first, and else in the order given. `running` has the
    oldest first, and prompts on their way too; `limit` is the bytes that the model and all rows may take, and `most`
    how many rows there may be."""
    rows, verdicts, closed = list(running), list[tuple[Row, Decision]](), False
    held_bytes = sum(row.held_bytes for row in waiting)
    for candidate in sorted(waiting, key=lambda row: row.lane == "batch"):
        decision = admit(candidate, rows, costs, limit, held_bytes - candidate.held_bytes, most)
        if closed and isinstance(decision, Admit):
            decision = Wait(candidate.passed)
        match decision:
            case Admit(park):
                rows = [*(row for row in rows if row.id not in park), candidate]
                held_bytes -= candidate.held_bytes
            case Wait() if candidate.passed >= PATIENCE:
                closed = True  # interactive rows have all had their turn before an offline one can close
        verdicts.append((candidate, decision))
    return _count_passed(verdicts)


def admit(
    candidate: Row, running: Sequence[Row], costs: Costs, limit: int, held_bytes: int = 0, most: int = MOST_ROWS
) -> Decision:
    """An interactive candidate may have offline rows parked, the youngest first. `held_bytes`: by others who wait; they
    could be given up, so that nobody is refused for them."""
    if not fits([candidate], costs, limit):
        if not candidate.begun:
            return Refuse(_why(candidate, costs, limit))
        return Wait(candidate.passed) if running or held_bytes else Admit()
    free = limit - held_bytes
    if fits([*running, candidate], costs, free, most):
        return Admit()
    if candidate.lane == "batch":
        return Wait(candidate.passed)
    staying, parked = list(running), list[str]()
    for youngest in [row for row in reversed(running) if row.lane == "batch"]:
        staying.remove(youngest)
        parked.append(youngest.id)
        if fits([*staying, candidate], costs, free, most):
            return Admit(tuple(parked))
    return Wait(candidate.passed)


def lengths(rows: Iterable[Row]) -> list[list[int]]:
    """At the end, by group."""
    return list(by_group(rows).values())


def by_group(rows: Iterable[Row]) -> dict[int, list[int]]:
    """Return the lengths at the end, under the number of the group."""
    groups = defaultdict[int, list[int]](list)
    for row in rows:
        groups[row.group].append(row.tokens)
    return dict(groups)


def images(rows: Iterable[Row]) -> Images:
    """Of all of them."""
    return sum((row.images for row in rows), NO_IMAGES)


def fits(rows: Sequence[Row], costs: Costs, limit: int, most: int = MOST_ROWS) -> bool:
    return len(rows) <= most and _peak_bytes(rows, costs) <= limit


def _peak_bytes(rows: Sequence[Row], costs: Costs) -> int:
    return costs.peak_bytes(lengths(rows), images=images(rows))


def _count_passed(verdicts: list[tuple[Row, Decision]]) -> list[tuple[Row, Decision]]:
    counted, behind = list[tuple[Row, Decision]](), 0
    for row, decision in reversed(verdicts):
        counted.append((row, Wait(row.passed + behind) if isinstance(decision, Wait) else decision))
        behind += isinstance(decision, Admit)
    return counted[::-1]


def _why(candidate: Row, costs: Costs, limit: int) -> str:
    spare, most = limit - costs.resident_bytes, costs.most_tokens(limit)
    if not most:
        return f"This worker has {size(max(0, spare))} beside its model, too little for any answer."
    if fits([_with_images(candidate, 0)], costs, limit):
        return _why_not_seen(candidate, costs, limit)
    needs = _peak_bytes([candidate], costs) - costs.resident_bytes
    return (
        f"This request needs {size(needs)} for {candidate.prompt_tokens:,} prompt and {candidate.max_tokens:,} answer "
        f"tokens; this worker has {size(spare)} beside its model: shorten the prompt or max_tokens by about "
        f"{_rounded_up(candidate.tokens - most):,} tokens."
    )


def _why_not_seen(candidate: Row, costs: Costs, limit: int) -> str:
    needs = _peak_bytes([candidate], costs) - costs.resident_bytes
    percent = bisect(range(1, 100), limit, key=lambda percent: _peak_bytes([_with_images(candidate, percent)], costs))
    return (
        f"This request needs {size(needs)} while its images are looked at, of which the largest stands for "
        f"{candidate.images.largest:,} tokens; this worker has {size(limit - costs.resident_bytes)} beside its model: "
        + (f"make them smaller, to about {percent} % of their pixels." if percent else "send no images.")
    )


def _with_images(candidate: Row, percent: int) -> Row:
    """The same, if they had so much of their pixels."""
    images = candidate.images.at(percent)
    fewer = candidate.images.total - images.total
    return replace(candidate, prompt_tokens=candidate.prompt_tokens - fewer, images=images)


def _rounded_up(tokens: int) -> int:
    """To two digits."""
    unit = int(10 ** max(0, len(str(tokens)) - 2))
    return -(-tokens // unit) * unit
