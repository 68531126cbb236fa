"""Owns the queue of waiting requests, and the calibration of predicted memory by the measured one. `admission/plan.py`
decides which requests are admitted."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from sluice.contract.keys import Lane
from worker.engine.admission.classes import Bounds, Decoding
from worker.engine.admission.decision import AdmissionLimits, RowEstimate, group_lengths, image_demand
from worker.engine.admission.plan import (
    NO_GROUP,
    AdmissionPlan,
    AnswerLengths,
    MemoryShares,
    Reservation,
    best_bounds,
    in_groups,
    plan_admission,
)
from worker.engine.admission.shortage import Shortage
from worker.engine.admission.tuning import MOST_FACTOR, NOISE_BYTES
from worker.engine.batch.decode_batch import PreemptedRow
from worker.engine.batch.row import Row
from worker.engine.memory import BUFFER_TOKENS, MAX_ROWS, NO_IMAGES, ImageDemand, MemoryModel, StepDemand
from worker.host.courtesy import Reclaim
from worker.request import GenerationRequest


def raised(factor: float, predicted: int, measured: int) -> float:
    """Return the ratio of measured to predicted memory after one step's measurement: it rises at once, and never falls.
    `predicted`: bytes before correction."""
    return factor if predicted < NOISE_BYTES else max(factor, min(MOST_FACTOR, measured / predicted))


def corrected(factor: float, predicted: int, measured: int) -> float:
    """Return the ratio moved towards measured / predicted, faster upwards than downwards: running out of memory is
    worse than leaving some unused. Both are peak bytes in addition to the weights; `predicted` is
    `MemoryModel.working_bytes` of the rows that ran."""
    if predicted < NOISE_BYTES:
        return factor
    ratio = min(MOST_FACTOR, max(0.5, measured / predicted))
    return factor + (0.5 if ratio > factor else 0.05) * (ratio - factor)


class Calibration:
    """The present correction, and the measurements since the last comparison. Bytes are those of
    `MemoryModel.working_bytes`: without weights, and not corrected."""

    def __init__(self) -> None:
        self.factor = 1.0  # of measured to predicted memory, applied as `MemoryModel.factor`
        self._steps = 0
        self._last_predicted = 0  # for the step recorded last
        self._max_predicted = self._max_measured = 0  # of a step since the last comparison

    def skip_step(self, measured: int) -> bool:
        """Count a step without a prediction, if a prediction would not raise the correction. Returns False, and counts
        nothing, if the step must be recorded. Its prediction must be at least that of the step recorded last."""
        is_due = (self._steps + 1) % 16 == 0  # so the last step before a comparison is recorded
        if is_due or measured > self.factor * max(self._last_predicted, NOISE_BYTES):
            return False
        self._steps += 1
        self._max_measured = max(self._max_measured, measured)
        return True

    def record_step(self, predicted: int, measured: int) -> bool:
        """Record the predicted and measured bytes of a step. Returns True if predictions rise at once, because the step
        took more than predicted for it and for the one recorded last: rows that have left are still in the peak."""
        self._steps += 1
        self._max_measured = max(self._max_measured, measured)
        before = self.factor
        self.factor = raised(before, max(predicted, self._last_predicted), measured)
        self._max_predicted = max(self._max_predicted, predicted)
        self._last_predicted = predicted
        return self.factor != before

    def compare(self) -> tuple[int, int] | None:
        """Return the largest predicted bytes, corrected, and the largest measured bytes of the last 64
        steps, and move predictions towards what was measured. Returns None in the steps between."""
        predicted, measured = self._max_predicted, self._max_measured
        if self._steps % 64:
            return None
        self._max_predicted = self._max_measured = 0
        if not predicted:
            return None
        expected = round(self.factor * predicted)
        self.factor = corrected(self.factor, predicted, measured)
        return expected, measured


@dataclass(slots=True)
class WaitingRequest:
    """A request that waits for admission."""

    request: GenerationRequest
    saved_row: PreemptedRow | None = None  # its row and cache, if it was preempted while it decoded
    overtaken: int = 0  # rows admitted before it although they were behind it
    preempted: bool = False  # it was active before
    age: int = 0  # number of requests that have arrived before it
    estimate: RowEstimate | None = None  # cached until the request, its cache or `overtaken` changes

    def drop_cache(self) -> list[PreemptedRow]:
        """Drop and return the saved row, if there is one: when the request is admitted again, it continues from its
        tokens."""
        dropped = [self.saved_row] if self.saved_row else []
        if self.saved_row:
            self.request, self.saved_row = self.saved_row.row.resumable_request(), None
            self.estimate = None
        return dropped

    def estimated(self, costs: MemoryModel, lengths: AnswerLengths) -> RowEstimate:
        """Return its estimate, as `row_estimate` does; computed again only after a change. `lengths`: of recent
        answers."""
        request, drawn = self.request, self._drawn
        tokens = min(request.max_tokens, lengths.likely(request.lane, drawn)) if request.grows else request.max_tokens
        if self.estimate is None or self.estimate.max_tokens != tokens:
            row = row_estimate(costs, request, None, _image_demand(request), self.overtaken, self.age)
            held_bytes = self.saved_row.snapshot.nbytes if self.saved_row else 0
            self.estimate = row._replace(
                max_tokens=tokens,
                preempted=self.preempted,
                held_bytes=held_bytes,
                least=min(drawn + 1, request.max_tokens),
                likely=tokens,
            )
        return self.estimate

    @property
    def _drawn(self) -> int:
        return len(self.saved_row.row.answer if self.saved_row else self.request.resume_tokens)

    def set_overtaken(self, rows: int) -> None:
        """Set the number of rows that have overtaken it."""
        if rows != self.overtaken:
            self.overtaken, self.estimate = rows, None


class AdmissionController:
    """Owner of the waiting requests, of the memory reserved for rows, and of the calibration. `decide` returns the plan
    of `plan_admission`, and `apply` takes it over. For the engine's thread."""

    def __init__(self, costs: MemoryModel, limit: int, rows: int = MAX_ROWS) -> None:
        """`costs`: predicts memory. `limit`: bytes that the model and all rows may take. `rows`: most rows that are
        active at once. Resets MLX's peak memory."""
        self._limits = AdmissionLimits(costs, limit, rows)  # with costs before correction
        self.calibration = Calibration()
        self._shortage = Shortage()
        self._waiting: dict[str, WaitingRequest] = {}
        self._is_dirty = False  # set by `mark_dirty`
        self._num_plans = 0  # that were applied
        self._planned_at = 0.0  # time.monotonic() of the last one
        self._prefix_bytes = 0  # bytes of caches that outlive a request, at the end of the last step
        self._bounds: Bounds = ()  # of the length classes that rows decode in
        self._reservation = Reservation(peak_bytes=costs.resident_bytes)
        self._shares = MemoryShares(free_bytes=limit - costs.resident_bytes)
        self._lengths = AnswerLengths()
        self._arrived = 0  # requests
        self._is_planned = True  # a plan is applied in this step, so other caches may be saved
        self._reclaim = Reclaim.NOTHING
        self._compared: StepDemand | None = None  # of the step whose memory was compared last
        # A step may deliver a token that is drawn, a draft and the token after it. If no more can be reserved then, one
        # more token may be drawn already, and another one can follow as the last.
        self.tokens_ahead = 4 + costs.max_draft
        mx.reset_peak_memory()

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Number of waiting requests that were active before."""
        return sum(each.preempted for each in self._waiting.values())

    @property
    def lanes(self) -> Iterator[Lane]:
        """The lanes of the waiting requests."""
        return (each.request.lane for each in self._waiting.values())

    @property
    def may_begin(self) -> bool:
        """False if none of the waiting requests begins, though none is active: see `give_back`."""
        return self._reclaim < Reclaim.OFFLINE_ROWS or "interactive" in self.lanes

    def give_back(self, reclaim: Reclaim) -> None:
        """Let offline rows, or all new ones, wait from the next plan on, or no longer."""
        self._reclaim = reclaim
        self.mark_dirty()

    def to_preempt(self, active: Iterable[Row]) -> list[str]:
        """Return the ids of the active rows that memory is wanted of, the youngest first."""
        gives = self._reclaim >= Reclaim.OFFLINE_ROWS
        return [row.id for row in active if gives and row.request.lane == "batch"][::-1]

    def _considered(self, *, is_idle: bool) -> Iterable[WaitingRequest]:
        """Return the waiting requests that may begin. `is_idle`: no row is active; then an interactive one may."""
        if self._reclaim < Reclaim.OFFLINE_ROWS:
            return self._waiting.values()
        interactive = [each for each in self._waiting.values() if each.request.lane == "interactive"]
        begun = [each for each in interactive if each.preempted]
        if self._reclaim < Reclaim.NEW_JOBS:
            return interactive
        return interactive[:1] if is_idle and not begun else begun

    def add(self, request: GenerationRequest) -> None:
        """Append a request to the waiting ones."""
        self._waiting[request.id] = WaitingRequest(request, age=self._arrived)
        self._arrived += 1
        self.mark_dirty()

    def observe_answer(self, request: GenerationRequest, tokens: int) -> None:
        """Record the length of an answer that has ended, as what later ones are likely to need."""
        if request.grows:
            self._lengths.observe(request.lane, tokens)

    def requeue(self, candidate: WaitingRequest) -> list[PreemptedRow]:
        """Put a preempted row first in its lane, after older ones that were preempted too. Drops saved caches if memory
        is short, the youngest row's first, and returns their rows."""
        preempted = sorted((candidate, *(each for each in self._waiting.values() if each.preempted)), key=_age)
        self._waiting = {each.request.id: each for each in preempted} | self._waiting
        dropped = self._drop_excess()
        self._shares = self._reservation.shares(self._corrected(), self._held_bytes())
        return dropped

    def _drop_excess(self) -> list[PreemptedRow]:
        """Drop saved caches for which the active rows leave no memory, the youngest row's first, and those of offline
        rows while memory is given back. Returns their rows."""
        with_caches, (reserved, available) = self._requests_with_caches(), self.reserved_bytes
        dropped = list[PreemptedRow]()
        for each in with_caches if self._reclaim >= Reclaim.OFFLINE_ROWS else ():
            dropped += each.drop_cache() if each.request.lane == "batch" else ()
        with_caches = [each for each in with_caches if each.saved_row]
        while with_caches and reserved + self._held_bytes() > available:
            dropped += with_caches.pop().drop_cache()
        return dropped

    def requests(self, ids: Iterable[str]) -> list[GenerationRequest]:
        """Return these waiting requests."""
        return [self._waiting[id].request for id in ids]

    def pop(self, id: str) -> WaitingRequest:
        """Remove and return an admitted or refused request. Raises KeyError if it is not waiting."""
        return self._waiting.pop(id)

    def remove(self, id: str) -> None:
        """Remove a request, waiting or active, and request a new decision. An unknown id is ignored."""
        self._waiting.pop(id, None)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Request a new plan, since memory may have become free."""
        self._is_dirty = True

    @property
    def needs_decision(self) -> bool:
        """True if a new plan may differ from the last one."""
        return self._is_dirty or (
            len(self._waiting) > 0 and self._shortage.has_eased(self._planned_at, time.monotonic())
        )

    @property
    def free_bytes(self) -> int:
        """Bytes that neither active rows nor saved caches have reserved."""
        return self._shares.free_bytes

    @property
    def longest_chunk(self) -> int:
        """Most tokens of a forward of one or several prompts."""
        return self._shortage.longest_chunk(self._shares.longest_chunk, time.monotonic())

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """Bytes besides the weights: reserved for active rows, and available."""
        resident = self._limits.costs.resident_bytes
        return self._reservation.peak_bytes - resident, max(1, self._limits.max_bytes - resident)

    def decide(self, active: Sequence[RowEstimate], decoding: Decoding) -> AdmissionPlan:
        """Return the requests to admit or to refuse, and everything that follows; see `apply`. Changes nothing.
        `active`: rows in prefill and decoding rows, the oldest first."""
        waiting = [each.estimated(self._limits.costs, self._lengths) for each in self._considered(is_idle=not active)]
        bounds, limits = self._bounds, self._corrected()
        if not active or self._num_plans % 8 == 0:  # choosing takes several times as long as a plan
            bounds = best_bounds(waiting, active, decoding, bounds, limits)
        return plan_admission(waiting, active, decoding, bounds, limits)

    def apply(self, plan: AdmissionPlan) -> list[PreemptedRow]:
        """Drop the saved caches, and take over the bounds and the reservation. The rows to admit or to refuse keep
        waiting until `pop`. Returns the rows whose caches were dropped."""
        self._is_dirty, self._is_planned = False, True
        self._num_plans += 1
        self._planned_at = time.monotonic()
        dropped = [row for id in plan.drop_caches for row in self._waiting[id].drop_cache()]
        for id, rows in plan.overtaken.items():
            self._waiting[id].set_overtaken(rows)
        self._bounds = plan.bounds
        self._reservation = plan.reservation
        self._shares = plan.shares
        if (plan.growth.reserve or self._reclaim) and (excess := self._drop_excess()):
            dropped += excess
            self._shares = plan.reservation.shares(self._corrected(), self._held_bytes())
        # A plan that preempts for growth admits no row, and one that refuses the single request that it considers.
        if plan.growth.preempt or (plan.refuse and self._reclaim >= Reclaim.NEW_JOBS):
            self.mark_dirty()
        return dropped

    def compare(self, demand: StepDemand, prefix_bytes: int) -> tuple[int, int] | None:
        """Compare the peak memory of a step with its prediction, unless that could change nothing: the same rows as in
        the step compared last take no more than was predicted for that one. So a plan uses the corrections of all steps
        before it. Returns what `calibrate` returns; None if nothing is compared. `prefix_bytes`: see `calibrate`."""
        planned, self._is_planned = self._is_planned, False
        covered = not planned and self._compared is not None and demand.covers(self._compared)
        if covered and self.skip_calibration(prefix_bytes):
            return None
        self._compared = demand
        slack_bytes = self._limits.costs.slack_bytes(demand.lengths[: len(demand.buffers)], demand.buffers)
        return self.calibrate(demand.lengths, demand.chunk, prefix_bytes, demand.images, slack_bytes, demand.drawn)

    def skip_calibration(self, prefix_bytes: int) -> bool:
        """Count a step without predicting its memory, if that would not raise predictions. Returns False, and changes
        nothing, if the step must be calibrated. Only for a step that is predicted to take at least what the step
        calibrated last was. `prefix_bytes`: see `calibrate`."""
        skipped = self.calibration.skip_step(self._used_bytes(prefix_bytes))
        if skipped:
            self._prefix_bytes = prefix_bytes
        return skipped

    def calibrate(
        self,
        lengths: Sequence[Sequence[int]],
        chunk: int,
        prefix_bytes: int,
        images: ImageDemand = NO_IMAGES,
        slack_bytes: int = 0,
        drawn: int | None = None,
    ) -> tuple[int, int] | None:
        """Compare the predicted with the measured memory of a step, both without weights. If the step took more than
        predicted, predictions rise at once, and a new plan is requested. Returns what `Calibration.compare` returns.

        `lengths`: current lengths of the rows in tokens, by group. `chunk`: tokens of the step's longest chunk.
        `prefix_bytes`: bytes of the caches that outlive a request, which are not counted. `images`: those encoded in
        the step. `slack_bytes`, `drawn`: see `MemoryModel`. MLX's peak memory must have been reset before the step."""
        used = self._used_bytes(prefix_bytes)
        self._prefix_bytes = prefix_bytes
        predicted = self._limits.costs.working_bytes(lengths, chunk, images, drawn) + self._held_bytes() + slack_bytes
        if self.calibration.record_step(predicted, used):
            self.mark_dirty()
        return self.calibration.compare()

    def _used_bytes(self, prefix_bytes: int) -> int:
        """Return the measured memory of the step, without weights and `prefix_bytes`: see `calibrate`."""
        return mx.get_peak_memory() - self._limits.costs.resident_bytes - min(prefix_bytes, self._prefix_bytes)

    def count_prefix(self, added_bytes: int) -> None:
        """Count bytes that caches that outlive a request have taken over from rows in this step: see `calibrate`."""
        self._prefix_bytes += added_bytes

    def headroom(self, rows: Iterable[RowEstimate], decoding: Decoding) -> int:
        """Return the bytes left if exactly these rows are active, in the groups that they would decode in; negative if
        they do not fit. Saved caches count as used."""
        rows = in_groups(rows, decoding, self._bounds)
        limits = self._corrected()
        peak_bytes = limits.costs.peak_bytes(group_lengths(rows), images=image_demand(rows))
        return limits.max_bytes - self._held_bytes() - peak_bytes

    def estimate(self, row: Row, group: int | None, images: ImageDemand = NO_IMAGES) -> RowEstimate:
        """Return the estimate of an active row; see `row_estimate`."""
        estimate = row_estimate(self._limits.costs, row.request, group, images, age=row.age)
        if not row.request.grows:
            return estimate
        drawn, most = len(row.answer), row.request.max_tokens
        return estimate._replace(
            max_tokens=row.reserved,
            least=min(most, drawn + BUFFER_TOKENS) if row.must_grow(self.tokens_ahead) else 0,
            likely=min(most, self._lengths.likely(row.request.lane, drawn)),
        )

    def estimates(
        self, active: Iterable[Row], groups: Iterable[tuple[int, Row]], images: Callable[[str], ImageDemand]
    ) -> list[RowEstimate]:
        """Return an estimate for each group of each active row; rows in prefill have none. `groups`: rows with the
        numbers of their groups. `images` returns those of a row that are still to be computed, by its id."""
        numbers: dict[str, list[int]] = {}
        for number, row in groups:
            numbers.setdefault(row.id, []).append(number)
        return [self.estimate(row, group, images(row.id)) for row in active for group in numbers.get(row.id, (None,))]

    def _corrected(self) -> AdmissionLimits:
        """Return the limits with what measurements and failures have taught."""
        limits = replace(self._limits, costs=replace(self._limits.costs, factor=self.calibration.factor))
        return self._shortage.bounded(limits, time.monotonic())

    def run_short(self, alone: Row | None, chunk: int, prefix_bytes: int) -> str | None:
        """Learn that the device had no memory, and drop all saved caches. Returns a message for the client of `alone`,
        the only active row if it has failed, if it has failed in this way before: it is too large. `chunk`: tokens of
        the prompt's chunk that has failed, or 0. `prefix_bytes`: of the caches that outlive a request."""
        for each in self._waiting.values():
            each.drop_cache()
        self._shortage.record(self.reserved_bytes[0] + prefix_bytes, chunk, time.monotonic())
        self.mark_dirty()
        if alone is None:
            return None
        row_bytes = self._corrected().costs.peak_bytes([[alone.length]]) - self._limits.costs.resident_bytes
        if not self._shortage.is_too_large(alone.id, row_bytes):
            return None
        return (
            f"The worker has no memory for this request even alone: it ended at {alone.length:,} tokens. Shorten the "
            "prompt or max_tokens."
        )

    def _requests_with_caches(self) -> list[WaitingRequest]:
        """Return the waiting requests with saved caches, the youngest last: see `requeue`."""
        return [each for each in self._waiting.values() if each.saved_row]

    def _held_bytes(self) -> int:
        """Return the bytes of all saved caches."""
        return sum(each.saved_row.snapshot.nbytes for each in self._waiting.values() if each.saved_row)


def _age(candidate: WaitingRequest) -> int:
    return candidate.age


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


def row_estimate(
    costs: MemoryModel,
    request: GenerationRequest,
    group: int | None,
    images: ImageDemand = NO_IMAGES,
    overtaken: int = 0,
    age: int = 0,
) -> RowEstimate:
    """Return the estimate of a request. `group`: number of the group that it decodes in, or None. Until SpecPrefill
    is decided, the prompt also takes a cache in the draft. `images`: those that are not computed yet; the pixel
    inputs of all images are held, since the row may have to be recomputed. `overtaken`, `age`: see
    `RowEstimate`."""
    undecided = request.specprefill and request.kept_ranges is None
    scored = costs.draft_tokens(len(request.prompt)) if undecided else 0
    group = NO_GROUP if group is None else group
    return RowEstimate(
        request.id,
        request.lane,
        len(request.prompt),
        request.max_tokens,
        group,
        overtaken,
        images=_with_prepared(images, request),
        extra_tokens=scored - request.num_dropped,
        grows=request.grows,
        age=age,
    )
