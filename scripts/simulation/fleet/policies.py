"""Ways of giving jobs to workers: a router sends a job to one when it comes, a claim takes one when a row is free."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from heapq import nsmallest
from itertools import islice, takewhile
from math import inf
from random import Random

from scripts.simulation import choose
from scripts.simulation.fleet.run import Run
from scripts.simulation.fleet.worker import DEPTH, Job, Path, Texts, Worker, work


class _Base:
    """Ignores what only a policy with hints uses."""

    run: Run
    dice: Random

    def meet(self, run: Run) -> None:
        self.run, self.dice = run, Random(17)

    def kept(self, worker: Worker, evicted: Sequence[int]) -> None: ...

    def crashed(self, worker: Worker) -> None: ...

    def flushed(self) -> None: ...


class Fifo(_Base):
    """First come, first served: a job wakes all, and the worker that is first takes the oldest."""

    def submitted(self, job: Job) -> None:
        self.run.waiting[job.number] = job
        free = [worker for worker in self.run.workers if worker.free]
        self.run.claims += len(free)
        if free:
            self._take(self.dice.choice(free))

    def freed(self, worker: Worker) -> None:
        self.run.claims += 1
        self._take(worker)

    def _take(self, worker: Worker) -> None:
        while worker.free and self.run.waiting:
            self.run.start(worker, next(iter(self.run.waiting.values())))


class _Router(_Base, ABC):
    """Sends each job to a worker, which has a queue of its own. It knows all caches and loads exactly and at once."""

    @abstractmethod
    def cost(self, worker: Worker, job: Job) -> float:
        """Return a number that is least for the best worker."""

    def submitted(self, job: Job) -> None:
        live = [worker for worker in self.run.workers if worker.alive]
        for worker in live:
            worker.advance(self.run.now_s)
        best = min(live, key=lambda worker: self.cost(worker, job))
        job.left = work(self.found(best, job), job.total)  # until it starts, by what is there then
        best.queue.append(job)
        self.freed(best)

    def freed(self, worker: Worker) -> None:
        while worker.free and worker.queue:
            self.run.start(worker, worker.queue.pop(0))

    def found(self, worker: Worker, job: Job) -> int:
        """Return the tokens of the prompt that the worker has, or will have when those before it are computed."""
        there = worker.cache.found(job.path)
        for other in (*worker.prompts.values(), *worker.queue):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(other.path, job.path, strict=False))
            there = max(there, sum(1 for _ in same))
        return self.run.texts.length(job.path[:there])


class LlmD(_Router):
    """The sum of weighted scores: the prefix counts 3, the queue 2 and free rows 2, as llm-d's scheduler has them."""

    def cost(self, worker: Worker, job: Job) -> float:
        queues = [len(each.queue) for each in self.run.workers if each.alive]
        low, high = min(queues), max(queues)
        queue = 1.0 if high == low else (high - len(worker.queue)) / (high - low)
        prefix = self.found(worker, job) / job.total
        return -(3 * prefix + 2 * queue + 2 * (1 - worker.running / worker.rows)) + 1e-6 * self.dice.random()


class LeastPrefill(_Router):
    """The least prompt work: what it has to compute of this prompt, and half of what it has to compute before."""

    def cost(self, worker: Worker, job: Job) -> float:
        ahead = sum(each.left for each in (*worker.prompts.values(), *worker.queue))
        own = work(self.found(worker, job), job.total)
        running = worker.running + len(worker.queue)
        wait_s = max(0, running + 1 - worker.rows) * worker.gap_s
        return (0.5 * ahead + own) / worker.rate + wait_s + 0.05 * running


WAKE_S = 0.001  # from a message until a worker claims
LEFT_S = 0.008  # after which a worker takes a job that it has left to others by its share of rows
SWEEP_S = 0.5  # between two claims of a worker that has a free row, if nothing wakes it
_Mark = tuple[int, int]  # the piece in which it ends, and the bytes before its end


