"""The engine: one decode of all running rows, then prompt chunks up to the step's budget, again and again.

Used by one thread only, the one that loaded the model.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from worker.engine.admission import AdmissionController, WaitingRequest
from worker.engine.batch.decode_batch import StepToken
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.device import memory_limit
from worker.engine.model.load import Model
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import AnyPrefill, PrefillQueue
from worker.engine.upstream.mlx_lm import generation_stream
from worker.schedule.admission import Admit, Refuse
from worker.schedule.admission import RowEstimate as Admitted
from worker.schedule.memory import MAX_ROWS, NO_IMAGES
from worker.schedule.outcomes import (
    Encoded,
    Outcome,
    Refused,
    RowFailed,
    Sampled,
    SpecPrefillApplied,
    SpecPrefillSkipped,
)
from worker.schedule.report import PrefixUse, StepReport
from worker.schedule.request import GenerationRequest

logger = logging.getLogger("sluice.engine")

_CLEAR_EVERY = 16_384  # tokens computed; until then the buffers of one step serve the next
_PREFIX_SHARE = 4  # of the memory beside the model, one part
_MOST_FAILURES = 10  # in a row; then it is not the rows


class EngineBroken(Exception):
    """Several steps in a row have failed, so the rows are not the cause."""


class Engine:
    def __init__(
        self,
        model: Model,
        *,
        step_s: float,
        rows: int = MAX_ROWS,
        memory: int | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """`rows`: at once, at the most; an interactive one takes the place of an offline one. `memory`: bytes that all
        of it may take; None is what the device offers. `prefix_bytes` of them at most are for prefixes, as far as rows
        leave them; 0 keeps none, and None is a share of what is beside the model."""
        self._admission = AdmissionController(model.costs, memory or memory_limit(), rows)
        most = self._admission.free_bytes // _PREFIX_SHARE if prefix_bytes is None else prefix_bytes
        self._caches = EngineCaches(model, most)
        self._queried = self._hit = 0  # tokens, in this step
        self._active: dict[str, Row] = {}  # in the order of admission
        self._ends = frozenset(model.tokenizer.eos_token_ids)
        self._prefills = PrefillQueue(model, step_s, self._caches)
        self._running = Groups(model.network, self._fits)
        self._chunk, self._encoded_images = 0, NO_IMAGES  # the longest chunk of this step, in tokens, and its images
        self._failures = self._computed = self._preempted = 0
        self._decoding_since = 0.0

    def __len__(self) -> int:
        """Number of requests that wait, prefill or decode."""
        return len(self._admission) + len(self._active)

    def add(self, sequence: GenerationRequest) -> None:
        self._admission.add(sequence)

    def remove(self, sequence_id: str) -> None:
        """Frees the row at once, in whatever state; an unknown id is one that has just ended."""
        with mx.stream(generation_stream):
            self._prefills.remove(sequence_id)
            row = self._active.pop(sequence_id, None)
            if row and not row.awaiting_first_step:
                self._cache_prefix(row)
            self._admission.remove(sequence_id)
            self._drop_inactive()

    def step(self) -> StepReport:
        """Raises `EngineBroken`."""
        began, rows, outcomes = time.perf_counter(), len(self._running), list[Outcome]()
        mx.reset_peak_memory()
        self._preempted = self._chunk = self._queried = self._hit = 0
        self._encoded_images = NO_IMAGES
        evicted = self._caches.evicted
        with mx.stream(generation_stream):
            for part in (self._admit, self._decode, self._prefill, self._finish_step):
                self._recover(outcomes)
                try:
                    part(outcomes)
                except EngineBroken:
                    raise
                except Exception:  # nothing of it may cost more than what the rows can compute again
                    logger.exception("a step failed")
                    self._running.clear()
                    self._admission.mark_dirty()
            memory = self._look()
        return StepReport(
            outcomes=tuple(outcomes),
            rows=rows,
            seconds=time.perf_counter() - began,
            num_waiting=len(self._admission),
            num_preempted=self._admission.num_preempted,
            num_preemptions=self._preempted,
            reserved=self._admission.reserved_bytes,
            memory=memory,
            prefix=self._prefix_use(evicted),
        )

    def _look(self) -> tuple[int, int] | None:
        unneeded = self._admission.slack_bytes(self._running.lengths, self._running.buffers)
        chunk = max(self._chunk, len(self._running))  # a row that decodes takes a token's share
        return self._admission.calibrate(self._lengths(), chunk, self._caches.nbytes, self._encoded_images, unneeded)

    def _prefix_use(self, evicted: int) -> PrefixUse:
        """`evicted` before the step."""
        return PrefixUse(self._queried, self._hit, self._caches.evicted - evicted, self._caches.nbytes)

    def _admit(self, outcomes: list[Outcome]) -> None:
        """Admit waiting requests as far as memory allows, and refuse those that never fit."""
        if not self._admission.needs_decision:
            return
        groups = {row.id: number for number, row in self._running}
        decided = self._admission.decide([*self._active_estimates(groups)], self._running.decoding())
        self._running.part(self._admission.bounds)
        coming = [
            (candidate.request, decision.preempt) for candidate, decision in decided if isinstance(decision, Admit)
        ]
        for _, park in coming:
            for id in park:
                self._preempt(id)
        if self._admission.crowded:
            self._running.tighten()
        self._caches.touch(sequence for sequence, _ in coming)
        self._caches.set_limit(self._admission.free_bytes)  # rows come before prefixes
        for candidate, decision in decided:
            match decision:
                case Admit():
                    self._admission.pop(candidate)
                    self._start(candidate, outcomes)
                case Refuse(sentence):
                    self._admission.pop(candidate)
                    outcomes.append(Refused(candidate.request.id, sentence))

    def _active_estimates(self, groups: Mapping[str, int]) -> Iterator[Admitted]:
        """Yield the estimates of the active rows. `groups`: group number by row id; rows in prefill have none."""
        for id, row in self._active.items():
            yield self._admission.estimate(row.request, groups.get(id), self._prefills.images(id))

    def _start(self, candidate: WaitingRequest, outcomes: list[Outcome]) -> None:
        if candidate.saved_row is None:
            self._begin(candidate.request, outcomes)
        else:
            self._active[candidate.request.id] = candidate.saved_row.row
            self._running.restore(candidate.saved_row)

    def _begin(self, sequence: GenerationRequest, outcomes: list[Outcome], *, suspect: bool = False) -> None:
        with self._isolate(sequence.id, outcomes):
            row = Row.of(sequence, suspect=suspect)
            self._prefills.add(row)
            self._active[row.id] = row

    def _preempt(self, id: str) -> None:
        """Preempt an active row and requeue it, with its cache if it was decoding and memory allows."""
        row = self._active[id]
        parked = None if id in self._prefills else self._running.preempt(row)
        del self._active[id]
        self._prefills.remove(id)
        self._admission.requeue(WaitingRequest(row.resumable_request(), parked, preempted=True))
        self._preempted += 1
        logger.info("%s is parked", id)

    def _decode(self, outcomes: list[Outcome]) -> None:
        """Decode the next token of every running row."""
        if not len(self._running):
            return
        idle, began = self._running.idle, time.perf_counter()
        told, failed = self._running.step()
        # A device that was busy began with this step when it had computed the tokens of the last.
        self._decoding_since = began if idle else time.perf_counter()
        self._computed += len(told)
        at = time.monotonic()
        for news in told:
            self._handle_token(news, at, outcomes)
        self._drop_inactive()
        for rows in failed:
            if len(rows) == 1:
                self._fault(rows[0].id, outcomes)
            else:
                self._recompute(rows, outcomes)
        if told:
            self._failures = 0

    def _handle_token(self, news: StepToken, at: float, outcomes: list[Outcome]) -> None:
        row = news.row
        row.suspect = False
        if not news.finite:
            logger.error("%s: the model gave no numbers after %d tokens", row.id, row.length)
            self._caches.forget_non_finite(row)
            outcomes.append(RowFailed(row.id))
            self._end(row.id)
            return
        if news.token in self._ends:
            sampled = Sampled(row.id, None, "stop", at=at)
        else:
            row.answer.append(news.token)
            ended = len(row.answer) >= row.request.max_tokens
            sampled = Sampled(row.id, news.token, "length" if ended else None, news.logprobs, at)
        outcomes.append(sampled)
        if sampled.finish_reason:
            self._cache_prefix(row, *([news.token] if sampled.token is None else []))
            self._end(row.id)

    def _cache_prefix(self, row: Row, *ending: int) -> None:
        """Its prompt and answer, for those who begin with them. `ending`: what else it was fed."""
        # A line of a file has no next turn, and what was left out is missing to others.
        if (prefix := self._caches.prefix) and row.request.lane == "interactive" and not row.num_dropped:
            for cache, place in self._running.cache_of(row):
                prefix.insert(row.request.namespace, row.cache_key(*ending), cache, place)

    def _drop_inactive(self) -> None:
        self._running.remove({row for _, row in self._running if row.id not in self._active})

    def _end(self, id: str) -> None:
        self._active.pop(id, None)
        self._admission.mark_dirty()

    def _fault(self, id: str, outcomes: list[Outcome]) -> None:
        outcomes.append(RowFailed(id))
        self._end(id)
        self._failed()

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise EngineBroken(f"{self._failures} steps in a row have failed")

    def _recover(self, outcomes: list[Outcome]) -> None:
        """Recompute active rows that a failed step has lost: those that neither prefill nor decode."""
        if len(self._prefills) + len(self._running) < len(self._active):
            there = [*self._prefills.rows, *(row for _, row in self._running)]
            self._recompute([row for row in self._active.values() if row not in there], outcomes)

    def _recompute(self, rows: Iterable[Row], outcomes: list[Outcome]) -> None:
        """Recompute rows from their tokens, since their caches are lost. Each decodes in a group of its own until it
        has produced a token, so a row that causes the failure fails alone."""
        self._failed()
        for row in rows:
            self._begin(row.resumable_request(), outcomes, suspect=True)

    def _prefill(self, outcomes: list[Outcome]) -> None:
        """Chunks of the prompts that the plan picks; those that are through join the running rows."""
        if len(self._prefills):
            self._running.wait()
        if self._running.step_s is not None:  # now, since the time for prompts follows from it
            self._prefills.budget.observe_decode(self._running.step_s)
        if not len(self._prefills):
            return
        self._prefills.budget.forward_s = self._running.forward_s
        elapsed_s = time.perf_counter() - self._decoding_since
        for chunk in self._prefills.plan(self._running, elapsed_s, self._admission.longest_chunk):
            with self._isolate(chunk.id, outcomes):
                images = self._prefills.images(chunk.id)
                tokens, news = self._prefills.advance(chunk)
                outcomes += news
                self._computed += tokens
                if any(isinstance(outcome, Encoded) for outcome in news):
                    self._encoded_images += images
                else:
                    self._chunk = max(self._chunk, tokens)
                if any(map(_frees_memory, news)):
                    self._admission.mark_dirty()
                if chunk.joins and (prefill := self._prefills.pop_finished(chunk.id)):
                    self._start_decoding(prefill)

    def _start_decoding(self, prefill: AnyPrefill) -> None:
        growth, began = self._running.join_copy_bytes(prefill.total), time.perf_counter()
        self._running.add(prefill.row, *prefill.finish())
        self._prefills.budget.observe_join(prefill.total, growth, time.perf_counter() - began)
        if prefill.row.request.images:
            self._admission.mark_dirty()  # what the language model got of them is given up
        self._queried, self._hit = self._queried + prefill.total, self._hit + prefill.cached

    @contextmanager
    def _isolate(self, id: str, outcomes: list[Outcome]) -> Iterator[None]:
        """Turn an exception into the failure of this request: prefill computes one prompt at a time."""
        try:
            yield
        except Exception:
            logger.exception("the prefill of %s failed", id)
            self._prefills.remove(id)
            self._fault(id, outcomes)

    def _fits(self, groups: list[list[Row]]) -> bool:
        """Return True if all active rows fit into memory with these groups; then shrinks the prefix cache for them."""
        numbers = {row.id: number for number, group in enumerate(groups) for row in group}
        left = self._admission.headroom(self._active_estimates(numbers), self._running.decoding(groups))
        if left >= 0:
            self._caches.set_limit(min(left, self._admission.free_bytes))
        return left >= 0

    def _lengths(self) -> list[list[int]]:
        """Return the lengths in tokens of all rows in memory, by group; a row in prefill is a group of its own."""
        return [*self._running.lengths, *([length] for length in self._prefills.lengths)]

    def _finish_step(self, outcomes: list[Outcome]) -> None:
        """Rebalance the groups, and clear MLX's buffer cache now and then."""
        self._running.rebalance()
        if self._computed >= _CLEAR_EVERY:
            self._computed = 0
            mx.clear_cache()


def _frees_memory(outcome: Outcome) -> bool:
    """Return True if the row needs less memory from now on than is reserved for it."""
    match outcome:
        case SpecPrefillApplied() | SpecPrefillSkipped():
            return True
        case Encoded(done=done, total=total):
            return done == total
        case _:
            return False
