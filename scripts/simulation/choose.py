"""Choose which waiting jobs a worker takes, and which it leaves to others, for simulations: as choose.lua of the worker
and fleet.lua of the contract do. A test holds them equal. All times are milliseconds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

_EDGES_MS = (250, 1000, 4000)  # between the classes of prompts by what is left of them
_SCAN = 16  # jobs that are ranked at a time
_MOST_SCANNED = 256  # in one claim: a row stays idle beside jobs that are better done elsewhere
_HOLDERS = 4  # workers compared for each job that hold more of its prompt
_MOST_NAMES = 16  # read for that; some are of workers that have ended


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as it says of itself, and what it is left in this claim."""

    wid: str
    at_ms: float
    free: float  # rows
    rows: float
    gap_ms: float  # mean time between two rows that come free
    token_ms: float  # to compute a token at the beginning of a prompt
    before_ms: float  # that each token before it adds
    tokens_per_byte: float
    lefts: list[float]  # by class: the time left of the prompts under way, and their number
    promised: int = 0  # jobs left to it
    extra_ms: float = 0.0  # their prompts


def read_worker(wid: str, text: str, now_ms: float) -> Worker | None:
    """Return a worker by its record in the fleet; None if its lease has expired, or the record is another program's."""
    if len(text) > 400 or any(each not in "0123456789. " for each in text):
        return None
    try:
        numbers = [float(word) for word in text.split()]
    except ValueError:
        return None
    if len(numbers) < 16 or max(numbers) > 1e15 or numbers[0] <= now_ms:
        return None
    at_ms, free, rows, gap_ms, token_us, before_ns, per_kb = numbers[1:8]
    return Worker(wid, at_ms, free, rows, gap_ms, token_us / 1000, before_ns / 1e6, per_kb / 1024, numbers[8:16])


def compute_ms(worker: Worker, held: float, size: float) -> float:
    """Return the time to compute a prompt of `size` bytes of which the worker holds `held`."""
    done, tokens = held * worker.tokens_per_byte, size * worker.tokens_per_byte
    return (tokens - done) * worker.token_ms + (tokens * tokens - done * done) / 2 * worker.before_ms


def class_of(own_ms: float) -> int:
    """Return the place of a prompt's class in `Worker.lefts`."""
    place = 0
    while place < len(_EDGES_MS) and own_ms >= _EDGES_MS[place]:
        place += 1
    return 2 * place


def cost_ms(worker: Worker, own_ms: float, now_ms: float) -> tuple[float, float]:
    """Return the time to the first token of a prompt that computes for `own_ms` here, and that with what it costs the
    other prompts of the worker."""
    free = worker.free - worker.promised
    first_ms = 0.0 if free > 0 else worker.gap_ms * (1 - free)
    longer_ms, longer = 0.0, 0.0
    place = class_of(own_ms)
    gone_ms = max(0.0, now_ms - worker.at_ms)
    first_ms += worker.extra_ms
    for at in range(0, 8, 2):
        was_ms = worker.lefts[at]
        left_ms = max(0.0, was_ms - gone_ms)
        gone_ms = max(0.0, gone_ms - was_ms)
        share = 0.5 if at == place else float(at < place)  # half of its own class is shorter
        first_ms += share * left_ms
        longer_ms += (1 - share) * left_ms
        if left_ms > 0:
            longer += (1 - share) * worker.lefts[at + 1]
    first_ms += own_ms * (4 / 3 if longer > 0 else 1)  # each fourth step is the oldest prompt's
    in_use = worker.rows - max(0.0, free)
    # What a prompt overtakes, what waits for it, what it displaces, and the rows that decode beside it.
    return first_ms, first_ms + 0.25 * longer_ms + longer * own_ms + own_ms + 150 * in_use


@dataclass(slots=True)
class Job:
    """A waiting job, with the marks of its prompt."""

    id: str
    queued_ms: float
    size: float = 0  # bytes that the marks are of; 0 if it has none
    ends: Sequence[float] = ()  # of its marks, ascending
    holders: Sequence[Sequence[str]] = ()  # of each mark: the workers that hold what ends there
    may_be_left: bool = True  # not if it was claimed before
    deadline_ms: float | None = None

    def held(self, wid: str) -> float:
        """Bytes that a worker holds."""
        return max((end for end, wids in zip(self.ends, self.holders, strict=True) if wid in wids), default=0)


@dataclass(slots=True)
class _Candidate:
    job: Job
    held: float  # bytes, here
    own_ms: float
    others: list[tuple[Worker, float]]  # and the time that each would compute
    known: bool  # somebody holds something of it
    rank: float


