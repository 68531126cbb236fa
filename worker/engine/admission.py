"""Admission of requests to the engine, by predicted memory, corrected by measurements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import mlx.core as mx

from worker.engine.batch.decode_batch import PreemptedRow
from worker.schedule import classes
from worker.schedule.admission import (
    Decision,
    RowEstimate,
    Wait,
    admit_in_turn,
    by_group,
    fits,
    group_lengths,
    image_demand,
)
from worker.schedule.budget import MAX_CHUNK
from worker.schedule.classes import Bounds, Decoding, Trial
from worker.schedule.memory import CHUNK, MAX_ROWS, NO_IMAGES, Correction, ImageDemand, MemoryModel
from worker.schedule.request import GenerationRequest as Asked

_CALIBRATE_EVERY = 64  # steps between two comparisons of predicted and measured memory
# To try bounds takes a few times as long as to decide without, so they are tried at every such decision, and where
# nobody is inside, with the first of the waiting rows.
_TRY_EVERY = 8
_TRIED = 32
_YET_TO_JOIN = -1  # the group of a row whose prompt is on its way


@dataclass(slots=True)
class WaitingRequest:
    request: Asked
    saved_row: PreemptedRow | None = None  # where it was, if it decoded before
    overtaken: int = 0
    preempted: bool = False
    estimate: RowEstimate | None = None  # until the request, its cache or `overtaken` changes

    def drop_cache(self) -> None:
        """Drop the saved cache, if there is one: it is recomputed when the row is admitted again."""
        if self.saved_row:
            self.request, self.saved_row = self.saved_row.row.resumable_request(), None
            self.estimate = None

    def set_overtaken(self, rows: int) -> None:
        """Set the number of rows that have overtaken it."""
        if rows != self.overtaken:
            self.overtaken, self.estimate = rows, None


class AdmissionController:
    def __init__(self, costs: MemoryModel, limit: int, rows: int = MAX_ROWS) -> None:
        """`limit`: bytes that the model and all rows may take; `rows`: most rows that are active at once."""
        self._costs, self._limit, self._rows, self._correction = costs, limit, rows, Correction()
        self._waiting: dict[str, WaitingRequest] = {}
        self._dirty = False  # somebody came or went since it was last decided
        self._decisions = 0
        self._steps = self._max_predicted = 0  # bytes that were predicted at the most since the last look
        self._max_measured = 0  # bytes that were measured at the most since then
        self._plain = 0  # bytes that were predicted for the last step, not corrected
        self._prefix_bytes = 0  # bytes of the prefix cache, at the end of the last step
        self._active_lengths = list[list[int]]()  # lengths at their end, by group, of those who are or come inside
        self._images = NO_IMAGES  # theirs
        self._surplus = 0  # bytes that groups have in their buffers beyond what they were promised
        self.bounds: Bounds = ()  # of the classes that rows decode in
        self.crowded = False  # buffers have to give that back now
        self.free_bytes = limit - costs.resident_bytes  # bytes that no row was promised
        self.longest_chunk = CHUNK  # tokens that a prompt may advance by in one step
        self.reserved_bytes = 0, max(1, limit - costs.resident_bytes)  # bytes beside the model, and how many there are
        mx.reset_peak_memory()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Number of waiting requests that were active before."""
        return sum(each.preempted for each in self._waiting.values())

    def add(self, sequence: Asked) -> None:
        self._waiting[sequence.id] = WaitingRequest(sequence)
        self.mark_dirty()

    def requeue(self, candidate: WaitingRequest) -> None:
        """Put a preempted row first in its lane. Drops saved caches if memory is short, the youngest row's first."""
        self._waiting = {candidate.request.id: candidate, **self._waiting}
        keeping, (promised, room) = self._with_caches(), self.reserved_bytes
        while keeping and promised + self._held_bytes() > room:
            keeping.pop().drop_cache()
        self._distribute()

    def pop(self, candidate: WaitingRequest) -> None:
        """Remove an admitted or refused request from the waiting ones. Raises KeyError if it is not waiting."""
        del self._waiting[candidate.request.id]

    def remove(self, sequence_id: str) -> None:
        self._waiting.pop(sequence_id, None)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Request a new decision, since memory may have become free."""
        self._dirty = True

    @property
    def needs_decision(self) -> bool:
        """True if anything has changed since the last decision."""
        return self._dirty

    def decide(self, running: Sequence[RowEstimate], decoding: Decoding) -> list[tuple[WaitingRequest, Decision]]:
        """Return the waiting requests to admit and to refuse; they stay in the queue until `pop`. Drops saved caches
        that keep other rows out, and updates the reservation. `running`: active rows, the oldest first."""
        self._dirty = False
        order = sorted(self._waiting.values(), key=lambda candidate: candidate.request.lane == "batch")
        rows = [self._waiting_estimate(each) for each in order]
        if not running or self._decisions % _TRY_EVERY == 0:
            self.bounds = self._bounds(rows, running, decoding)
        self._decisions += 1
        rows, running = self._seated(rows, decoding), self._seated(running, decoding)
        decided = self._decide_in_turn(rows, running)
        self._reserve(running, decided, decoding)
        return [(self._waiting[row.id], decision) for row, decision in decided if not self._waits(row, decision)]

    def _bounds(self, waiting: Sequence[RowEstimate], running: Sequence[RowEstimate], decoding: Decoding) -> Bounds:
        """Return the best bounds, assuming that the decoding rows are moved into their classes."""
        costs, tried, free = self._corrected(), [*islice(waiting, _TRIED)], self._limit - self._held_bytes()

        def attempt(bounds: Bounds) -> Trial | None:
            rows, others = (
                [row.in_group(classes.class_of(row.tokens, bounds)) for row in each] for each in (running, tried)
            )
            if not fits(rows, costs, free):
                return None
            decided = admit_in_turn(others, rows, costs, self._limit, self._rows)
            there = classes.inside(rows, decided)
            return Trial(bounds, [row.tokens for row in there], classes.left(decided))

        def most_rows(tokens: int) -> int:
            return costs.max_rows(tokens, free)

        everyone = [row.tokens for row in (*running, *waiting)]
        chosen = classes.best(self.bounds, everyone, decoding.cost, attempt, most_rows)
        if chosen != self.bounds and not fits(self._seated(running, decoding, chosen), costs, self._limit):
            return self.bounds  # prompts on their way were let in for them
        return chosen

    def _seated(
        self, rows: Iterable[RowEstimate], decoding: Decoding, bounds: Bounds | None = None
    ) -> list[RowEstimate]:
        """Return the estimates with the group that each row decodes in or will decode in."""
        bounds = self.bounds if bounds is None else bounds
        group_of = decoding.groups_by_length(bounds)
        return [row.in_group(group_of(row.tokens)) if row.group == _YET_TO_JOIN else row for row in rows]

    def _decide_in_turn(
        self, rows: Sequence[RowEstimate], running: Sequence[RowEstimate]
    ) -> list[tuple[RowEstimate, Decision]]:
        """Return the decisions, after dropping the saved caches that keep rows out, that of the youngest row first."""
        costs, keeping = self._corrected(), self._with_caches()
        decided = admit_in_turn(rows, running, costs, self._limit, self._rows)
        if not keeping:
            return decided
        without_caches = [replace(row, held_bytes=0) for row in rows]
        best = _kinds(admit_in_turn(without_caches, running, costs, self._limit, self._rows))
        while _kinds(decided) != best:
            gone = keeping.pop()
            gone.drop_cache()
            rows = [replace(row, held_bytes=0) if row.id == gone.request.id else row for row in rows]
            decided = admit_in_turn(rows, running, costs, self._limit, self._rows)
        return decided

    def _reserve(
        self, running: Sequence[RowEstimate], decided: list[tuple[RowEstimate, Decision]], decoding: Decoding
    ) -> None:
        inside = classes.inside(running, decided)
        self._active_lengths, self._images = group_lengths(inside), image_demand(inside)
        needed = self._corrected().peak_bytes(self._active_lengths, images=self._images)
        self.reserved_bytes = needed - self._costs.resident_bytes, self.reserved_bytes[1]
        groups = by_group(inside)
        surplus = self.slack_bytes((groups.get(i, ()) for i in range(len(decoding.buffers))), decoding.buffers)
        self.crowded = needed + surplus > self._limit - self._held_bytes()
        self._surplus = 0 if self.crowded else surplus
        self._distribute()

    def _distribute(self) -> None:
        """Give the memory that active rows and saved caches leave to longer chunks, and the rest to prefixes."""
        costs, free = self._corrected(), self._limit - self._held_bytes() - self._surplus
        self.longest_chunk = costs.longest_chunk(self._active_lengths, free, self._images)
        self.free_bytes = free - costs.peak_bytes(
            self._active_lengths, min(self.longest_chunk, MAX_CHUNK), self._images
        )

    def _waits(self, row: RowEstimate, decision: Decision) -> bool:
        if isinstance(decision, Wait):
            self._waiting[row.id].set_overtaken(decision.overtaken)
        return isinstance(decision, Wait)

    def calibrate(
        self, lengths: list[list[int]], chunk: int, prefixes: int, images: ImageDemand = NO_IMAGES, unneeded: int = 0
    ) -> tuple[int, int] | None:
        """Compare what the rows inside were predicted to need, beside the model, with what they did. A step that took
        more corrects predictions at once; now and then they are corrected in either direction, and then the two are
        returned. `chunk`: the tokens of this step's longest one; `images`: those that were looked at in it; `prefixes`:
        bytes of the prefix cache; `unneeded`: see there. The peak of MLX's memory has to be that of the step."""
        self._steps += 1
        used = mx.get_peak_memory() - self._costs.resident_bytes - min(prefixes, self._prefix_bytes)
        self._max_measured, self._prefix_bytes = max(self._max_measured, used), prefixes
        plain = self._costs.beside_bytes(lengths, chunk, images) + self._held_bytes() + unneeded
        self._correct(max(plain, self._plain), used)
        self._max_predicted, self._plain = max(self._max_predicted, plain), plain
        if self._steps % _CALIBRATE_EVERY:
            return None
        most, measured, self._max_predicted, self._max_measured = self._max_predicted, self._max_measured, 0, 0
        if not most:
            return None
        predicted = round(self._correction.factor * most)
        self._correction = self._correction.observe(most, measured)
        return predicted, measured

    def _correct(self, plain: int, used: int) -> None:
        """`plain`: predicted for this step's rows, or for the last one's: rows that left are in the peak still."""
        corrected = self._correction.exceeded(plain, used)
        if corrected != self._correction:
            self._correction = corrected
            self.mark_dirty()

    def slack_bytes(self, groups: Iterable[Sequence[int]], buffers: Iterable[int]) -> int:
        """Bytes that groups have in their buffers beyond what rows of these lengths are given: some left."""
        given = map(self._costs.rectangle_bytes, groups)
        return sum(max(0, theirs - needed) for theirs, needed in zip(buffers, given, strict=True))

    def headroom(self, rows: Iterable[RowEstimate], decoding: Decoding) -> int:
        """Bytes, if these are all who are inside, in the groups that they would decode in; below 0 where they do not
        fit."""
        rows = self._seated(rows, decoding)
        return (
            self._limit
            - self._held_bytes()
            - self._corrected().peak_bytes(group_lengths(rows), images=image_demand(rows))
        )

    def _waiting_estimate(self, candidate: WaitingRequest) -> RowEstimate:
        if candidate.estimate is None:
            row = self.estimate(candidate.request, None, _images_of(candidate.request), candidate.overtaken)
            held_bytes = candidate.saved_row.snapshot.nbytes if candidate.saved_row else 0
            candidate.estimate = replace(row, preempted=candidate.preempted, held_bytes=held_bytes)
        return candidate.estimate

    def estimate(
        self, asked: Asked, group: int | None, images: ImageDemand = NO_IMAGES, passed: int = 0
    ) -> RowEstimate:
        """Return the estimate of a request. `group`: None while it prefills. Until SpecPrefill is decided, the prompt
        also takes a cache in the draft. `images`: those that are not computed yet; the pixel inputs of all images are
        kept, since the row may have to be recomputed. `passed`: how many rows have overtaken it."""
        scored = self._costs.draft_tokens(len(asked.prompt)) if asked.specprefill and asked.kept_ranges is None else 0
        tokens = len(asked.prompt) - asked.num_dropped + scored
        group = _YET_TO_JOIN if group is None else group
        return RowEstimate(
            asked.id, asked.lane, tokens, asked.max_tokens, group, passed, images=_with_prepared(images, asked)
        )

    def _corrected(self) -> MemoryModel:
        return replace(self._costs, factor=self._correction.factor)

    def _with_caches(self) -> list[WaitingRequest]:
        """Those who wait with their caches. The youngest is last: it was parked first, and each is put back before."""
        return [each for each in self._waiting.values() if each.saved_row]

    def _held_bytes(self) -> int:
        """Return the bytes of all saved caches."""
        return sum(each.saved_row.snapshot.nbytes for each in self._waiting.values() if each.saved_row)


def _images_of(asked: Asked) -> ImageDemand:
    """All of them, also those that are known: room for the row may be made at the cost of what is known of them."""
    if not asked.images:
        return NO_IMAGES
    tokens = {picture.digest: picture.tokens for picture in asked.images}.values()
    longest = max(tokens, default=0)
    return ImageDemand(longest, sum(tokens), longest)


def _with_prepared(images: ImageDemand, asked: Asked) -> ImageDemand:
    if not asked.images:
        return images
    each = {picture.digest: picture.nbytes for picture in asked.images}.values()
    return images + ImageDemand(prepared_bytes=sum(each))


def _kinds(decided: Iterable[tuple[RowEstimate, Decision]]) -> list[type[Decision]]:
    return [type(decision) for _, decision in decided]
