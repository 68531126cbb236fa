"""Admission by predicted memory: which waiting rows are admitted, keep waiting, or are refused."""

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from sluice.contract.keys import Lane
from worker.engine.admission.tuning import MAX_OVERTAKES
from worker.engine.memory import MAX_ROWS, NO_IMAGES, ImageDemand, MemoryModel, Occupancy, format_bytes


class RowEstimate(NamedTuple):  # thousands are copied for a decision, and a dataclass takes four times as long
    """Predicted memory demand of a request. Frozen, and independent of the row itself."""

    id: str
    lane: Lane
    prompt_tokens: int  # of the client's prompt
    max_tokens: int  # of the answer that memory is reserved for
    group: int = 0  # number of the group that it decodes in, or will decode in
    overtaken: int = 0  # rows admitted before it although they were behind it; see `Wait`
    preempted: bool = False  # it was active before, so a later correction of the costs must not refuse it
    held_bytes: int = 0  # bytes of its saved cache while it waits
    images: ImageDemand = NO_IMAGES  # images still to be computed, and the pixel inputs of all
    extra_tokens: int = 0  # the draft's cache until SpecPrefill is decided; negative for tokens that it has dropped
    grows: bool = False  # its request states no limit
    least: int = 0  # if it grows: tokens of the answer to reserve at least, now that it waits or must grow
    likely: int = 0  # likewise: tokens to reserve if there is room
    age: int = 0  # number of requests that have arrived before it

    @property
    def tokens(self) -> int:
        """Length at its end in tokens, if the answer reaches `max_tokens`."""
        return self.prompt_tokens + self.extra_tokens + self.max_tokens

    def in_group(self, group: int) -> "RowEstimate":
        """Return the estimate for another group."""
        return self._replace(group=group)

    def reserving(self, tokens: int) -> "RowEstimate":
        """Return the estimate with this reservation for the answer."""
        return self._replace(max_tokens=tokens)

    def bounded(self, tokens: int) -> "RowEstimate":
        """Return the estimate of a row that may grow to this number of tokens at most."""
        return self._replace(least=min(self.least, tokens), likely=min(self.likely, tokens))


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