class Aware(_Base):
    """The claim of the worker: it leaves a job to a worker that would be done with it sooner, for no longer than that
    saves. The choice is that of `scripts/simulation/choose.py`; this class keeps what the server knows for it."""

    def meet(self, run: Run) -> None:
        super().meet(run)
        self._marks = dict[int, list[tuple[_Mark, int]]]()  # of each job, with the bytes that end there
        self._holders = dict[_Mark, dict[str, None]]()
        self._held = dict[str, dict[int, set[_Mark]]]()  # the same by worker and piece
        self._names = {worker.number: f"{worker.number}" for worker in run.workers}
        self._records = {wid: _record(run.workers[number], wid, 0.0) for number, wid in self._names.items()}
        self._looks_s = dict[int, float]()  # when each worker claims next by itself
        self._left = set[str]()  # jobs that have been left to a better worker
        self._left_s = dict[int, float]()  # when each takes jobs that it has left to others by its share of rows

    def submitted(self, job: Job) -> None:
        self.run.waiting[job.number] = job
        self._marks[job.number] = _marks(self.run.texts, job.path)
        best = self._best(job)
        if best:
            self._claim(best)
        for worker in self.run.workers if self.run.waiting else ():
            if worker.free:  # the one that the job is for has been woken; others claim as they do anyway
                self._look(worker, self.dice.uniform(0, SWEEP_S) if best else WAKE_S, woken=not best)

    def _best(self, job: Job) -> Worker | None:
        """Return the worker that the submission wakes: of those with a row the best for the job. None if all are woken:
        nobody holds anything of it, or all who are known are full."""
        nobody = choose.Worker("", 0, 0, 0, 0, 0, 0, 0, [0.0] * 8)
        fleet = self._fleet(nobody)
        looked = fleet.look(self._job(job))
        others = [each for each in looked.others if each[0].free > 0]
        if not looked.known:
            return None
        best = min(others, key=lambda each: choose.cost_ms(each[0], each[1], fleet.now_ms)[1], default=None)
        woken = [worker for worker in self.run.workers if best and self._names[worker.number] == best[0].wid]
        return woken[0] if woken and woken[0].free else None

    def freed(self, worker: Worker) -> None:
        self._claim(worker)

    def kept(self, worker: Worker, evicted: Sequence[int]) -> None:
        wid = self._names[worker.number]
        for piece in evicted:
            for mark in self._held.get(wid, {}).pop(piece, ()):
                del self._holders[mark][wid]

    def crashed(self, worker: Worker) -> None:
        """Marks of the dead stay, but count for nothing: the worker returns by another name."""
        del self._records[self._names[worker.number]]
        self._names[worker.number] += "+"

    def flushed(self) -> None:
        self._holders.clear()
        self._held.clear()

    def _look(self, worker: Worker, in_s: float, *, woken: bool = False) -> None:
        """Let the worker claim in so many seconds, unless it does before."""
        time_s = self.run.now_s + in_s
        if self.run.now_s < self._looks_s.get(worker.number, 0.0) <= time_s:
            return
        self._looks_s[worker.number] = time_s

        def look() -> None:
            if self._looks_s[worker.number] == time_s and worker.free and self.run.waiting:
                self._claim(worker, woken=woken)

        self.run.at(time_s, look)

    def _claim(self, worker: Worker, *, woken: bool = False) -> None:
        run, number = self.run, worker.number
        wid = self._names[number]
        run.claims += 1
        worker.advance(run.now_s)
        me = _record(worker, wid, 1000 * run.now_s)
        share = self._share(worker)
        if self._left_s.get(number, inf) <= run.now_s:  # all have claimed since, and none has taken them
            share = worker.free
        choice = choose.choose(self._fleet(me), map(self._job, [*run.waiting.values()]), worker.free, share)
        taken = [int(job_id) for job_id, _ in choice.taken] if choice.knows else [*islice(run.waiting, share)]
        for each in taken:
            self._hold(wid, self._marks[each])  # promised is as good as held: a burst follows its first job
            run.start(worker, run.jobs[each])
        self._records[wid] = _record(worker, wid, 1000 * run.now_s)
        self._wake([other for job_id, other in choice.left if job_id not in self._left])
        self._left.update(job_id for job_id, _ in choice.left)
        left = bool(choice.kept) or not choice.knows
        if not (worker.free and run.waiting and left):
            self._left_s.pop(number, None)
        elif self._left_s.setdefault(number, run.now_s + LEFT_S) <= run.now_s:
            self._left_s[number] = run.now_s + LEFT_S
        if worker.free and run.waiting:
            self._look(worker, min(SWEEP_S, choice.again_ms / 1000, self._left_s.get(number, inf) - run.now_s))
            for other in run.workers if left and not woken else ():
                if other.free and other is not worker:
                    self._look(other, WAKE_S, woken=True)

    def _wake(self, wids: Sequence[str]) -> None:
        """Wake the workers that jobs have been left to for the first time, if they have a row."""
        for other in self.run.workers:
            if other.free and self._names[other.number] in wids:
                self._look(other, WAKE_S, woken=True)

    def _hold(self, wid: str, marks: list[tuple[_Mark, int]]) -> None:
        """Note that a worker holds the prompt with these marks."""
        pieces = self._held.setdefault(wid, {})
        for mark, _ in marks:
            self._holders.setdefault(mark, {})[wid] = None
            pieces.setdefault(mark[0], set()).add(mark)

    def _fleet(self, me: choose.Worker) -> choose.Fleet:
        """Return the live workers as the server knows them."""

        @cache
        def worker(wid: str) -> choose.Worker | None:
            known = self._records.get(wid)
            return replace(known, lefts=[*known.lefts]) if known else None

        least = nsmallest(4, self._records.values(), key=_ready_ms)
        others = [found for each in least if each.wid != me.wid and (found := worker(each.wid))]
        return choose.Fleet(me, worker, others[:2], 1000 * self.run.now_s)

    def _job(self, job: Job) -> choose.Job:
        """Return a waiting job with its hints."""
        ends = [end for _, end in self._marks[job.number]]
        holders = [(*self._holders.get(mark, ()),) for mark, _ in self._marks[job.number]]
        return choose.Job(str(job.number), 1000 * job.at_s, self.run.texts.byte_ends[job.path[-1]], ends, holders)

    def _share(self, me: Worker) -> int:
        """Return how many jobs the worker takes if all are shared by rows: each goes to the one with the fewest."""
        others = [worker for worker in self.run.workers if worker.free and worker is not me]

        def first() -> int:
            """Return how many jobs go to others before the next one of this worker."""
            return sum(min(each.free, max(0, me.running + share - each.running)) for each in others)

        share = 0
        while share < me.free and share + first() < len(self.run.waiting):
            share += 1
        return share


