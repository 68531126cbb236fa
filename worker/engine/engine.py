"""The engine: one decode of all running rows, then prompt chunks up to the step's budget, again and again.

Used by one thread only, the one that loaded the model.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import mlx.core as mx

from worker.engine.caches import Caches
from worker.engine.device import memory_limit
from worker.engine.entry import Candidate, Entry
from worker.engine.groups import Groups
from worker.engine.model import Model
from worker.engine.prefills import AnyPrefill, Prefills
from worker.engine.row import Row
from worker.engine.rows import Told
from worker.engine.upstream import generation_stream
from worker.schedule.admission import Admit, Refuse
from worker.schedule.admission import Row as Admitted
from worker.schedule.memory import MOST_ROWS, NO_IMAGES
from worker.schedule.sequence import (
    Encoded,
    Faulted,
    Outcome,
    PrefixUse,
    Refused,
    Sampled,
    Sequence,
    StepReport,
    Thinned,
    Whole,
)

logger = logging.getLogger("sluice.engine")

_CLEAR_EVERY = 16_384  # tokens computed; until then the buffers of one step serve the next
_PREFIX_SHARE = 4  # of the memory beside the model, one part
_MOST_FAILURES = 10  # in a row; then it is not the rows


class EngineBroken(Exception):
    """Step after step has failed, whoever was in it."""


class Engine:
    def __init__(
        self,
        model: Model,
        *,
        step_s: float,
        rows: int = MOST_ROWS,
        memory: int | None = None,
        prefix_bytes: int | None = None,
    ) -> None:
        """`rows`: at once, at the most; an interactive one takes the place of an offline one. `memory`: bytes that all
        of it may take; None is what the device offers. `prefix_bytes` of them at most are for prefixes, as far as rows
        leave them; 0 keeps none, and None is a share of what is beside the model."""
        self._entry = Entry(model.costs, memory or memory_limit(), rows)
        most = self._entry.spare // _PREFIX_SHARE if prefix_bytes is None else prefix_bytes
        self._caches = Caches(model, most)
        self._queried = self._hit = 0  # tokens, in this step
        self._inside: dict[str, Row] = {}  # in the order of admission
        self._ends = frozenset(model.tokenizer.eos_token_ids)
        self._prefills = Prefills(model, step_s, self._caches)
        self._running = Groups(model.network, self._fit)
        self._chunk, self._looked = 0, NO_IMAGES  # the longest chunk of this step, in tokens, and its images
        self._failures = self._computed = self._preempted = 0
        self._decoding_since = 0.0

    def __len__(self) -> int:
        """Sequences that wait, prefill or decode."""
        return len(self._entry) + len(self._inside)

    def add(self, sequence: Sequence) -> None:
        self._entry.add(sequence)

    def remove(self, sequence_id: str) -> None:
        """Frees the row at once, in whatever state; an unknown id is one that has just ended."""
        with mx.stream(generation_stream):
            self._prefills.remove(sequence_id)
            row = self._inside.pop(sequence_id, None)
            if row and not row.fresh:
                self._keep(row)
            self._entry.remove(sequence_id)
            self._leave()

    def step(self) -> StepReport:
        """Raises `EngineBroken`."""
        began, rows, outcomes = time.perf_counter(), len(self._running), list[Outcome]()
        mx.reset_peak_memory()
        self._preempted = self._chunk = self._queried = self._hit = 0
        self._looked = NO_IMAGES
        evicted = self._caches.evicted
        with mx.stream(generation_stream):
            for part in (self._admit, self._decode, self._prefill, self._settle):
                self._recover(outcomes)
                try:
                    part(outcomes)
                except EngineBroken:
                    raise
                except Exception:  # nothing of it may cost more than what the rows can compute again
                    logger.exception("a step failed")
                    self._running.clear()
                    self._entry.stir()
            memory = self._look()
        return StepReport(
            outcomes=tuple(outcomes),
            rows=rows,
            seconds=time.perf_counter() - began,
            waiting=len(self._entry),
            parked=self._entry.parked,
            preempted=self._preempted,
            promised=self._entry.promised,
            memory=memory,
            prefix=self._prefix_use(evicted),
        )

    def _look(self) -> tuple[int, int] | None:
        unneeded = self._entry.unneeded(self._running.lengths, self._running.buffers)
        chunk = max(self._chunk, len(self._running))  # a row that decodes takes a token's share
        return self._entry.look(self._lengths(), chunk, self._caches.nbytes, self._looked, unneeded)

    def _prefix_use(self, evicted: int) -> PrefixUse:
        """`evicted` before the step."""
        return PrefixUse(self._queried, self._hit, self._caches.evicted - evicted, self._caches.nbytes)

    def _admit(self, outcomes: list[Outcome]) -> None:
        """Those who wait, as far as there is memory for them."""
        if not self._entry.due:
            return
        groups = {row.id: number for number, row in self._running}
        decided = self._entry.decide([*self._admitted(groups)], self._running.decoding())
        self._running.part(self._entry.bounds)
        coming = [(candidate.sequence, decision.park) for candidate, decision in decided if isinstance(decision, Admit)]
        for _, park in coming:
            for id in park:
                self._park(id)
        if self._entry.crowded:
            self._running.tighten()
        self._caches.use(sequence for sequence, _ in coming)
        self._caches.make_room(self._entry.spare)  # rows come before prefixes
        for candidate, decision in decided:
            match decision:
                case Admit():
                    self._entry.take(candidate)
                    self._start(candidate, outcomes)
                case Refuse(sentence):
                    self._entry.take(candidate)
                    outcomes.append(Refused(candidate.sequence.id, sentence))

    def _admitted(self, groups: Mapping[str, int]) -> Iterator[Admitted]:
        """Those who are inside, if they decode in these groups."""
        for id, row in self._inside.items():
            yield self._entry.admitted(row.sequence, groups.get(id), self._prefills.images(id))

    def _start(self, candidate: Candidate, outcomes: list[Outcome]) -> None:
        if candidate.parked is None:
            self._begin(candidate.sequence, outcomes)
        else:
            self._inside[candidate.sequence.id] = candidate.parked.row
            self._running.unpark(candidate.parked)

    def _begin(self, sequence: Sequence, outcomes: list[Outcome], *, suspect: bool = False) -> None:
        with self._by_itself(sequence.id, outcomes):
            row = Row.of(sequence, suspect=suspect)
            self._prefills.begin(row)
            self._inside[row.id] = row

    def _park(self, id: str) -> None:
        """To make room for another. It goes on later, where it was."""
        row = self._inside[id]
        parked = None if id in self._prefills else self._running.park(row)
        del self._inside[id]
        self._prefills.remove(id)
        self._entry.put_back(Candidate(row.again(), parked, was_inside=True))
        self._preempted += 1
        logger.info("%s is parked", id)

    def _decode(self, outcomes: list[Outcome]) -> None:
        """The next token of every running row."""
        if not len(self._running):
            return
        idle, began = self._running.idle, time.perf_counter()
        told, failed = self._running.step()
        # A device that was busy began with this step when it had computed the tokens of the last.
        self._decoding_since = began if idle else time.perf_counter()
        self._computed += len(told)
        at = time.monotonic()
        for news in told:
            self._hear(news, at, outcomes)
        self._leave()
        for rows in failed:
            if len(rows) == 1:
                self._fault(rows[0].id, outcomes)
            else:
                self._again(rows, outcomes)
        if told:
            self._failures = 0

    def _hear(self, news: Told, at: float, outcomes: list[Outcome]) -> None:
        row = news.row
        row.suspect = False
        if not news.sound:
            logger.error("%s: the model gave no numbers after %d tokens", row.id, row.length)
            self._caches.forget_unsound(row)
            outcomes.append(Faulted(row.id))
            self._end(row.id)
            return
        if news.token in self._ends:
            sampled = Sampled(row.id, None, "stop", at=at)
        else:
            row.answer.append(news.token)
            ended = len(row.answer) >= row.sequence.max_tokens
            sampled = Sampled(row.id, news.token, "length" if ended else None, news.logprobs, at)
        outcomes.append(sampled)
        if sampled.finish_reason:
            self._keep(row, *([news.token] if sampled.token is None else []))
            self._end(row.id)

    def _keep(self, row: Row, *ending: int) -> None:
        """Its prompt and answer, for those who begin with them. `ending`: what else it was fed."""
        # A line of a file has no next turn, and what was left out is missing to others.
        if (prefix := self._caches.prefix) and row.sequence.lane == "interactive" and not row.left_out:
            for cache, place in self._running.cache_of(row):
                prefix.keep(row.sequence.space, row.fed(*ending), cache, place)

    def _leave(self) -> None:
        self._running.leave({row for _, row in self._running if row.id not in self._inside})

    def _end(self, id: str) -> None:
        self._inside.pop(id, None)
        self._entry.stir()

    def _fault(self, id: str, outcomes: list[Outcome]) -> None:
        outcomes.append(Faulted(id))
        self._end(id)
        self._failed()

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            raise EngineBroken(f"{self._failures} steps in a row have failed")

    def _recover(self, outcomes: list[Outcome]) -> None:
        """Those who are inside, and neither prefill nor decode: something failed that no row is to blame for."""
        if len(self._prefills) + len(self._running) < len(self._inside):
            there = [*self._prefills.rows, *(row for _, row in self._running)]
            self._again([row for row in self._inside.values() if row not in there], outcomes)

    def _again(self, rows: Iterable[Row], outcomes: list[Outcome]) -> None:
        """Their caches are lost. Each comes again alone, from its tokens: one that is to blame then fails alone, and
        the others lose nothing but time."""
        self._failed()
        for row in rows:
            self._begin(row.again(), outcomes, suspect=True)

    def _prefill(self, outcomes: list[Outcome]) -> None:
        """Chunks of the prompts that the plan picks; those that are through join the running rows."""
        if len(self._prefills):
            self._running.wait()
        if self._running.step_s is not None:  # now, since the time for prompts follows from it
            self._prefills.budget.saw_decode(self._running.step_s)
        if not len(self._prefills):
            return
        self._prefills.budget.forward_s = self._running.forward_s
        elapsed_s = time.perf_counter() - self._decoding_since
        for chunk in self._prefills.plan(self._running, elapsed_s, self._entry.longest_chunk):
            with self._by_itself(chunk.id, outcomes):
                images = self._prefills.images(chunk.id)
                tokens, news = self._prefills.advance(chunk)
                outcomes += news
                self._computed += tokens
                if any(isinstance(outcome, Encoded) for outcome in news):
                    self._looked += images
                else:
                    self._chunk = max(self._chunk, tokens)
                if any(map(_eases, news)):
                    self._entry.stir()
                if chunk.joins and (prefill := self._prefills.through(chunk.id)):
                    self._join(prefill)

    def _join(self, prefill: AnyPrefill) -> None:
        growth, began = self._running.growth(prefill.total), time.perf_counter()
        self._running.join(prefill.row, *prefill.finish())
        self._prefills.budget.saw_join(prefill.total, growth, time.perf_counter() - began)
        if prefill.row.sequence.pictures:
            self._entry.stir()  # what the language model got of them is given up
        self._queried, self._hit = self._queried + prefill.total, self._hit + prefill.cached

    @contextmanager
    def _by_itself(self, id: str, outcomes: list[Outcome]) -> Iterator[None]:
        """A prompt computes alone, so what fails here is about this sequence and no other."""
        try:
            yield
        except Exception:
            logger.exception("the prefill of %s failed", id)
            self._prefills.remove(id)
            self._fault(id, outcomes)

    def _fit(self, groups: list[list[Row]]) -> bool:
        """Whether all who are inside fit into memory, if these rows decode in these groups. Prefixes make room."""
        numbers = {row.id: number for number, group in enumerate(groups) for row in group}
        left = self._entry.left(self._admitted(numbers), self._running.decoding(groups))
        if left >= 0:
            self._caches.make_room(min(left, self._entry.spare))
        return left >= 0

    def _lengths(self) -> list[list[int]]:
        """Of all that is in memory, by group; a prompt on its way is by itself."""
        return [*self._running.lengths, *([length] for length in self._prefills.lengths)]

    def _settle(self, outcomes: list[Outcome]) -> None:
        """Between two steps."""
        self._running.settle()
        if self._computed >= _CLEAR_EVERY:
            self._computed = 0
            mx.clear_cache()


def _eases(outcome: Outcome) -> bool:
    """Whether the row needs less from here on than it was promised."""
    match outcome:
        case Thinned() | Whole():
            return True
        case Encoded(done=done, total=total):
            return done == total
        case _:
            return False
