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
from worker.schedule.request import GenerationRequest

_CALIBRATE_EVERY = 64  # steps between two comparisons of predicted and measured memory
# Choosing bounds takes several times as long as a decision. So they are chosen only at one decision in this many, and
# if no row is active, by trying the first waiting rows.
_CHOOSE_BOUNDS_EVERY = 8
_ROWS_TRIED = 32
_NO_GROUP = -1  # group number of a row that does not decode yet


@dataclass(slots=True)
class WaitingRequest:
    """A request that waits for admission."""

    request: GenerationRequest
    saved_row: PreemptedRow | None = None  # its row and cache, if it was preempted while it decoded
    overtaken: int = 0  # rows admitted before it although they were behind it
    preempted: bool = False  # it was active before
    estimate: RowEstimate | None = None  # cached until the request, its cache or `overtaken` changes

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
    """Owner of the waiting requests. Decides which are admitted, by the predicted memory of all rows, and corrects the
    prediction by measurements. For the engine's thread."""

    def __init__(self, costs: MemoryModel, limit: int, rows: int = MAX_ROWS) -> None:
        """`costs`: predicts memory. `limit`: bytes that the model and all rows may take. `rows`: most rows that are
        active at once. Resets MLX's peak memory."""
        self._costs, self._limit, self._rows, self._correction = costs, limit, rows, Correction()
        self._waiting: dict[str, WaitingRequest] = {}
        self._dirty = False  # a new decision may differ from the last one
        self._decisions = 0
        self._steps = 0
        self._max_predicted = self._max_measured = 0  # largest bytes of a step since the last calibration, uncorrected
        self._last_predicted = 0  # bytes predicted for the last step, uncorrected
        self._prefix_bytes = 0  # bytes of caches that outlive a request, at the end of the last step
        self._active_lengths = list[list[int]]()  # lengths at their end in tokens, by group, of the active rows
        self._images = NO_IMAGES  # image demand of the active rows
        self._slack_bytes = 0  # bytes of the groups' buffers beyond the reservation: see `slack_bytes`
        self.bounds: Bounds = ()  # of the length classes that rows decode in
        self.must_tighten = False  # the memory of the slack is needed: see `Groups.tighten`
        self.free_bytes = limit - costs.resident_bytes  # bytes that neither rows nor saved caches have reserved
        self.longest_chunk = CHUNK  # most tokens that a prompt may advance by in one step
        # Bytes besides the weights: reserved for active rows, and available.
        self.reserved_bytes = 0, max(1, limit - costs.resident_bytes)
        mx.reset_peak_memory()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Number of waiting requests that were active before."""
        return sum(each.preempted for each in self._waiting.values())

    def add(self, request: GenerationRequest) -> None:
        """Append a request to the waiting ones."""
        self._waiting[request.id] = WaitingRequest(request)
        self.mark_dirty()

    def requeue(self, candidate: WaitingRequest) -> None:
        """Put a preempted row first in its lane. Drops saved caches if memory is short, the youngest row's first."""
        self._waiting = {candidate.request.id: candidate, **self._waiting}
        with_caches, (reserved, available) = self._requests_with_caches(), self.reserved_bytes
        while with_caches and reserved + self._held_bytes() > available:
            with_caches.pop().drop_cache()
        self._distribute()

    def pop(self, candidate: WaitingRequest) -> None:
        """Remove an admitted or refused request from the waiting ones. Raises KeyError if it is not waiting."""
        del self._waiting[candidate.request.id]

    def remove(self, id: str) -> None:
        """Remove a request, waiting or active, and request a new decision. An unknown id is ignored."""
        self._waiting.pop(id, None)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Request a new decision, since memory may have become free."""
        self._dirty = True

    @property
    def needs_decision(self) -> bool:
        """True if anything has changed since the last decision."""
        return self._dirty

    def decide(self, active: Sequence[RowEstimate], decoding: Decoding) -> list[tuple[WaitingRequest, Decision]]:
        """Return the waiting requests to admit or to refuse, with the decision; they keep waiting until `pop`. Drops
        saved caches that keep other rows out, and updates the bounds and the reservation. `active`: rows in prefill and
        decoding rows, the oldest first."""
        self._dirty = False
        order = sorted(self._waiting.values(), key=lambda candidate: candidate.request.lane == "batch")
        rows = [self._waiting_estimate(each) for each in order]
        if not active or self._decisions % _CHOOSE_BOUNDS_EVERY == 0:
            self.bounds = self._bounds(rows, active, decoding)
        self._decisions += 1
        rows, active = self._with_groups(rows, decoding), self._with_groups(active, decoding)
        decided = self._decide_in_turn(rows, active)
        self._reserve(active, decided, decoding)
        return [
            (self._waiting[row.id], decision) for row, decision in decided if not self._keeps_waiting(row, decision)
        ]

    def _bounds(self, waiting: Sequence[RowEstimate], active: Sequence[RowEstimate], decoding: Decoding) -> Bounds:
        """Return the best bounds, assuming that the decoding rows are moved into their classes."""
        costs, first_rows, free = self._corrected(), [*islice(waiting, _ROWS_TRIED)], self._limit - self._held_bytes()

        def try_bounds(bounds: Bounds) -> Trial | None:
            rows, waiting_rows = (
                [row.in_group(classes.class_of(row.tokens, bounds)) for row in each] for each in (active, first_rows)
            )
            if not fits(rows, costs, free):
                return None
            decided = admit_in_turn(waiting_rows, rows, costs, self._limit, self._rows)
            active_after = classes.rows_after(rows, decided)
            return Trial(bounds, [row.tokens for row in active_after], classes.still_waiting(decided))

        def most_rows(tokens: int) -> int:
            return costs.max_rows(tokens, free)

        lengths = [row.tokens for row in (*active, *waiting)]
        chosen = classes.choose_bounds(self.bounds, lengths, decoding.cost, try_bounds, most_rows)
        if chosen != self.bounds and not fits(self._with_groups(active, decoding, chosen), costs, self._limit):
            return self.bounds  # rows in prefill were admitted for these
        return chosen

    def _with_groups(
        self, rows: Iterable[RowEstimate], decoding: Decoding, bounds: Bounds | None = None
    ) -> list[RowEstimate]:
        """Return the estimates with the group that each row decodes in or will decode in."""
        bounds = self.bounds if bounds is None else bounds
        group_of = decoding.groups_by_length(bounds)
        return [row.in_group(group_of(row.tokens)) if row.group == _NO_GROUP else row for row in rows]

    def _decide_in_turn(
        self, rows: Sequence[RowEstimate], active: Sequence[RowEstimate]
    ) -> list[tuple[RowEstimate, Decision]]:
        """Return the decisions, after dropping the saved caches that keep rows out, that of the youngest row first."""
        costs, with_caches = self._corrected(), self._requests_with_caches()
        decided = admit_in_turn(rows, active, costs, self._limit, self._rows)
        if not with_caches:
            return decided
        without_caches = [replace(row, held_bytes=0) for row in rows]
        best = _types(admit_in_turn(without_caches, active, costs, self._limit, self._rows))
        while _types(decided) != best:
            youngest = with_caches.pop()
            youngest.drop_cache()
            rows = [replace(row, held_bytes=0) if row.id == youngest.request.id else row for row in rows]
            decided = admit_in_turn(rows, active, costs, self._limit, self._rows)
        return decided

    def _reserve(
        self, active: Sequence[RowEstimate], decided: list[tuple[RowEstimate, Decision]], decoding: Decoding
    ) -> None:
        """Reserve memory for the rows that are active once the decisions are applied."""
        active_after = classes.rows_after(active, decided)
        self._active_lengths, self._images = group_lengths(active_after), image_demand(active_after)
        needed = self._corrected().peak_bytes(self._active_lengths, images=self._images)
        self.reserved_bytes = needed - self._costs.resident_bytes, self.reserved_bytes[1]
        groups = by_group(active_after)
        slack_bytes = self.slack_bytes((groups.get(i, ()) for i in range(len(decoding.buffers))), decoding.buffers)
        self.must_tighten = needed + slack_bytes > self._limit - self._held_bytes()
        self._slack_bytes = 0 if self.must_tighten else slack_bytes
        self._distribute()

    def _distribute(self) -> None:
        """Give the memory that active rows and saved caches leave to longer chunks, and the rest to prefixes."""
        costs, free = self._corrected(), self._limit - self._held_bytes() - self._slack_bytes
        self.longest_chunk = costs.longest_chunk(self._active_lengths, free, self._images)
        self.free_bytes = free - costs.peak_bytes(
            self._active_lengths, min(self.longest_chunk, MAX_CHUNK), self._images
        )

    def _keeps_waiting(self, row: RowEstimate, decision: Decision) -> bool:
        """Return True if the row keeps waiting; then records the rows that have overtaken it."""
        if isinstance(decision, Wait):
            self._waiting[row.id].set_overtaken(decision.overtaken)
        return isinstance(decision, Wait)

    def calibrate(
        self,
        lengths: list[list[int]],
        chunk: int,
        prefix_bytes: int,
        images: ImageDemand = NO_IMAGES,
        slack_bytes: int = 0,
    ) -> tuple[int, int] | None:
        """Compare the predicted with the measured memory of a step, both without weights. If the step took more than
        predicted, predictions rise at once. Every `_CALIBRATE_EVERY` steps they move in either direction; then the
        largest predicted and measured bytes of these steps are returned, else None.

        `lengths`: current lengths of the rows in tokens, by group. `chunk`: tokens of the step's longest chunk.
        `prefix_bytes`: bytes of the caches that outlive a request, which are not counted. `images`: those encoded in
        the step. `slack_bytes`: see the method. MLX's peak memory must have been reset before the step."""
        self._steps += 1
        used = mx.get_peak_memory() - self._costs.resident_bytes - min(prefix_bytes, self._prefix_bytes)
        self._max_measured, self._prefix_bytes = max(self._max_measured, used), prefix_bytes
        uncorrected = self._costs.working_bytes(lengths, chunk, images) + self._held_bytes() + slack_bytes
        self._correct(max(uncorrected, self._last_predicted), used)
        self._max_predicted, self._last_predicted = max(self._max_predicted, uncorrected), uncorrected
        if self._steps % _CALIBRATE_EVERY:
            return None
        max_predicted, measured, self._max_predicted, self._max_measured = self._max_predicted, self._max_measured, 0, 0
        if not max_predicted:
            return None
        predicted = round(self._correction.factor * max_predicted)
        self._correction = self._correction.observe(max_predicted, measured)
        return predicted, measured

    def _correct(self, uncorrected: int, used: int) -> None:
        """Raise predictions if a step used more bytes than predicted. `uncorrected`: the larger prediction of this and
        the last step, since rows that have left are still in the peak."""
        corrected = self._correction.exceeded(uncorrected, used)
        if corrected != self._correction:
            self._correction = corrected
            self.mark_dirty()

    def slack_bytes(self, groups: Iterable[Sequence[int]], buffers: Iterable[int]) -> int:
        """Return the bytes that buffers have beyond the needs of rows of these lengths: they do not shrink at once when
        rows leave. `groups`: lengths in tokens by group; `buffers`: allocated bytes by group."""
        rectangles = map(self._costs.rectangle_bytes, groups)
        return sum(max(0, held - needed) for held, needed in zip(buffers, rectangles, strict=True))

    def headroom(self, rows: Iterable[RowEstimate], decoding: Decoding) -> int:
        """Return the bytes left if exactly these rows are active, in the groups that they would decode in; negative if
        they do not fit. Saved caches count as used."""
        rows = self._with_groups(rows, decoding)
        return (
            self._limit
            - self._held_bytes()
            - self._corrected().peak_bytes(group_lengths(rows), images=image_demand(rows))
        )

    def _waiting_estimate(self, candidate: WaitingRequest) -> RowEstimate:
        if candidate.estimate is None:
            row = self.estimate(candidate.request, None, _image_demand(candidate.request), candidate.overtaken)
            held_bytes = candidate.saved_row.snapshot.nbytes if candidate.saved_row else 0
            candidate.estimate = replace(row, preempted=candidate.preempted, held_bytes=held_bytes)
        return candidate.estimate

    def estimate(
        self, request: GenerationRequest, group: int | None, images: ImageDemand = NO_IMAGES, overtaken: int = 0
    ) -> RowEstimate:
        """Return the estimate of a request. `group`: number of the group that it decodes in, or None. Until SpecPrefill
        is decided, the prompt also takes a cache in the draft. `images`: those that are not computed yet; the pixel
        inputs of all images are held, since the row may have to be recomputed. `overtaken`: see `RowEstimate`."""
        undecided = request.specprefill and request.kept_ranges is None
        scored = self._costs.draft_tokens(len(request.prompt)) if undecided else 0
        tokens = len(request.prompt) - request.num_dropped + scored
        group = _NO_GROUP if group is None else group
        return RowEstimate(
            request.id,
            request.lane,
            tokens,
            request.max_tokens,
            group,
            overtaken,
            images=_with_prepared(images, request),
        )

    def _corrected(self) -> MemoryModel:
        return replace(self._costs, factor=self._correction.factor)

    def _requests_with_caches(self) -> list[WaitingRequest]:
        """Return the waiting requests with saved caches, the youngest last: rows are preempted youngest first, and each
        one is requeued before the others."""
        return [each for each in self._waiting.values() if each.saved_row]

    def _held_bytes(self) -> int:
        """Return the bytes of all saved caches."""
        return sum(each.saved_row.snapshot.nbytes for each in self._waiting.values() if each.saved_row)


def _image_demand(request: GenerationRequest) -> ImageDemand:
    """Return the demand of all images, also of those with cached features, since admitting the row may evict these."""
    if not request.images:
        return NO_IMAGES
    tokens = {image.digest: image.tokens for image in request.images}.values()
    longest = max(tokens, default=0)
    return ImageDemand(longest, sum(tokens), longest)


def _with_prepared(images: ImageDemand, request: GenerationRequest) -> ImageDemand:
    """Return the demand with the pixel inputs added; an image that occurs twice counts once."""
    if not request.images:
        return images
    each = {image.digest: image.nbytes for image in request.images}.values()
    return images + ImageDemand(prepared_bytes=sum(each))


def _types(decided: Iterable[tuple[RowEstimate, Decision]]) -> list[type[Decision]]:
    return [type(decision) for _, decision in decided]