def _marks(texts: Texts, path: Path) -> list[tuple[_Mark, int]]:
    """Return the marks of a prompt, as `marks_of` in `sluice/submission.py` chooses them."""
    ends = [texts.byte_ends[piece] for piece in path]
    wanted = set[int]()
    for size in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18):
        last = min(ends[-1], 1 << 18) // size
        wanted.update(at * size for at in range(max(1, last - 5), last + 1))
    return [((path[bisect_left(ends, end)], end), end) for end in sorted(wanted)]


def _record(worker: Worker, wid: str, now_ms: float) -> choose.Worker:
    """Return what a worker says of itself: it estimates 4 bytes a token, and has measured its speed."""
    lefts, token_ms = [0.0] * 8, 1000 / worker.rate
    for job in worker.prompts.values():
        left_ms = max(0.0, job.left) * token_ms
        place = choose.class_of(left_ms)
        lefts[place] += left_ms
        lefts[place + 1] += 1
    gap_ms = 1000 * worker.gap_s
    return choose.Worker(wid, now_ms, worker.free, worker.rows, gap_ms, token_ms, token_ms / DEPTH, 0.25, lefts)


def _ready_ms(record: choose.Worker) -> float:
    """Return when a worker will be through with what it has, by its own word."""
    wait_ms = 0.0 if record.free > 0 else record.gap_ms
    return record.at_ms + sum(record.lefts[::2]) + 150 * (record.rows - record.free) + wait_ms