_WAIT = Wait()


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The memory and the number of rows that admission may use."""

    costs: MemoryModel  # corrected by measurements
    max_bytes: int  # that the model and all rows may take
    max_rows: int = MAX_ROWS  # that may be active at once
    most_bytes: int = 0  # that the model and a row may take that is active alone, if that is more

    @property
    def alone_bytes(self) -> int:
        """Bytes that the model and a single active row may take."""
        return max(self.max_bytes, self.most_bytes)


def admit_in_turn(
    waiting: Sequence[RowEstimate], active: Sequence[RowEstimate], limits: AdmissionLimits
) -> list[tuple[RowEstimate, Decision]]:
    """Return the decision for each waiting row, interactive rows first, otherwise in the given order. `active`: rows
    in prefill and decoding rows, the oldest first. All interactive rows are decided before an offline one that waits
    can keep others out."""
    admission, may_overtake = Admission(active, limits), inf  # rows that may still be admitted behind those that wait
    decided = list[tuple[RowEstimate, Decision]]()
    admission.set_held_bytes(sum(row.held_bytes for row in waiting))
    for each in sorted(waiting, key=lambda row: row.lane == "batch"):
        candidate = admission.shortened(each)
        decision = admission.decide(candidate)
        if isinstance(decision, Admit) and may_overtake <= 0:
            decision = _WAIT
        match decision:
            case Admit():
                admission.apply(candidate, decision)
                may_overtake -= 1
            case Wait():
                may_overtake = min(may_overtake, MAX_OVERTAKES - candidate.overtaken)
        decided.append((candidate, decision))
    return _count_overtaken(decided)


class Admission:
    """Active rows during one round of decisions. Stores the lengths that did not fit, so most rows of a long queue are
    decided by a comparison."""

    def __init__(self, active: Sequence[RowEstimate], limits: AdmissionLimits) -> None:
        self._limits = limits
        self._held_bytes = 0
        self._nothing = Occupancy(limits.costs)
        self._fits_alone = 0  # tokens of the longest row without images that was found to fit alone
        # By group: tokens of the shortest row that was found not to fit, with the offline rows and without them.
        self._too_long, self._too_long_for_all = dict[int, int](), dict[int, int]()
        self._set_active(active)

    def _set_active(self, active: Sequence[RowEstimate]) -> None:
        costs = self._limits.costs
        self._active = [*active]  # the oldest first
        self._batch = [row for row in active if row.lane == "batch"]  # likewise
        self._interactive = Occupancy(costs, (row for row in active if row.lane != "batch"))
        self._all = Occupancy(costs, active) if self._batch else self._interactive.copy()

    def set_held_bytes(self, held_bytes: int) -> None:
        """Set the bytes of all waiting rows' saved caches."""
        if held_bytes < self._held_bytes:
            self._forget_failures()
        self._held_bytes = held_bytes

    def shortened(self, candidate: RowEstimate) -> RowEstimate:
        """Return the row; one without a stated limit with what it can have alone, if that is less than is likely."""
        if not candidate.grows or self._fits_by_itself(candidate):
            return candidate
        return candidate.reserving(max(candidate.least, longest_answer(candidate, self._limits)))

    def decide(self, candidate: RowEstimate) -> Decision:
        """Return the decision for one row, whose saved cache is among those held. Changes nothing that another decision
        depends on. `Wait` has no count."""
        held_bytes = self._held_bytes - candidate.held_bytes
        if not self._fits_by_itself(candidate):
            if not candidate.preempted:
                return Refuse(_refusal(candidate, self._limits, self._longest_alone))
            return _WAIT if len(self._all) or held_bytes else Admit()
        if self._fits(self._all, candidate, self._too_long):
            return Admit()
        preempts_offline = candidate.lane != "batch" and bool(self._batch)
        if preempts_offline and self._fits(self._interactive, candidate, self._too_long_for_all):
            return Admit(self._fewest(candidate, self._batch[::-1], self._interactive))
        return self._in_its_place(candidate) if candidate.preempted and candidate.grows else _WAIT

    def _in_its_place(self, candidate: RowEstimate) -> Decision:
        """Return the decision for a row without a limit that was preempted, and does not fit: it comes before younger
        ones, as if it were active. Otherwise rows that it has made room for would grow while it waits."""
        preempted = victims(candidate, self._active)
        ids = {row.id for row in preempted}
        staying = Occupancy(self._limits.costs, (row for row in self._active if row.id not in ids))
        if not preempted or not self._has_room(staying, candidate, self._free_bytes(candidate)):
            return _WAIT
        return Admit(self._fewest(candidate, preempted, staying))

    def apply(self, candidate: RowEstimate, decision: Admit) -> None:
        """Record that the row was admitted."""
        if decision.preempt:
            self._set_active([row for row in self._active if row.id not in decision.preempt])
            self._forget_failures()
        self._all.add(candidate)
        insort(self._active, candidate, key=_age)
        if candidate.lane == "batch":
            insort(self._batch, candidate, key=_age)
        else:
            self._interactive.add(candidate)
        self.set_held_bytes(self._held_bytes - candidate.held_bytes)

    def _fewest(self, candidate: RowEstimate, preempted: Sequence[RowEstimate], staying: Occupancy) -> tuple[str, ...]:
        """Return the ids of the fewest rows, of the first of `preempted`, without which the row fits. `staying`: the
        other active rows, beside which it fits."""
        rows = staying.copy()
        free = self._free_bytes(candidate)
        for count in range(len(preempted), 0, -1):
            rows.add(preempted[count - 1])
            if not self._has_room(rows, candidate, free):
                return tuple(row.id for row in preempted[:count])
        return ()

    def _fits(self, rows: Occupancy, candidate: RowEstimate, too_long: dict[int, int]) -> bool:
        known = candidate.held_bytes == 0  # else more memory is free for it than for others
        if known and candidate.tokens >= too_long.get(candidate.group, candidate.tokens + 1):
            return False
        fits = self._has_room(rows, candidate, self._free_bytes(candidate))
        if not fits and known and candidate.images is NO_IMAGES:
            too_long[candidate.group] = candidate.tokens
        return fits

    def _free_bytes(self, candidate: RowEstimate) -> int:
        """Return the bytes for the model and all rows if the row is admitted, which frees its saved cache."""
        return self._limits.max_bytes - self._held_bytes + candidate.held_bytes

    def _has_room(self, rows: Occupancy, candidate: RowEstimate, free: int) -> bool:
        if not len(rows):
            free += self._limits.alone_bytes - self._limits.max_bytes
        return len(rows) < self._limits.max_rows and rows.peak_with(candidate) <= free

    def _fits_by_itself(self, candidate: RowEstimate) -> bool:
        has_images = candidate.images is not NO_IMAGES
        if not has_images and candidate.tokens <= self._fits_alone:
            return True
        fits = self._nothing.peak_with(candidate) <= self._limits.alone_bytes
        if fits and not has_images:
            self._fits_alone = candidate.tokens
        return fits

    @cached_property
    def _longest_alone(self) -> int:
        return self._limits.costs.max_tokens(self._limits.alone_bytes)

    def _forget_failures(self) -> None:
        self._too_long.clear()
        self._too_long_for_all.clear()