@dataclass(slots=True)
class Choice:
    """What a claim takes and leaves."""

    taken: list[tuple[str, float]] = field(default_factory=list)  # ids, and the bytes that are held here
    left: list[tuple[str, str]] = field(default_factory=list)  # ids, and to whom
    kept: list[str] = field(default_factory=list)  # nobody holds anything of them: left by the share of rows alone
    overruled: int = 0  # taken although another is better: its time is over
    scanned: int = 0
    again_ms: float = inf  # until a job that was left may be taken here

    @property
    def knows(self) -> bool:
        """False if no worker holds anything of any job: then the order is that without marks."""
        return bool(self.taken or self.left or self.kept)


@dataclass(frozen=True)
class Fleet:
    """The live workers, as one of them knows them at its claim."""

    me: Worker
    worker: Callable[[str], Worker | None]  # by its name; None if it is not alive
    least: Sequence[Worker]  # two others with the least to do
    now_ms: float

    def look(self, job: Job) -> _Candidate:
        """Return a job with what it would cost whom."""
        held = job.held(self.me.wid)
        own_ms = compute_ms(self.me, held, job.size)
        found = self._holders(job, held)
        others = [(each, compute_ms(each, job.held(each.wid), job.size)) for each in found]
        elsewhere = [ms for each, ms in others if job.held(each.wid) > 0]
        elsewhere_ms = min(elsewhere, default=compute_ms(self.me, 0, job.size))
        ahead_ms = max(-30_000, min(30_000, 3 * (elsewhere_ms - own_ms)))
        return _Candidate(job, held, own_ms, others, held > 0 or bool(elsewhere), job.queued_ms - ahead_ms)

    def _holders(self, job: Job, held: float) -> list[Worker]:
        """Return those that hold more than this one, the deepest first, and those with the least to do."""
        found = list[Worker]()
        names, holders = 0, 0
        for end, wids in zip(reversed(job.ends), reversed(job.holders), strict=True):
            if end <= held:
                break
            for wid in wids:
                if holders >= _HOLDERS or names >= _MOST_NAMES:
                    break
                names += 1
                worker = None if wid == self.me.wid else self.worker(wid)
                if worker and worker not in found:
                    found.append(worker)
                    holders += 1
        return found + [each for each in self.least if each not in found]

    def better(self, each: _Candidate) -> tuple[Worker, float, float] | None:
        """Return the worker that would be done with a job sooner, the time that it computes, and until when a job is
        left to it; None if there is none."""
        first_ms, all_ms = cost_ms(self.me, each.own_ms, self.now_ms)
        best, best_ms = None, all_ms - 50  # a difference of less is none
        for worker, own_ms in each.others:
            its_first_ms, its_all_ms = cost_ms(worker, own_ms, self.now_ms)
            if its_all_ms < best_ms:
                queued_ms, deadline_ms = each.job.queued_ms, each.job.deadline_ms
                till_ms = queued_ms + min(120_000, max(first_ms - its_first_ms, each.own_ms - own_ms))
                if deadline_ms is not None:  # the rest is to answer
                    till_ms = min(till_ms, queued_ms + 0.1 * (deadline_ms - queued_ms))
                best, best_ms = (worker, own_ms, till_ms), its_all_ms
        return best

    def take(self, own_ms: float) -> None:
        """Count a job that this worker takes."""
        place = class_of(own_ms)
        self.me.free -= 1
        self.me.lefts[place] += own_ms
        self.me.lefts[place + 1] += 1


def choose(fleet: Fleet, jobs: Iterable[Job], want: int, share: float = inf, *, leaves: bool = True) -> Choice:
    """Return which of the waiting jobs, given in their order, this worker takes for `want` free rows. `share`: of jobs
    that nobody holds anything of, it takes none once it has taken as many as this of all. `leaves`: False if it leaves
    none to a better worker; then `share` bounds all. `fleet` counts what is taken and left."""
    choice, order = Choice(), iter(jobs)
    window = list[_Candidate]()

    def fill() -> None:
        while len(window) < _SCAN and choice.scanned < _MOST_SCANNED and (job := next(order, None)):
            choice.scanned += 1
            window.append(fleet.look(job))

    fill()
    if not any(each.known for each in window):
        return choice
    while len(choice.taken) < want and window:
        each = window.pop(min(range(len(window)), key=lambda at: window[at].rank))
        better = fleet.better(each) if leaves and each.job.may_be_left else None
        if better and fleet.now_ms < better[2]:
            worker, own_ms, right_ms = better
            worker.promised += 1
            worker.extra_ms += own_ms
            choice.left.append((each.job.id, worker.wid))
            choice.again_ms = min(choice.again_ms, max(20, ceil(right_ms - fleet.now_ms)))
        elif each.job.may_be_left and not (leaves and each.known) and len(choice.taken) >= share:
            choice.kept.append(each.job.id)
        else:
            fleet.take(each.own_ms)
            choice.taken.append((each.job.id, each.held))
            choice.overruled += bool(better)
        fill()
    return choice
