"""The record of this worker, by which the claims of the others leave jobs to it: how busy it is, what a prompt takes
here, and which prefixes it holds."""

import asyncio
import re
import secrets
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from redis.asyncio import Redis

from sluice.contract import keys
from worker.monitoring.sink import MetricsSink
from worker.queue.redis_server import ServerClock
from worker.queue.scripts import arguments, script
from worker.settings import Settings

_CLASSES_MS = (250, 1000, 4000)  # prompts are counted by what is left of each: below these, and more
_MARK = re.compile(r"([0-9a-f]{12}) ([0-9]{1,9})(?: |$)")


class EnginePrompts(Protocol):
    """The engine's costs of prompts, and losses of its prefix cache."""

    def prompt_cost(self) -> tuple[float, float]:
        """Return the measured seconds of a prompt's token, and of each pair of a token and one before it; 0 before the
        first prompt."""

    def take_lost(self) -> tuple[list[str], bool]:
        """Return the marks whose tokens the prefix cache has lost since the last call, and if it has lost all."""

    def marks(self) -> int:
        """Return the number of marks whose tokens the prefix cache holds."""


class _Unknown:
    """An engine that reports nothing."""

    def prompt_cost(self) -> tuple[float, float]:
        return 0.0, 0.0

    def take_lost(self) -> tuple[list[str], bool]:
        return [], False

    def marks(self) -> int:
        return 0


