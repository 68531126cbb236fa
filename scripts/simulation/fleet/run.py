"""A run of the fleet: events in the order of their times, the queue, and what its clients saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Protocol

from scripts.benchmarks.serve.figures import percentile
from scripts.simulation.fleet.worker import RATE, Cache, Job, Path, Texts, Then, Worker, work
from scripts.simulation.fleet.workloads import begin

LEASE_S = 10.5  # after which a dead worker's jobs are taken over: SLUICE_LEASE_S, and the time until one looks


@dataclass(frozen=True, slots=True)
class Setup:
    """The fleet, and what goes wrong."""

    workload: str = "mixed"
    workers: int = 8
    rows: int = 4
    seconds: float = 420.0
    warm_s: float = 120.0  # of these, jobs of the first ones are not counted
    speeds: tuple[float, ...] = (1.0,)  # repeated over the workers
    cache_tokens: float = 400_000  # of a worker
    byte_error: float = 0.15  # sigma of the bytes of a token, from which claims estimate the tokens
    crash_s: float | None = None  # a worker crashes then, and is back a minute later with an empty cache
    flush_s: float | None = None  # the server loses all that it knows of prefixes then


class Policy(Protocol):
    """Decides which worker takes which job, and calls `Run.start`."""

    def meet(self, run: "Run") -> None:
        """Begin with this run."""

    def submitted(self, job: Job) -> None:
        """A job has come."""

    def freed(self, worker: Worker) -> None:
        """Rows of the worker have come free, or it has started."""

    def kept(self, worker: Worker, evicted: Sequence[int]) -> None:
        """The worker has evicted these pieces."""

    def crashed(self, worker: Worker) -> None:
        """The worker's lease has ended."""

    def flushed(self) -> None:
        """The server has lost its hints."""


class Run:
    """One run with one seed."""

    def __init__(self, setup: Setup, policy: Policy, seed: int) -> None:
        self.setup, self.policy = setup, policy
        self.now_s = 0.0
        self.dice = Random(seed * 7919 + 1)
        self.texts = Texts(Random(seed * 7919 + 2), setup.byte_error)
        self.workers = [
            Worker(number, setup.rows, RATE * setup.speeds[number % len(setup.speeds)], self._cache())
            for number in range(setup.workers)
        ]
        self.waiting = dict[int, Job]()  # of pull policies, in the order in which they came
        self.jobs = list[Job]()
        self.claims = 0
        self._events, self._order = list[tuple[float, int, Then]](), count()
        self._idle_s = 0.0  # during which a job waited in the queue and a worker had nothing to do
        policy.meet(self)
        begin(setup.workload, self, self.texts, Random(seed), self._speed(), setup.seconds)
        if setup.crash_s is not None:
            self.at(setup.crash_s, lambda: self._crash(self.workers[0]))
        if setup.flush_s is not None:
            self.at(setup.flush_s, policy.flushed)

    def _cache(self) -> Cache:
        return Cache(self.texts, self.setup.cache_tokens)

    def _speed(self) -> float:
        return sum(worker.rate for worker in self.workers) / RATE

    def at(self, time_s: float, call: Then) -> None:
        """Call this at that time."""
        heappush(self._events, (time_s, next(self._order), call))

    def run(self) -> "Run":
        """Run until the time is over."""
        while self._events and self._events[0][0] <= self.setup.seconds:
            self.step()
        self.now_s = self.setup.seconds
        return self

    def step(self) -> None:
        """Run until the next event, and let it happen."""
        time_s, _, call = heappop(self._events)
        if self.waiting and any(worker.free and not worker.running for worker in self.workers):
            self._idle_s += time_s - self.now_s
        self.now_s = time_s
        call()

    # Jobs

    def submit(self, session: int, path: Path, answer: int, then: Then | None) -> None:
        """Queue a prompt; `then` is called when its answer has ended."""
        job = Job(session, path, self.texts.length(path), max(1, answer), self.now_s, then)
        job.number, job.idle_s = len(self.jobs), self._idle_s
        self.jobs.append(job)
        self.policy.submitted(job)

    def start(self, worker: Worker, job: Job) -> None:
        """Let the worker begin with a job."""
        self.waiting.pop(job.number, None)
        job.claimed_s, job.idle_s = self.now_s, self._idle_s - job.idle_s
        worker.advance(self.now_s)
        worker.start(job)
        self._plan(worker)

    def _plan(self, worker: Worker) -> None:
        """Call `_advance` when something of the worker ends, unless its plan changes before."""
        worker.version += 1
        version = worker.version
        if (time_s := worker.next_event_s()) is not None:
            self.at(time_s, lambda: self._advance(worker) if worker.version == version else None)

    def _advance(self, worker: Worker) -> None:
        worker.advance(self.now_s)
        computed, evicted = worker.pop_computed()
        for job in computed:
            job.first_s = self.now_s
        if evicted:
            self.policy.kept(worker, evicted)
        ended = worker.pop_ended()
        self._plan(worker)
        for job in ended:
            job.ended_s = self.now_s
            if job.then:
                job.then()
        if ended:
            self.policy.freed(worker)

    # Failures

    def _crash(self, worker: Worker) -> None:
        worker.advance(self.now_s)
        lost = worker.crash()
        worker.cache = self._cache()

        def taken_over() -> None:
            self.policy.crashed(worker)
            for job in lost:
                job.hit, job.idle_s = 0, self._idle_s
                self.policy.submitted(job)

        def back() -> None:
            worker.alive = True
            worker.advance(self.now_s)
            self.policy.freed(worker)

        self.at(self.now_s + LEASE_S, taken_over)
        self.at(self.now_s + 60.0, back)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, of the jobs that came after its warm-up. Times to the first token count from submission."""

    hit: float  # share of the prompts' tokens that was found in a cache
    p50_s: float
    p95_s: float
    p99_s: float
    answers_per_s: float  # tokens of answers that have ended
    claims: float  # calls, for each job
    regret_s: float  # the longest that a job waited beside an idle worker, less the estimated time to compute it there

    @classmethod
    def of(cls, run: Run) -> "Figures":
        """Return the figures of a run."""
        jobs = [job for job in run.jobs if job.at_s >= run.setup.warm_s]
        begun = [job for job in jobs if job.first_s >= 0]
        firsts = [(job.first_s if job.first_s >= 0 else run.now_s) - job.at_s for job in jobs]
        slowest = min(worker.rate for worker in run.workers)
        return cls(
            sum(job.hit for job in begun) / max(1, sum(job.total for job in begun)),
            percentile(firsts, 0.5),
            percentile(firsts, 0.95),
            percentile(firsts, 0.99),
            sum(job.answer for job in jobs if job.ended_s >= 0) / (run.now_s - run.setup.warm_s),
            run.claims / max(1, len(run.jobs)),
            max((job.idle_s - work(0, run.texts.byte_ends[job.path[-1]] / 4) / slowest for job in begun), default=0.0),
        )
