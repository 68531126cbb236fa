"""Workers as fluids: rows that decode, prompts that share what is left of a step, and a prefix cache.

Between two events all rates are constant, so nothing is stepped. The rules are those of the engine: rows that decode
come first, a step has a target length, three of four steps belong to the prompt that ends soonest and one to the
oldest, and a prompt that waits finds what another one has left in the cache."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

Path = tuple[int, ...]  # numbers of the texts that a prompt consists of
Then = Callable[[], None]

RATE = 2000.0  # tokens in a second at the beginning of a prompt; a worker assumes the same before it has measured
DEPTH = 40_000.0  # tokens before a token that make it twice as dear, for their attention
_STEP_S = 0.100  # SLUICE_STEP_MS
_DECODE_S, _ROW_S = 0.015, 0.001  # a decode step, and each row in it


def work(done: float, tokens: float) -> float:
    """Return the cost of a prompt's tokens from `done` on, in tokens at its beginning. At least 16 are computed."""
    return max(16.0, (tokens - done) + (tokens * tokens - done * done) / (2 * DEPTH))


class Texts:
    """Pieces of prompts: a message, or another run of text that prompts share as a whole or not at all. A prompt is the
    path of its pieces, and a piece belongs to what is before it."""

    def __init__(self, dice: Random, byte_error: float) -> None:
        """`byte_error`: the sigma of a lognormal of the bytes of a token, which differ from text to text."""
        self._dice, self._error = dice, byte_error
        self.tokens = [0]
        self.ends = [0]  # tokens with all before it
        self.byte_ends = [0]

    def after(self, path: Path, tokens: float) -> Path:
        """Return the path with another piece at its end."""
        before = path[-1] if path else 0
        self.tokens.append(int(tokens))
        self.ends.append(self.ends[before] + int(tokens))
        size = int(tokens * 4 * self._dice.lognormvariate(0, self._error))  # 4 bytes a token, as English has
        self.byte_ends.append(self.byte_ends[before] + size)
        return (*path, len(self.tokens) - 1)

    def length(self, path: Path) -> int:
        """Return the tokens of a prompt."""
        return self.ends[path[-1]] if path else 0


class Cache:
    """The pieces whose KV a worker has. The least recently used one leaves first, which always is the end of a path."""

    def __init__(self, texts: Texts, capacity: float) -> None:
        self.texts, self._capacity = texts, capacity
        self._size = 0.0  # tokens
        self._order = OrderedDict[int, None]()

    def found(self, path: Path) -> int:
        """Return how many pieces of the path are here."""
        return next((at for at in range(len(path), 0, -1) if path[at - 1] in self._order), 0)

    def keep(self, path: Path) -> list[int]:
        """Add all pieces of the path, and return those that were evicted."""
        for piece in path:
            if piece not in self._order:
                self._size += self.texts.tokens[piece]
        self.touch(path)
        evicted = list[int]()
        while self._size > self._capacity:
            piece, _ = self._order.popitem(last=False)
            self._size -= self.texts.tokens[piece]
            evicted.append(piece)
        return evicted

    def touch(self, path: Path) -> None:
        """Make the pieces of the path the last to be evicted, its beginning after its end."""
        for piece in reversed(path):
            self._order[piece] = None
            self._order.move_to_end(piece)


_numbers = count()


@dataclass(slots=True, eq=False)
class Job:
    """A job, and what became of it. Times are seconds from the start; below 0: not yet."""

    session: int
    path: Path
    total: int  # tokens of the prompt
    answer: int  # tokens
    at_s: float
    then: Then | None
    number: int = field(default_factory=_numbers.__next__)
    claimed_s: float = -1.0
    first_s: float = -1.0
    ended_s: float = -1.0
    hit: int = 0  # tokens found in the cache
    left: float = 0.0  # work of its prompt
    idle_s: float = 0.0  # of its time in the queue, how long a worker had nothing to do