@dataclass(slots=True)
class JobPrompt:
    """The prompt of a claimed job until its first token: how much of it is left to compute. The job writes to it, on
    the event loop, and `FleetRecord` reads it."""

    nbytes: int = 0  # of the body, from its messages on; 0: not known
    hinted: int = 0  # tokens that the claim expected in the prefix cache
    marks: tuple[tuple[str, int], ...] = ()  # names of beginnings of the body, and where they end in it
    tokens: int = 0  # of the prompt; 0: it is not tokenized yet
    done: int | None = None  # tokens computed, or found in the cache; None: not known yet
    cached: int = 0  # of these, found in the cache
    is_text: bool = True  # it has no images, which take many bytes for their tokens
    is_computed: bool = False

    def tokenized(self, tokens: int, *, is_text: bool) -> None:
        """Record the length of the prompt."""
        self.tokens, self.is_text = tokens, is_text

    def advanced(self, done: int, cached: int) -> None:
        """Record that `done` tokens are computed or were found, `cached` of them in the prefix cache."""
        if not self.is_computed:  # else the row is recomputed after a failure
            self.done, self.cached = done, cached

    def computed(self) -> None:
        """Record the first token of the answer."""
        self.is_computed = True

    def token_marks(self) -> tuple[tuple[str, int], ...]:
        """Return the marks, and where they end in the prompt, whose last token no cache holds before the answer."""
        ends = ((name, min(end * self.tokens // self.nbytes, self.tokens - 1)) for name, end in self.marks)
        return tuple((name, end) for name, end in ends if end > 0)


class _Rates:
    """The tokens of a text, and the time between two rows that come free, as measured lately."""

    def __init__(self) -> None:
        self._tokens, self._kib = 0.0, 0.0
        self.gap_s, self._freed_at = 1.0, time.monotonic()

    @property
    def tokens_per_kib(self) -> float:
        """0 before the first prompt."""
        return self._tokens / self._kib if self._kib else 0.0

    def read(self, tokens: int, nbytes: int) -> None:
        """Record the tokens of a prompt of so many bytes."""
        keep = 0.9  # the last ten prompts or so count, each by its length
        self._tokens = keep * self._tokens + tokens
        self._kib = keep * self._kib + nbytes / 1024

    def freed(self) -> None:
        """Record that a row has come free."""
        now = time.monotonic()
        # Ten gaps or so; one of an idle worker says nothing: scripts/simulate fleet.
        self.gap_s += 0.1 * (min(now - self._freed_at, 30.0) - self.gap_s)
        self._freed_at = now


class FleetRecord:
    """Measures this worker for the claims of the others, and publishes it. All methods are for the event loop.

    Its id is drawn at the start, and anew when its prefix cache has lost all: so what was known of it before is void.
    The new one comes with the next publication, which deletes the record of the old one.
    Marks are names of beginnings of prompts: see `marks_of` in `sluice/submission.py`."""

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        clock: ServerClock,
        metrics: MetricsSink,
        engine: EnginePrompts | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        """`engine`: None if it reports nothing. `stopping`: once it is set, this worker has no rows for more jobs."""
        self._clock, self._metrics = clock, metrics
        self._engine = engine or _Unknown()
        self._affinity, self._stopping = settings.has_affinity, stopping or asyncio.Event()
        self._rows, self._lease_ms = settings.max_rows, int(settings.lease_s * 1000)
        self._per_tenant = settings.prefix_cache_per_tenant
        self._keys = [keys.fleet(settings.model_name), keys.ready(settings.model_name)]
        self._px = keys.prefix_mark(settings.model_name, "")
        self._store = script(redis, "record")
        self._wid, self._is_void = _draw(), False  # the second: the prefix cache has lost all since the id was drawn
        self._gone = dict[str, int]()  # ids that this worker had before, and in how many publications to delete them
        self._free = settings.max_rows  # in the last record
        self._prompts: dict[str, JobPrompt] = {}
        self._rates = _Rates()
        self._forgotten = dict[str, None]()  # marks to forget, the oldest first

    @property
    def wid(self) -> str:
        """The worker's id, by which submits wake it alone; empty without affinity: then all jobs wake it."""
        return self._wid if self._affinity else ""

    # The record

    def said(self, free_rows: int) -> tuple[str, str, int]:
        """Return the worker's id, its record (as `keys.fleet` describes it), and when it will be done with its prompts,
        in Unix milliseconds. `free_rows`: that interactive jobs may still take. Without affinity, the texts are empty
        and the time is 0."""
        if not self._affinity:
            return "", "", 0
        self._look_at_cache()
        self._free = 0 if self._stopping.is_set() else max(0, free_rows)
        now_ms, gap_ms = int(self._clock.now() * 1000), round(self._rates.gap_s * 1000)
        token_s, before_s = self._engine.prompt_cost()
        left_ms = [left_s * 1000 for each in self._prompts.values() if (left_s := self._left_s(each)) > 0]
        sums, counts = [0.0] * (len(_CLASSES_MS) + 1), [0] * (len(_CLASSES_MS) + 1)
        for each in left_ms:
            place = bisect_right(_CLASSES_MS, each)
            sums[place] += each
            counts[place] += 1
        in_use = self._rows - min(self._free, self._rows)
        # A row in use slows down the prompts: scripts/simulate fleet.
        busy_ms = round(sum(left_ms) + 150 * in_use + (0 if self._free else gap_ms))
        numbers = [now_ms + self._lease_ms, now_ms, self._free, self._rows, gap_ms]
        costs = f"{token_s * 1e6:.2f} {before_s * 1e9:.2f} {self._rates.tokens_per_kib:.0f}"
        classes = [f"{left:.0f} {count}" for left, count in zip(sums, counts, strict=True)]
        self._metrics.set_ready(busy_ms, self._engine.marks())
        return self._wid, " ".join([*map(str, numbers), costs, *classes]), now_ms + busy_ms

    def _left_s(self, prompt: JobPrompt) -> float:
        """Return the seconds that a prompt has left to compute."""
        if prompt.is_computed:
            return 0.0
        per_kib = self._rates.tokens_per_kib or 256  # English text has four bytes a token
        total = prompt.tokens or round(prompt.nbytes / 1024 * per_kib)
        done = min(total, prompt.hinted if prompt.done is None else prompt.done)
        token_s, before_s = self._engine.prompt_cost()
        token_s = token_s or 1 / 2000  # as `CostEstimate`
        return (total - done) * token_s + (total**2 - done**2) / 2 * before_s

    def _look_at_cache(self) -> None:
        """Take over what the prefix cache has lost."""
        lost, is_empty = self._engine.take_lost()
        self._is_void |= is_empty
        self._forgotten |= dict.fromkeys(lost)
        while len(self._forgotten) > 20_000:  # 5 MB or so; what is dropped expires in 20 minutes
            del self._forgotten[next(iter(self._forgotten))]

    async def publish(self) -> None:
        """Publish the record for a lease, and let the server forget the marks of lost prefixes. Raises RedisError,
        OSError."""
        if not self._affinity:
            return
        self._look_at_cache()
        if self._is_void:
            # A claim that is under way may write the record of the old id once more: it is deleted twice.
            self._gone[self._wid] = 2
            self._wid, self._is_void = _draw(), False
            self._forgotten.clear()
        said, gone = self.said(self._free), [*self._gone]
        for _ in range(4):  # 2,000 marks, as 70 long prompts have, in a third of a lease
            if not await self._publish(*said, gone):
                break
        self._gone = {wid: left - (wid in gone) for wid, left in self._gone.items() if left > 1 or wid not in gone}

    async def remove(self) -> None:
        """Delete the record: this worker leaves. Raises RedisError, OSError."""
        if self._affinity:
            await self._publish(self._wid, "", 0, [*self._gone, self._wid])

    async def _publish(self, wid: str, record: str, ready_ms: int, gone: list[str]) -> bool:
        """Return True if there are more marks to forget."""
        most = 500  # in one call of the script: about 1 ms of the server's time
        forgotten = [*islice(self._forgotten, most)]
        await self._store(
            keys=self._keys,
            args=arguments(
                worker=wid, record=record, ready_ms=ready_ms, lease_ms=self._lease_ms, prefix=self._px, gone=gone,
                forgotten=forgotten,
            ),
        )  # fmt: skip
        for name in forgotten:
            self._forgotten.pop(name, None)
        return bool(self._forgotten)

    # Jobs

    def claimed(self, job_id: str, marks: str, bytes_: int, expected_tokens: int) -> None:
        """Count the prompt of a claimed job as work, until it is computed or the job ends. `marks`: "mark end mark
        end ..." as in the job's hash, `bytes_`: of the body, from its messages on; empty and 0 if not known.
        `expected_tokens`: of the prompt, which the claim takes to be in this worker's prefix cache."""
        while len(self._prompts) >= 2 * self._rows + 64:  # more jobs than a worker claims
            del self._prompts[next(iter(self._prompts))]
        found = _MARK.findall(marks[:1024])[:31] if bytes_ > 0 else []
        ends = tuple((mark, int(end)) for mark, end in found if int(end) <= bytes_)
        self._prompts[job_id] = JobPrompt(bytes_, max(0, expected_tokens), ends)
        self._free = max(0, self._free - 1)

    def prompt(self, job_id: str, tenant: str = "") -> JobPrompt:
        """Return the prompt of a claimed job, to be kept up to date by the job while it runs."""
        prompt = self._prompts.get(job_id) or JobPrompt()  # of a job that computes nothing, which is no work
        if self._per_tenant:
            prompt.marks = tuple((f"{tenant}:{mark}", end) for mark, end in prompt.marks)
        for mark, _ in prompt.marks:
            self._forgotten.pop(mark, None)  # it is computed again: the claim has promised it
        return prompt

    def ended(self, job_id: str, *, had_row: bool) -> None:
        """Forget a job that has ended, or is not begun."""
        if had_row:
            self._rates.freed()
        prompt = self._prompts.pop(job_id, None)
        if prompt is None:
            return
        if prompt.tokens and prompt.nbytes and prompt.is_text:
            self._rates.read(prompt.tokens, prompt.nbytes)
        if prompt.is_computed:
            hinted = min(prompt.hinted, prompt.tokens)
            self._metrics.hinted(hinted, min(hinted, prompt.cached))

    def counted(
        self,
        *,
        cache: int = 0,
        load: int = 0,
        overruled_s: Sequence[float] = (),
        left_s: Sequence[float] = (),
        scanned: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Count a claim in the metrics. `cache`, `load`: jobs that it left to a worker that holds more of their prompts
        than this one, or that is less busy. `overruled_s`: of each job that it took although another worker would have
        been better, the seconds that the job has waited. `left_s`: of each job that it took and that was left before,
        the seconds since. `scanned`: jobs looked at. `seconds`: of the whole call."""
        self._metrics.looked(cache, load, len(overruled_s), left_s, scanned, seconds)


def _draw() -> str:
    """Return a new id of a worker: 6 characters."""
    return secrets.token_hex(3)
