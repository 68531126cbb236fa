"""The engine: in each step, prompt chunks within the step's time budget, then one decode of all running rows.
admit      rows that outgrow their reservation first, then waiting requests that memory has room for
prefill    plan the prompts' chunks, compute them, and let rows whose prompt is computed join the running ones
decode     a token of every running row, or several that verify drafts; rows that end leave
report     compare the step's memory with its prediction, and return what has become of each request"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import mlx.core as mx

from worker.engine.admission.plan import AdmissionPlan
from worker.engine.admission_controller import AdmissionController, WaitingRequest
from worker.engine.batch.decode_batch import ComputedRow
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row, StepToken
from worker.engine.device import memory_limit, runs_ahead
from worker.engine.isolation import EngineBroken, failures, isolate
from worker.engine.memory import StepCounts
from worker.engine.model.load import Model
from worker.engine.options import EngineOptions
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import PrefillQueue
from worker.engine.prefix.disk import DiskPrefixes, Storing
from worker.engine.speculation.speculator import Speculator
from worker.engine.step.cost import Forward, PromptChunk
from worker.engine.step.planner import GapLimit
from worker.engine.upstream.mlx_lm import generation_stream
from worker.host.courtesy import Reclaim, Throttle
from worker.outcomes import (
    Admitted,
    CutShort,
    DraftUse,
    Outcome,
    Preempted,
    Refused,
    RowFailed,
    Sampled,
    StepReport,
    StoreResult,
    frees_memory,
)
from worker.request import GenerationRequest

logger = logging.getLogger("sluice.engine")


class Engine:
    """Generates the answers to many requests together. For one thread, the one that loaded the model.

    Requests are added and removed between steps; all forwards run in `step`. An active row is in prefill or decodes, or
    has lost its cache by a failure and is recomputed from its tokens, so no delivered token is lost; a row that fails
    alone is removed."""

    def __init__(
        self,
        model: Model,
        options: EngineOptions,
        *,
        speculator: Speculator | None = None,
        open_disk: Callable[[Model], DiskPrefixes] | None = None,
    ) -> None:
        """`speculator`: decides about drafts; None: none. `open_disk`: return the prefixes on disk; None:
        there are none."""
        self._options = options
        costs = speculator.reserving(model.costs) if speculator else model.costs
        self._row_bytes = model.costs.row_bytes
        memory = memory_limit() if options.memory is None else options.memory
        self._admission = AdmissionController(costs, memory, options.rows)
        self._disk = open_disk(model) if open_disk else None
        prefix_bytes = options.prefix_bytes  # by default, a quarter of the memory that the weights leave
        prefix_bytes = self._admission.free_bytes // 4 if prefix_bytes is None else prefix_bytes
        self._caches = EngineCaches(model, prefix_bytes, self._disk)
        self._eos_ids = frozenset(model.tokenizer.eos_token_ids)
        with_head = speculator is not None and speculator.uses_head
        self._prefills = PrefillQueue(model, options, self._caches, with_head=with_head)
        network = model.head.trunk if with_head and model.head else model.network
        self._running = Groups(network, self._evict_for, speculator)
        self._active: dict[str, Row] = {}  # from admission to their last token, the oldest first
        self._swept = True  # no row was removed since the last sweep
        self._failures = 0  # without a decoded token between them
        self._memory_failures = failures.memory  # that were handled
        self._now = StepCounts()
        self._computed = 0  # tokens, since MLX's buffer cache was cleared
        self._reported_at = 0.0  # the end of the last step, and with it of its report
        self._throttle = Throttle()
        self._pipelined = runs_ahead() if options.pipelined is None else options.pipelined

    def __len__(self) -> int:
        """Return the number of requests that wait, prefill or decode."""
        return len(self._admission) + len(self._active)

    @property
    def needs_step(self) -> bool:
        """True while there are requests, unless all active rows have to wait (see `Stage.ready`), and once more after
        the last request: a step releases and reports its memory."""
        all_wait = 0 < len(self._active) == len(self._prefills) and not self._prefills.has_work
        begins = len(self._active) > 0 or (len(self._admission) > 0 and self._admission.may_begin)
        return (begins and not all_wait) or self._admission.needs_decision

    @property
    def share(self) -> float:
        """Share of the time that steps may take now."""
        active = (row.request.lane for row in self._active.values())
        return self._throttle.share_for(chain(active, self._admission.lanes))

    def set_throttle(self, throttle: Throttle) -> None:
        """Set what is left to others. Memory is given back in the next step."""
        self._throttle = throttle
        self._caches.give_back(throttle.reclaim)
        self._admission.give_back(throttle.reclaim)
        self._computed = 16_384  # so that it clears MLX's buffer cache

    def close(self) -> None:
        """Write prefixes to disk, if they have a disk. Blocks. The engine must not be used afterwards."""
        self._caches.close()

    def store_prefix(
        self, namespace: str, tokens: tuple[int, ...], attempt: Storing | None = None
    ) -> StoreResult | Storing:
        """Let the cached prefix of these tokens be written to disk and kept: see `PrefixCache.store`."""
        return self._caches.store(namespace, tokens, attempt)

    def add(self, request: GenerationRequest) -> None:
        """Add a request, which a later step admits or refuses. Its id must be new. The engine owns its grammar now."""
        self._admission.add(request)
        self._prefills.expect(request)

    def remove(self, id: str) -> None:
        """Remove a request in any state, and free its memory. An unknown id is ignored, since the request may have just
        ended. Blocks if the row was decoding: an interactive row's cache is copied into the prefix cache, and another
        row may be moved to its slot."""
        with mx.stream(generation_stream):
            if row := self._drop(id):
                self._caches.insert(row, self._running.cache_of)
            self._admission.remove(id)
            self._sweep()

    def step(self) -> StepReport:
        """Compute one step. Prompts come before the decode step, so that rows that have joined take part in it; none is
        decoded while no answer has begun and more prompts come first. Blocks until the prompt chunks and the decode
        step of the call before are computed, and until its own decode step is computed if its tokens must not wait;
        else that runs on. Raises `EngineBroken` after repeated failures."""
        self._now = step = StepCounts(time.perf_counter(), len(self._running), self._caches.evicted)
        if self.share < 1.0:
            self._reported_at = step.began  # a rest is no part of a gap
        mx.reset_peak_memory()
        with mx.stream(generation_stream):
            outcomes = [*self._part(self._admit), *self._part(self._prefill)]
            # Before any row leaves: at no other time of the step do more take memory.
            step.lengths = [*self._running.lengths, *([length] for length in self._prefills.lengths)]
            step.buffers = self._running.buffers
            outcomes += [*self._part(self._decode), *self._part(self._tidy)]
            memory = self._admission.compare(step.demand(self._running.speculator.tokens), self._caches.nbytes)
        if self._failures >= 10:  # ten in a row are not the fault of single rows
            raise EngineBroken(f"{self._failures} failures without a decoded token between them")
        return self._report(step, outcomes, memory)

    def _part(self, work: Callable[[], Iterable[Outcome]]) -> Iterator[Outcome]:
        """Do a part of the step, and yield its outcomes. If it fails, the outcomes so far are delivered, and decoding
        rows lose their caches at most. Rows that were lost before are recomputed first."""
        yield from self._recover()
        with isolate("a step") as attempt:
            yield from work()
        if attempt.failed:
            self._lose_decoding()

    # Admit

    def _admit(self) -> Iterator[Outcome]:
        """Admit waiting requests as far as memory allows, and refuse those that never fit. Rows that outgrow what is
        reserved for them come first."""
        if any(row.must_grow(self._admission.tokens_ahead) for row in self._active.values()):
            self._admission.mark_dirty()
        if self._admission.needs_decision:
            for id in self._admission.to_preempt(self._active.values()):
                yield from self._preempt(id)
            active = self._admission.estimates(self._active.values(), self._running, self._prefills.images)
            yield from self._apply(self._admission.decide(active, self._running.decoding()))

    def _apply(self, plan: AdmissionPlan) -> Iterator[Outcome]:
        prefix_bytes = self._caches.nbytes
        self._prefills.spill_rows(self._admission.apply(plan))
        self._running.set_bounds(plan.bounds)
        for id, tokens in plan.growth.cut.items():
            self._active[id].cut(tokens)
            logger.warning("%s: memory holds no longer row; the answer ends after %d tokens", id, tokens)
            yield CutShort(id)
        for id, tokens in plan.growth.reserve.items():
            self._active[id].reserve(tokens)
        for id in plan.preempt:
            yield from self._preempt(id)
        for row in [self._active[id] for id in plan.growth.move if id in self._active]:
            self._running.move(row)
        self._admission.count_prefix(self._caches.nbytes - prefix_bytes)
        if plan.reservation.must_tighten or self._throttle.reclaim >= Reclaim.OFFLINE_ROWS:
            self._running.tighten()
        self._caches.touch(self._admission.requests(plan.admit))
        self._caches.set_limit(self._admission.free_bytes)  # rows have priority over prefixes
        for id, message in plan.refuse.items():
            yield from self._refuse(id, message)
        for id in plan.admit:
            admitted = self._admission.pop(id)
            yield Admitted(id, time.monotonic())
            if saved := admitted.saved_row:
                saved.row.reserve(plan.reserve[id])
                self._insert(saved.row)
                self._running.restore(saved)
            else:
                yield from self._begin(admitted.request, plan.reserve[id], admitted.age)

    def _refuse(self, id: str, message: str) -> Iterator[Outcome]:
        """Refuse a request that does not fit alone. If it states no limit, and an earlier attempt on a larger worker
        has begun its answer, the answer ends instead."""
        request = self._admission.pop(id).request
        self._prefills.remove(id)
        if not (request.grows and request.resume_tokens):
            yield Refused(id, message)
            return
        logger.warning("%s: memory holds no row as long; the answer ends where it was resumed", id)
        yield from (CutShort(id), Sampled(id, None, "length"))

    def _preempt(self, id: str) -> Iterator[Outcome]:
        """Preempt an active row and requeue it, with its cache if it was decoding and memory allows. The tokens drawn
        so far are delivered first: only then can a state that has read all tokens but the last be used again."""
        if id not in self._prefills:
            yield from self._deliver(*self._running.collect_drawn())
        if not (row := self._active.get(id)):  # that was its last token
            return
        decodes = row in {each for _, each in self._running}  # else it is in prefill, or has lost its cache
        saved_row = self._running.preempt(row) if decodes else None
        self._prefills.spill(id)
        self._drop(id)
        waiting = WaitingRequest(row.resumable_request(), saved_row, preempted=True, age=row.age)
        self._prefills.spill_rows(self._admission.requeue(waiting))
        self._now.preempted += 1
        yield Preempted(id)
        logger.info("%s: preempted", id, extra={"job": id.rpartition("#")[0]})

    # Prefill

    def _prefill(self) -> Iterator[Outcome]:
        """Compute the planned chunks. Rows whose prompt is computed join the running rows."""
        if self._running.ending or not self._prefills.has_work:  # the last tokens of all rows are reported first
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
            self._now.longest_chunk = max(self._now.longest_chunk, tokens)
        joining, failed = list[ComputedRow](), list[PromptChunk]()
        for chunk in forward.chunks:
            with isolate(f"{chunk.id}: prefill") as attempt:  # of one prompt, so only this request fails
                advanced = self._prefills.advance(chunk)
                yield from advanced.outcomes
                self._computed += advanced.tokens
                self._now.images += advanced.images
                self._now.longest_chunk = max(self._now.longest_chunk, advanced.chunk)
                if any(map(frees_memory, advanced.outcomes)):
                    self._admission.mark_dirty()
                if chunk.joins and (task := self._prefills.pop_computed(chunk.id)):
                    joining.append(task.finish())
            if attempt.failed:
                failed.append(chunk)
        self._running.excuse_failures()
        yield from self._failed([chunk.id for chunk in failed], max((chunk.tokens for chunk in failed), default=0))
        yield from self._join(joining)

    def _join(self, computed: list[ComputedRow]) -> Iterator[Outcome]:
        """Let rows join the running ones: together, or one by one if that fails or memory is short. Pops all."""
        # While they are copied, the caches of all take memory; that of one is reserved.
        caches_bytes = (len(computed) - 1) * self._row_bytes(max((each.tokens for each in computed), default=0))
        if len(computed) > 1 and caches_bytes <= self._admission.free_bytes - self._caches.nbytes:
            with isolate(f"the join of {len(computed)} rows"):
                self._add(computed)
        running = {row for _, row in self._running}
        while computed:  # each cache is freed when its row has joined
            each = computed.pop(0)
            row = each.row
            if row not in running:
                with isolate(f"{row.id}: join") as attempt:
                    self._add([each])
                if attempt.failed:
                    yield from self._failed([row.id])
                    continue
            self._now.queried_tokens += each.tokens
            self._now.hit_tokens += each.cached
            self._caches.mark(row.request)

    def _add(self, computed: Sequence[ComputedRow]) -> None:
        """Add rows to the running ones, and measure what that takes."""
        growth = max(self._running.join_copy_bytes(each.tokens) for each in computed)
        began = time.perf_counter()
        self._running.add(computed)
        row_s = (time.perf_counter() - began) / len(computed)
        for each in computed:
            self._prefills.observe_join(each.tokens, growth // len(computed), row_s)
            if each.row.request.images:
                self._admission.mark_dirty()  # the features of its images are released

    # Decode

    def _decode(self) -> Iterator[Outcome]:
        """Decode the next token of every running row."""
        running = self._running
        if not running.started and (not len(running) or self._delays_first_step()):
            return
        if not running.ending:
            delivered = running.step(GapLimit(self._options.step_s, time.perf_counter() - self._reported_at))
            yield from running.speculator.drafts
            yield from self._deliver(*delivered)
        if running.ending or self._reports_at_once():
            yield from self._deliver(*running.collect_drawn())

    def _delays_first_step(self) -> bool:
        """Return True if rows whose answers have not begun wait for more prompts. If no prompt is left, they wait for
        the next step, which admits what has arrived during this one."""
        computed_last = self._now.longest_chunk > 0 and not self._prefills.has_work
        return computed_last or self._prefills.delays_first_step(self._running, self._running.joined_s)

    def _reports_at_once(self) -> bool:
        """Return True if the tokens of the running step must not wait for the prompts of the next one; nor for its
        launch, if that takes as long as the step, and the step draws a first token or is slow."""
        launch_delays = self._running.starting or self._running.step_s > self._options.step_s
        return self._prefills.has_work or (launch_delays and not self._pipelined)

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
        self._sweep()
        yield from self._failed([row.id for row in failed])
        if step_tokens:
            self._failures = 0

    def _end_row(self, step_token: StepToken, at: float) -> Iterator[Outcome]:
        """Yield the outcome of a row's last token, before anything that may fail, since the answer contains it from
        then on."""
        row, token = step_token.row, step_token.token
        is_eos = token in self._eos_ids
        if not step_token.finite:
            logger.error("%s: non-finite logits after %d tokens", row.id, row.length)
            self._end(row.id)
            yield RowFailed(row.id)
            self._caches.forget_non_finite(row)
            return
        if not is_eos:
            row.deliver(token)
        self._admission.observe_answer(row.request, len(row.answer))
        self._end(row.id)
        done = Sampled(row.id, token, "length", step_token.logprobs, at)
        yield Sampled(row.id, None, "stop", at=at) if is_eos else done
        self._caches.insert(row, self._running.cache_of, *([token] if is_eos else []))

    # Tidy, compare, report

    def _tidy(self) -> tuple[Outcome, ...]:
        """Rebalance the groups, and clear MLX's buffer cache now and then, not often: later steps reuse the buffers."""
        self._running.rebalance()
        if self._computed >= (1_024 if self._throttle.reclaim else 16_384):  # tokens
            self._computed = 0
            mx.clear_cache()
        return ()

    def _evict_for(self, groups: list[list[Row]]) -> bool:
        """Limit the prefix cache to what all rows leave with these groups, of which one that moves may be in two. May
        evict prefixes. Returns False, and changes nothing, if the rows do not fit."""
        numbered = ((number, row) for number, group in enumerate(groups) for row in group)
        rows = self._admission.estimates(self._active.values(), numbered, self._prefills.images)
        headroom = self._admission.headroom(rows, self._running.decoding(groups))
        if headroom < 0:
            return False
        self._caches.set_limit(min(headroom, self._admission.free_bytes))
        return True

    def _report(self, step: StepCounts, outcomes: Sequence[Outcome], memory: tuple[int, int] | None) -> StepReport:
        """End the step, and return its report."""
        if self.share < 1.0:
            self._running.wait()  # else it would compute during the rest
        ended = time.perf_counter()
        if self._disk:
            self._disk.store.reader.limit_reads(decoding=len(self._running) > 0)
            self._disk.show(ended, idle=not len(self))
        self._prefills.observe_gap(ended - self._reported_at)
        self._reported_at = ended
        return StepReport(
            outcomes=(*outcomes,),
            rows=step.rows,
            seconds=ended - step.began,
            decode=self._running.take_measured(),
            num_waiting=len(self._admission),
            num_preempted=self._admission.num_preempted,
            num_preemptions=step.preempted,
            num_out_of_memory=step.out_of_memory,
            reserved=self._admission.reserved_bytes,
            memory=memory,
            prefix=self._caches.use(step.queried_tokens, step.hit_tokens, self._caches.evicted - step.evicted),
            prompt_cost=self._prefills.token_cost,
            drafts=DraftUse.of(outcomes),
        )

    # Active rows, and what becomes of them after a failure

    def _begin(
        self, request: GenerationRequest, reserved: int, age: int, recomputed: bool = False
    ) -> Iterator[Outcome]:
        """Start the prefill of a request. If that fails, no other is affected. `reserved`, `age`: see `Row`."""
        with isolate(f"{request.id}: starting its prefill") as attempt:
            row = Row.of(request, reserved=reserved, recomputed=recomputed)
            row.age = age
            self._prefills.add(row)
            self._insert(row)
        if attempt.failed:
            yield from self._failed([request.id])

    def _insert(self, row: Row) -> None:
        """Add an active row in its place by age."""
        self._active = dict(sorted((self._active | {row.id: row}).items(), key=lambda item: item[1].age))

    def _drop(self, id: str) -> Row | None:
        """Remove and return an active row; None for an unknown id. If it decodes, `_sweep` frees its memory."""
        self._prefills.remove(id)
        self._swept = False
        if row := self._active.pop(id, None):
            self._running.speculator.forget(row)
        return row

    def _end(self, id: str) -> None:
        """Remove a row that has drawn its last token. `_sweep` frees its memory."""
        self._drop(id)
        self._admission.mark_dirty()

    def _sweep(self) -> None:
        """Free the memory of decoding rows that have ended or were removed. Blocks."""
        if not self._swept:
            self._swept = True
            self._running.remove({row for _, row in self._running if row.id not in self._active})

    def _failed(self, ids: Sequence[str], chunk: int = 0) -> Iterator[Outcome]:
        """Remove rows that have caused failures, or let them wait if it was a lack of memory. `chunk`: most tokens."""
        rows = [self._active[id] for id in ids if id in self._active]
        if rows and failures.memory != self._memory_failures:
            return self._retreat(rows, chunk)
        for id in ids:
            self._end(id)
        self._failures += len(ids)
        return map(RowFailed, ids)

    def _retreat(self, failed: Sequence[Row], chunk: int = 0) -> Iterator[Outcome]:
        """Free memory, since the device had none, and let the rows that have lost their caches wait until admission,
        which learns from it, has room for them. A row that fails alone once more ends. `chunk`: see `_failed`."""
        self._memory_failures, prefix_bytes = failures.memory, self._caches.nbytes
        lost = {*failed, *self._running.pop_lost()}
        rows = [row for row in self._active.values() if row in lost]
        alone = rows[0] if rows and len(self._active) == 1 else None
        self._caches.set_limit(0 if alone else prefix_bytes // 2)
        refusal = self._admission.run_short(alone, chunk, prefix_bytes)
        for row in rows:
            self._drop(row.id)
            self._admission.requeue(WaitingRequest(row.resumable_request(), preempted=True, age=row.age))
        mx.clear_cache()
        self._now.out_of_memory += len(rows)
        yield from (Preempted(row.id) for row in rows)
        logger.warning("no memory: the caches of %d rows were given up, which wait for room", len(rows))
        if alone and refusal:
            self._failures += 1
            yield from self._refuse(alone.id, refusal)

    def _lose_decoding(self) -> None:
        """Give up the caches of all decoding rows, after a failure that any of them may have caused."""
        self._failures += not len(self._running)  # otherwise `_recover` counts it
        self._running.clear()
        self._admission.mark_dirty()

    def _recover(self) -> Iterator[Outcome]:
        """Recompute the rows that have lost their caches. Each decodes in a group of its own until it has produced a
        token, so a row that causes the failure fails alone."""
        if failures.memory != self._memory_failures:
            yield from self._retreat([])
        lost = {*self._running.pop_lost()}
        rows = [row for row in self._active.values() if row in lost]
        self._failures += bool(rows)
        for row in rows:
            yield from self._begin(row.resumable_request(), row.reserved, row.age, recomputed=True)