class Worker:
    """A worker with so many rows, which computes `rate` tokens a second at the beginning of a prompt."""

    def __init__(self, number: int, rows: int, rate: float, cache: Cache) -> None:
        self.number, self.rows = number, rows
        self.rate, self.cache = rate, cache
        self.alive = True
        self.prompts = dict[int, Job]()  # in the order in which they came
        self.decoding = list[tuple[float, int, Job]]()  # a heap, by the token count at which they end
        self.queue = list[Job]()  # that a router has sent
        self.gap_s = 1.0  # mean time between two rows that come free
        self.version = 0  # of its plan
        self._tokens = 0.0  # decoded by a row that was there from the start
        self._now_s = self._freed_s = 0.0

    @property
    def running(self) -> int:
        """Rows in use."""
        return len(self.prompts) + len(self.decoding)

    @property
    def free(self) -> int:
        """Rows that a job may take."""
        return self.rows - self.running if self.alive else 0

    def start(self, job: Job) -> None:
        """Begin with a prompt, after what the cache has of it."""
        self._look_up(job)
        job.left = work(job.hit, job.total)
        self.prompts[job.number] = job

    def _look_up(self, job: Job) -> int:
        """Take what the cache has of the prompt, and return its tokens."""
        found = job.path[: self.cache.found(job.path)]
        self.cache.touch(found)
        job.hit = max(job.hit, self.cache.texts.length(found))
        return job.hit

    def advance(self, now_s: float) -> None:
        """Compute until this time, at which no later event may have happened yet."""
        past_s, self._now_s = now_s - self._now_s, now_s
        prompt_rate, row_rate = self._rates()
        for job, share in self._shares():
            job.left -= share * prompt_rate * past_s
        self._tokens += row_rate * past_s

    def next_event_s(self) -> float | None:
        """Return when a prompt or an answer ends next, or None if nothing runs."""
        prompt_rate, row_rate = self._rates()
        ends = [max(0.0, job.left) / (share * prompt_rate) for job, share in self._shares()]
        if self.decoding and row_rate:
            ends.append(max(0.0, self.decoding[0][0] - self._tokens) / row_rate)
        return self._now_s + min(ends) + 1e-7 if ends else None

    def _rates(self) -> tuple[float, float]:
        """Return the prompt work in a second, and the tokens of each row in a second."""
        rows = len(self.decoding)
        decode_s = (_DECODE_S + _ROW_S * rows) * RATE / self.rate
        if not self.prompts:
            return 0.0, 1.0 / decode_s
        if not rows:
            return self.rate, 0.0
        step_s = max(_STEP_S, decode_s * 1.1)
        return self.rate * (step_s - decode_s) / step_s, 1.0 / step_s

    def _shares(self) -> list[tuple[Job, float]]:
        """Return the prompts that advance, with their shares of the time."""
        if not self.prompts:
            return []
        oldest, soonest = next(iter(self.prompts.values())), min(self.prompts.values(), key=lambda job: job.left)
        return [(oldest, 1.0)] if soonest is oldest else [(soonest, 0.75), (oldest, 0.25)]

    def pop_computed(self) -> tuple[list[Job], list[int]]:
        """Let prompts that are computed decode. Return them, and the pieces that were evicted for them."""
        computed, evicted = [job for job in self.prompts.values() if job.left <= 1e-3], list[int]()
        for job in computed:
            del self.prompts[job.number]
            heappush(self.decoding, (self._tokens + job.answer, job.number, job))
            evicted += self.cache.keep(job.path)
        for job in self.prompts.values() if computed else ():
            had = job.hit
            if self._look_up(job) > had:
                job.left = min(job.left, work(job.hit, job.total))
        return computed, evicted

    def pop_ended(self) -> list[Job]:
        """Remove and return the answers that have ended."""
        ended = list[Job]()
        while self.decoding and self.decoding[0][0] <= self._tokens + 1e-6:
            ended.append(heappop(self.decoding)[2])
            self.gap_s += 0.1 * (min(self._now_s - self._freed_s, 30.0) - self.gap_s)
            self._freed_s = self._now_s
        return ended

    def crash(self) -> list[Job]:
        """Lose all that is here, and return the jobs that ran or waited."""
        lost = [*self.prompts.values(), *(job for _, _, job in self.decoding), *self.queue]
        for held in (self.prompts, self.decoding, self.queue):
            held.clear()
        self.alive = False
        self.version += 1
        return lost
