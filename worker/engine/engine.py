"""The engine: one decode of all running rows, then prompt chunks up to the step's budget, again and again.

Used by one thread only, the one that loaded the model.
"""

import logging
import time
from collections.abc import Iterator

import mlx.core as mx

from worker.engine.cache import settle_metadata
from worker.engine.logprobs import asked_for
from worker.engine.model import Model
from worker.engine.prefill import Prefill
from worker.engine.sampling import draw
from worker.engine.upstream import GenerationBatch, StopSequences, generation_stream, greedy_sampler
from worker.schedule.budget import StepBudget
from worker.schedule.plan import Chunk, Waiting, plan
from worker.schedule.sequence import Faulted, Outcome, Prefilled, Sampled, Sequence, StepReport

logger = logging.getLogger("sluice.engine")

_SETTLE_EVERY = 64  # steps; see cache.settle_metadata


class Engine:
    def __init__(self, model: Model, *, step_s: float) -> None:
        self._model, self._budget = model, StepBudget(step_s)
        self._stop = StopSequences([(token,) for token in model.tokenizer.eos_token_ids])
        self._prefills: dict[str, Prefill] = {}
        self._running = self._no_rows()
        self._steps = self._turn = 0  # of decoding, of prefilling

    def _no_rows(self) -> GenerationBatch:
        return GenerationBatch.empty(self._model.network, greedy_sampler)

    def __len__(self) -> int:
        """Sequences inside, prefilling or decoding."""
        return len(self._prefills) + len(self._running)

    def add(self, sequence: Sequence) -> None:
        self._prefills[sequence.id] = Prefill(self._model.network, sequence, stop=self._stop)

    def remove(self, sequence_id: str) -> None:
        """Frees the row at once, in whatever state; an unknown id is one that has just ended."""
        self._prefills.pop(sequence_id, None)
        rows = self._running.uids
        kept = [i for i, row in enumerate(rows) if row.sequence.id != sequence_id]
        if len(kept) < len(rows):
            with mx.stream(generation_stream):
                self._running.filter(kept)

    def step(self) -> StepReport:
        rows = len(self._running)
        with mx.stream(generation_stream):
            outcomes = [*self._decode(), *self._prefill()]
        return StepReport(tuple(outcomes), rows)

    def _decode(self) -> Iterator[Outcome]:
        """The next token of every running row."""
        if not len(self._running):
            return
        began, running = time.perf_counter(), list(self._running.uids)
        try:
            responses = self._running.next()
        except Exception:  # upstream's batch is in an unknown state: end its rows rather than guess
            logger.exception("a decode step of %d rows failed", len(running))
            self._running = self._no_rows()
            yield from (Faulted(row.sequence.id) for row in running)
            return
        self._steps += 1
        if self._steps % _SETTLE_EVERY == 0:
            settle_metadata(self._running.prompt_cache)
        self._budget.saw_decode(time.perf_counter() - began)
        logprobs = asked_for(responses)
        for response in responses:
            row, ended = response.uid, response.finish_reason == "stop"
            token = None if ended else response.token
            yield Sampled(row.sequence.id, token, response.finish_reason, logprobs.get(row))

    def _prefill(self) -> Iterator[Outcome]:
        """Chunks of the prompts that the plan picks; those that are through join the running rows."""
        waiting = [Waiting(id, p.remaining, p.waited, p.sequence.lane) for id, p in self._prefills.items()]
        self._turn += 1
        for prefill in self._prefills.values():
            prefill.waited += 1
        for chunk in plan(waiting, self._budget.tokens(len(self._running)), self._turn):
            yield self._advance(self._prefills[chunk.id], chunk)

    def _advance(self, prefill: Prefill, chunk: Chunk) -> Outcome:
        began, id = time.perf_counter(), chunk.id
        try:
            prefill.advance(chunk.tokens)
            if prefill.remaining == 0:
                del self._prefills[id]
                self._join(prefill.row())
        except Exception:  # the prompt computes alone, so it fails alone
            logger.exception("the prefill of %s failed", id)
            self._prefills.pop(id, None)
            return Faulted(id)
        self._budget.saw_prefill(chunk.tokens, time.perf_counter() - began)
        return Prefilled(id, prefill.done, prefill.total)

    def _join(self, row: GenerationBatch) -> None:
        if len(self._running):
            self._running.extend(row)
        else:
            self._running = row
        # One object for all, so that upstream samples them in one call.
        self._running.samplers = [self._sample] * len(self._running)

    def _sample(self, logprobs: mx.array) -> mx.array:
        return draw(logprobs, self._running.uids)