def victims(row: RowEstimate, active: Sequence[RowEstimate]) -> list[RowEstimate]:
    """Return the active rows that may be preempted for a row without a limit, in order: offline rows for an interactive
    one, then those of its lane that are younger and state no limit either; the youngest first. `active`: the oldest
    first."""
    own = [other for other in reversed(active) if other.lane == row.lane and other.grows and other.age > row.age]
    return own if row.lane == "batch" else [*(other for other in reversed(active) if other.lane == "batch"), *own]


def longest_answer(row: RowEstimate, limits: AdmissionLimits) -> int:
    """Return the tokens of the longest answer for which the row fits alone, at most what is likely; 0 if none does."""
    alone = Occupancy(limits.costs)
    most = limits.alone_bytes
    return bisect(range(1, row.likely + 1), most, key=lambda tokens: alone.peak_with(row.reserving(tokens)))


def _age(row: RowEstimate) -> int:
    return row.age


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


def fits(rows: Sequence[RowEstimate], costs: MemoryModel, limit: int) -> bool:
    """Return True if the predicted peak of these rows is within `limit` bytes, model included."""
    return _peak_bytes(rows, costs) <= limit


def _peak_bytes(rows: Sequence[RowEstimate], costs: MemoryModel) -> int:
    return costs.peak_bytes(group_lengths(rows), images=image_demand(rows))


def _count_overtaken(decided: list[tuple[RowEstimate, Decision]]) -> list[tuple[RowEstimate, Decision]]:
    counted, behind = list[tuple[RowEstimate, Decision]](), 0
    for row, decision in reversed(decided):
        counted.append((row, Wait(row.overtaken + behind) if isinstance(decision, Wait) else decision))
        behind += isinstance(decision, Admit)
    return counted[::-1]


def _refusal(candidate: RowEstimate, limits: AdmissionLimits, longest: int) -> str:
    """`longest`: tokens of the longest row that fits alone."""
    costs = limits.costs
    available = limits.alone_bytes - costs.resident_bytes
    if not longest:
        return f"This worker has {format_bytes(max(0, available))} for requests, too little for any answer."
    needs = _peak_bytes([candidate], costs) - costs.resident_bytes
    if fits([_with_images(candidate, 0)], costs, limits.alone_bytes):
        percent = _largest_scale(candidate, limits)
        return (
            f"This request needs {format_bytes(needs)} while its images are encoded, of which the largest takes "
            f"{candidate.images.largest:,} tokens; this worker has {format_bytes(available)} for requests: "
            + (f"make them smaller, to about {percent} % of their pixels." if percent else "send no images.")
        )
    return (
        f"This request needs {format_bytes(needs)} for {candidate.prompt_tokens:,} prompt and "
        f"{candidate.max_tokens:,} answer tokens; this worker has {format_bytes(available)} for requests: "
        f"shorten {_shorten(candidate, candidate.tokens - longest)} tokens."
    )


def _shorten(candidate: RowEstimate, excess: int) -> str:
    """Return the fields to shorten, and by how much. `excess`: tokens beyond the longest row that fits alone."""
    prompt, with_draft = candidate.prompt_tokens, candidate.prompt_tokens + candidate.extra_tokens
    if prompt < with_draft and excess < with_draft:  # the draft's cache becomes smaller with the prompt
        return f"the prompt by about {_rounded_up(-(-excess * prompt // with_draft)):,}"
    return f"the prompt{'' if candidate.grows else ' or max_tokens'} by about {_rounded_up(excess):,}"


def _largest_scale(candidate: RowEstimate, limits: AdmissionLimits) -> int:
    """Return the largest share of their pixels, in percent, with which the images fit; 0 if none does."""

    def peak_bytes(percent: int) -> int:
        return _peak_bytes([_with_images(candidate, percent)], limits.costs)

    return bisect(range(1, 100), limits.alone_bytes, key=peak_bytes)


def _with_images(candidate: RowEstimate, percent: int) -> RowEstimate:
    """Return the estimate for images that are scaled to `percent` of their pixels."""
    images = candidate.images.at(percent)
    fewer = candidate.images.total - images.total
    return candidate._replace(prompt_tokens=candidate.prompt_tokens - fewer, images=images)


def _rounded_up(tokens: int) -> int:
    """Return the number rounded up to two significant digits."""
    unit = int(10 ** max(0, len(str(tokens)) - 2))
    return -(-tokens // unit) * unit
