"""The engine: in each step, prompt chunks within the step's time budget, then one decode of all running rows."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import mlx.core as mx

from worker.engine.active import ActiveRows
from worker.engine.admission.decision import RowEstimate
from worker.engine.admission.plan import AdmissionPlan
from worker.engine.admission_controller import AdmissionController
from worker.engine.batch.groups import Groups
from worker.engine.batch.pending import StepToken
from worker.engine.batch.row import Row
from worker.engine.device import memory_limit, runs_ahead
from worker.engine.isolation import isolate
from worker.engine.joins import Joins
from worker.engine.memory import MAX_ROWS, NO_IMAGES
from worker.engine.model.load import Model
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import PrefillQueue
from worker.engine.prefill.task import ComputedPrompt
from worker.engine.prefix.disk import DiskTier
from worker.engine.prefix.durable import Storing
from worker.engine.speculation.speculator import Speculator
from worker.engine.step.budget import GapLimit
from worker.engine.step.cost import Chunk, Forward
from worker.engine.step_memory import StepMemory
from worker.engine.step_part import step_part
from worker.engine.upstream.mlx_lm import generation_stream
from worker.outcomes import (
    CutShort,
    DraftUse,
    NotStored,
    Outcome,
    PrefixUse,
    Refused,
    RowFailed,
    Sampled,
    StepReport,
    StoreResult,
    frees_memory,
)
from worker.request import GenerationRequest

logger = logging.getLogger("sluice.engine")

_CLEAR_EVERY = 16_384  # tokens computed between two clearings of MLX's buffer cache, whose buffers later steps reuse
_PREFIX_SHARE = 4  # caches that outlive a request get 1 / share of the memory that the weights leave, by default


class Engine:
    """Generates the answers to many requests together. For one thread, the one that loaded the model.

    Requests are added and removed between steps; all forwards run in `step`. After a failed step, rows that lost their
    caches are recomputed from their tokens, so no delivered token is lost; a row that fails alone is removed."""

    def __init__(
        self,
        model: Model,
        *,
        step_s: float,
        rows: int = MAX_ROWS,
        memory: int | None = None,
        prefix_bytes: int | None = None,
        speculator: Speculator | None = None,
        pipelined: bool | None = None,
        open_tier: Callable[[Model], DiskTier] | None = None,
    ) -> None:
        """`step_s`: target seconds of a step. `rows`: most rows active at once; an interactive one may preempt an
        offline one. `memory`: bytes that weights, rows and caches may take together; None: what the device offers.
        `prefix_bytes`: most bytes of the caches that outlive a request, as far as rows leave them; 0 disables these
        caches, None is a share of the memory that the weights leave. `speculator`: decides about drafts; None: none.
        `pipelined`: the device computes a step while the host continues; None: ask the device.
        `open_tier`: return the disk tier of the prefixes; None: there is none."""
        self._costs = speculator.reserving(model.costs) if speculator else model.costs
        self._admission = AdmissionController(self._costs, memory_limit() if memory is None else memory, rows)
        max_prefix_bytes = self._admission.free_bytes // _PREFIX_SHARE if prefix_bytes is None else prefix_bytes
        self._tier = open_tier(model) if open_tier else None
        self._caches = EngineCaches(model, max_prefix_bytes, self._tier)
        self._queried_tokens = self._hit_tokens = 0  # of prompts whose prefill has finished in this step
        self._eos_ids = frozenset(model.tokenizer.eos_token_ids)
        with_head = speculator is not None and speculator.uses_head
        self._step_s = step_s
        self._prefills = PrefillQueue(model, step_s, self._caches, with_head=with_head)
        network = model.head.trunk if with_head and model.head else model.network
        self._running = Groups(network, self._make_room, speculator)
        self._joins = Joins(model.costs, self._prefills, self._running, self._admission, self._caches)
        self._memory = StepMemory(self._costs, self._prefills, self._running, self._admission, self._caches)
        self._active = ActiveRows(self._prefills, self._running, self._admission.mark_dirty)
        self._longest_chunk = 0  # tokens, in this step
        self._encoded_images = NO_IMAGES  # images encoded in this step
        self._computed = self._preempted = 0
        self._reported_at = 0.0  # the end of the last step, and with it of its report
        self._pipelined = runs_ahead() if pipelined is None else pipelined

    def __len__(self) -> int:
        """Return the number of requests that wait, prefill or decode."""
        return len(self._admission) + len(self._active)

    @property
    def needs_step(self) -> bool:
        """True while there are requests, unless all active rows have to wait, and once more after the last request: a
        step releases and reports its memory."""
        return (len(self) > 0 and not self._has_to_wait) or self._admission.needs_decision

    @property
    def _has_to_wait(self) -> bool:
        """True if rows are active, and none can be computed now: see `Stage.ready`."""
        return 0 < len(self._active) == len(self._prefills) and not self._prefills.has_work

    def close(self) -> None:
        """Write prefixes to disk, if they have a disk tier. Blocks. The engine must not be used afterwards."""
        self._caches.close()

    def store_prefix(
        self, namespace: str, tokens: tuple[int, ...], attempt: Storing | None = None
    ) -> StoreResult | Storing:
        """Let the cached prefix of these tokens be written to disk and kept: see `PrefixCache.store`."""
        if self._caches.prefix is None:
            return StoreResult(0, missing=NotStored.NOT_CACHED)
        return self._caches.prefix.store(namespace, tokens, attempt)

    def add(self, request: GenerationRequest) -> None:
        """Add a request, which a later step admits or refuses. Its id must not be in use. Its grammar belongs to the
        engine from now on."""
        self._admission.add(request)
        self._prefills.expect(request)

    def remove(self, id: str) -> None:
        """Remove a request in any state, and free its memory. An unknown id is ignored, since the request may have just
        ended. Blocks if the row was decoding: an interactive row's cache is copied into the prefix cache, and another
        row may be moved to its slot."""
        with mx.stream(generation_stream):
            row = self._active.remove(id)
            if row:
                self._caches.insert(row, self._running.cache_of)
            self._admission.remove(id)
            self._active.sweep()

    def step(self) -> StepReport:
        """Admit requests, prefill within the time budget, and decode a token of every running row, unless none has
        begun its answer and more prompts come first. Prompts come before the decode step, so that rows that have joined
        take part in it; if all rows only have to report their last token, they do so before prompts. Blocks until the
        prompt chunks and the decode step of the call before are computed, and until its own decode step is computed if
        its tokens must not wait; else that runs on. Raises `EngineBroken` after repeated failures."""
        began = time.perf_counter()
        rows, evicted = len(self._running), self._caches.evicted
        self._memory.begin_step()
        self._preempted = self._longest_chunk = self._queried_tokens = self._hit_tokens = 0
        self._encoded_images = NO_IMAGES
        with mx.stream(generation_stream):
            prefilled = (*self._admit(), *self._prefill())
            self._memory.record_rows()
            outcomes = (*prefilled, *self._decode(), *self._finish_step())
            memory = self._memory.compare(self._longest_chunk, self._encoded_images)
        prefix = PrefixUse(self._queried_tokens, self._hit_tokens, self._caches.evicted - evicted, self._caches.nbytes)
        self._active.check()
        if self._tier:
            self._tier.limit_reads(decoding=len(self._running) > 0)
        ended = time.perf_counter()
        if self._caches.prefix:
            self._caches.prefix.show(ended, idle=not len(self))
        self._prefills.observe_gap(ended - self._reported_at)
        self._reported_at = ended
        return StepReport(
            outcomes=outcomes,
            rows=rows,
            seconds=ended - began,
            decode=(len(self._running), self._running.step_s),
            num_waiting=len(self._admission),
            num_preempted=self._admission.num_preempted,
            num_preemptions=self._preempted,
            reserved=self._admission.reserved_bytes,
            memory=memory,
            prefix=prefix,
            drafts=DraftUse.of(outcomes),
        )

    @step_part
    def _admit(self) -> Iterator[Outcome]:
        """Admit waiting requests as far as memory allows, and refuse those that never fit. Rows that outgrow what is
        reserved for them come first."""
        if self._active.must_grow(self._admission.tokens_ahead):
            self._admission.mark_dirty()
        if self._admission.needs_decision:
            groups = {row.id: number for number, row in self._running}
            plan = self._admission.decide([*self._active_estimates(groups)], self._running.decoding())
            yield from self._apply(plan)

    def _apply(self, plan: AdmissionPlan) -> Iterator[Outcome]:
        prefix_bytes = self._caches.nbytes
        self._prefills.spill_rows(self._admission.apply(plan))
        self._running.set_bounds(plan.bounds)
        for id, tokens in plan.growth.cut.items():
            self._active.cut(id, tokens)
            logger.warning("%s: memory holds no longer row; the answer ends after %d tokens", id, tokens)
            yield CutShort(id)
        for id, tokens in plan.growth.reserve.items():
            self._active.reserve(id, tokens)
        for id in plan.preempt:
            yield from self._preempt(id)
        for id in plan.growth.move:
            self._active.move(id)
        self._admission.count_prefix(self._caches.nbytes - prefix_bytes)
        if plan.reservation.must_tighten:
            self._running.tighten()
        self._caches.touch(self._admission.requests(plan.admit))
        self._caches.set_limit(self._admission.free_bytes)  # rows have priority over prefixes
        for id, message in plan.refuse.items():
            yield from self._refuse(id, message)
        for id in plan.admit:
            admitted = self._admission.pop(id)
            if admitted.saved_row:
                self._active.restore(admitted.saved_row, plan.reserve[id])
            else:
                yield from self._active.begin(admitted.request, plan.reserve[id], admitted.age)

    def _refuse(self, id: str, message: str) -> Iterator[Outcome]:
        """Refuse a request that does not fit alone. If it states no limit, and an earlier attempt on a larger worker
        has begun its answer, the answer ends instead."""
        request = self._admission.pop(id).request
        self._prefills.remove(id)
        if not (request.grows and request.resume_tokens):
            yield Refused(id, message)
            return
        logger.warning("%s: memory holds no row as long; the answer ends where it was resumed", id)
        yield CutShort(id)
        yield Sampled(id, None, "length")

    def _active_estimates(self, groups: Mapping[str, int]) -> Iterator[RowEstimate]:
        """Yield the estimates of the active rows. `groups`: group number by row id; rows in prefill have none."""
        for row in self._active:
            yield self._admission.estimate(row, groups.get(row.id), self._prefills.images(row.id))

    def _preempt(self, id: str) -> Iterator[Outcome]:
        """Preempt an active row and requeue it, with its cache if it was decoding and memory allows. The tokens drawn
        so far are delivered first: only then can a state that has read all tokens but the last be used again."""
        if id not in self._prefills:
            yield from self._deliver(*self._running.collect_drawn())
        if id in self._active:  # else that was its last token
            self._prefills.spill_rows(self._admission.requeue(self._active.preempt(id)))
            self._preempted += 1
            logger.info("%s: preempted", id)

    @step_part
    def _decode(self) -> Iterator[Outcome]:
        """Decode the next token of every running row."""
        running = self._running
        if not running.started and (not len(running) or self._delays_first_step(running.joined_s)):
            return
        if not running.ending:
            delivered = running.step(GapLimit(self._step_s, time.perf_counter() - self._reported_at))
            yield from running.verifications.drafts
            yield from self._deliver(*delivered)
        if running.ending or self._reports_at_once():
            yield from self._deliver(*running.collect_drawn())

    def _reports_at_once(self) -> bool:
        """Return True if the tokens of the running step must not wait for the prompts of the next one; nor for its
        launch, if that takes as long as the step, and the step draws a first token or is slow."""
        if self._prefills.has_work or self._pipelined:
            return self._prefills.has_work
        return self._running.starting or self._running.step_s > self._step_s

    def _deliver(self, step_tokens: Sequence[StepToken], failed: Sequence[Row]) -> Iterator[Outcome]:
        """Yield the outcomes of these tokens and of rows that have failed alone, and remove the rows that end."""
        self._computed += len(step_tokens)
        at = time.monotonic()
        for step_token in step_tokens:
            row, token, finite, logprobs, accepted = step_token
            if not finite or token in self._eos_ids or len(row.answer) + 1 == row.request.max_tokens:
                yield from self._end_row(step_token, at)
                continue
            row.deliver(token)
            yield Sampled(row.request.id, token, None, logprobs, at, accepted)
        self._active.sweep()
        for row in failed:
            yield self._active.fail(row.id)
        if step_tokens:
            self._active.reset_failures()

    def _delays_first_step(self, joined_s: float) -> bool:
        """Return True if rows whose answers have not begun wait for more prompts. If no prompt is left, they wait for
        the next step, which admits what has arrived during this one. `joined_s`: seconds since the first joined."""
        computed_last = self._longest_chunk > 0 and not self._prefills.has_work
        return computed_last or self._prefills.delays_first_step(self._running, joined_s)

    def _end_row(self, step_token: StepToken, at: float) -> Iterator[Outcome]:
        """Yield the outcome of a row's last token, before anything that may fail, since the answer contains it from
        then on."""
        row, token = step_token.row, step_token.token
        if not step_token.finite:
            logger.error("%s: non-finite logits after %d tokens", row.id, row.length)
            self._active.end(row.id)
            yield RowFailed(row.id)
            self._caches.forget_non_finite(row)
        elif token in self._eos_ids:
            self._admission.observe_answer(row.request, len(row.answer))
            self._active.end(row.id)
            yield Sampled(row.id, None, "stop", at=at)
            self._caches.insert(row, self._running.cache_of, token)
        else:
            row.deliver(token)
            self._admission.observe_answer(row.request, len(row.answer))
            self._active.end(row.id)
            yield Sampled(row.id, token, "length", step_token.logprobs, at)
            self._caches.insert(row, self._running.cache_of)

    @step_part
    def _prefill(self) -> Iterator[Outcome]:
        """Compute the planned chunks. Rows whose prompt is computed join the running rows."""
        if self._running.ending:  # the last tokens of all rows are reported first, since no decode step is left to do
            return
        if not self._prefills.has_work:
            return
        self._running.wait()
        elapsed_s = time.perf_counter() - self._reported_at
        self._prefills.begin_step(self._running.forward_s)
        for forward in self._prefills.plan(self._running, elapsed_s, self._admission.longest_chunk):
            yield from self._compute(forward)

    def _compute(self, forward: Forward) -> Iterator[Outcome]:
        """Compute a forward of one or several prompts."""
        if len(forward.chunks) > 1:
            tokens = self._prefills.compute_together(forward, self._admission.longest_chunk)
            self._longest_chunk = max(self._longest_chunk, tokens)
        joining = list[ComputedPrompt]()
        for chunk in forward.chunks:
            with isolate(f"{chunk.id}: prefill") as attempt:  # of one prompt, so only this request fails
                yield from self._advance(chunk)
                if chunk.joins and (task := self._prefills.pop_computed(chunk.id)):
                    joining.append(task.finish())
            if attempt.failed:
                yield self._active.fail(chunk.id)
        yield from self._start_decoding(joining)

    def _advance(self, chunk: Chunk) -> Iterator[Outcome]:
        """Compute a chunk of one prompt."""
        advanced = self._prefills.advance(chunk)
        yield from advanced.outcomes
        self._computed += advanced.tokens
        self._encoded_images += advanced.images
        self._longest_chunk = max(self._longest_chunk, advanced.chunk)
        if any(map(frees_memory, advanced.outcomes)):
            self._admission.mark_dirty()

    def _start_decoding(self, computed: list[ComputedPrompt]) -> Iterator[Outcome]:
        """Let rows join the running rows. Empties the list."""
        prompts = [(each.joining.row, each.tokens, each.cached) for each in computed]
        failed = self._joins.join(computed)
        for row, tokens, cached in prompts:
            if row in failed:
                yield self._active.fail(row.id)
            else:
                self._queried_tokens += tokens
                self._hit_tokens += cached

    def _make_room(self, groups: list[list[Row]]) -> bool:
        """Limit the prefix cache to the memory that all active rows leave with these groups, which may evict prefixes.
        Returns False, and changes nothing, if the rows do not fit."""
        numbers = {row.id: number for number, group in enumerate(groups) for row in group}
        headroom = self._admission.headroom(self._active_estimates(numbers), self._running.decoding(groups))
        if headroom < 0:
            return False
        self._caches.set_limit(min(headroom, self._admission.free_bytes))
        return True

    @step_part
    def _finish_step(self) -> tuple[Outcome, ...]:
        """Rebalance the groups, and clear MLX's buffer cache every `_CLEAR_EVERY` computed tokens. No outcomes."""
        self._running.rebalance()
        if self._computed >= _CLEAR_EVERY:
            self._computed = 0
            mx.clear_cache()
        return ()
