"""Dispatch of a run's lines: queued within a window, and written to the result files as they end."""

import asyncio
import json
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError

from sluice.batch import names
from sluice.batch.files import LineResult, ResultFiles
from sluice.batch.job_store import Found, JobStore
from sluice.batch.source import Line, Source
from sluice.errors import QueueFull
from sluice.submission import NewJob

_POLL_S = 0.25
_MOST_BYTES = 64_000_000  # of lines in the window: a run must not fill the server
_MOST_QUEUED = 1 << 20  # lines, as long as the server has room
_MOST_TRIES = 5
_LONGEST_WAIT_S = 60.0
_LOST_WAIT_S = 0.5  # before a job is queued again of which the server has lost every trace
_FULL_WAIT_S = 5.0  # before a full server is asked to take a line again
_PATIENCE_S = 5.0  # for jobs whose end was asked for; longer, and no worker hears
_LEAVE_S = 1.0  # that a run which is left waits for the server
_PORTION, _PORTION_BYTES = 64, 4_000_000  # of jobs in one round trip

logger = logging.getLogger("sluice.batch")

T = TypeVar("T")


@dataclass(slots=True)
class _Child:
    """A line in the window, and the job that is currently queued for it."""

    line: Line
    retry: int = 0
    failures: int = 0
    custom_id: str = ""  # known when it is queued
    queued: bool = False
    due: float = 0.0  # if it is not: when to queue it, by the monotonic clock

    def again(self, wait_s: float) -> None:
        """Schedule the line under a new job id, since ids are used once, after `wait_s` seconds."""
        self.retry, self.queued, self.due = self.retry + 1, False, time.monotonic() + wait_s


class LineDispatcher:
    """Queues the lines of one run and collects results. `window`: lines of one model queued or running at once."""

    def __init__(
        self, run_id: str, source: Source, lines: Iterable[Line], children: JobStore, answers: ResultFiles, window: int
    ) -> None:
        self._run_id, self._source, self._server, self._answers = run_id, source, children, answers
        self._window, self._most = window, _MOST_QUEUED
        self._waiting = defaultdict[str, deque[Line]](deque)  # by model: a busy one keeps no other waiting
        for line in lines:
            self._waiting[line.model].append(line)
        self._children: dict[int, _Child] = {}  # by line number
        self._last_word: tuple[str, str] | None = None  # code and message, once the run is to end early

    @property
    def done(self) -> bool:
        """True if no line waits or runs."""
        return not self._children and not any(self._waiting.values())

    async def step(self) -> float:
        """Queue and collect once. Returns the seconds to wait before the next step: 0 if most of the window ended."""
        self._fill()
        await self._queue()
        before = len(self._children)
        await self._collect()
        return 0.0 if len(self._children) < before / 2 else _POLL_S

    async def end(self, code: str, message: str) -> None:
        """End all unfinished lines with this error; lines that finish meanwhile keep their answer."""
        self._last_word = code, message
        await self._server.cancel([self._job_id(child) for child in self._queued()])
        deadline = time.monotonic() + _PATIENCE_S
        while self._queued() and time.monotonic() < deadline:
            await self._collect()
            await asyncio.sleep(_POLL_S)
        await self._write([(child, self._failure(child, code, message)) for child in self._children.values()])
        rest = (_Child(line) for lines in self._waiting.values() for line in lines)
        while portion := list(islice(rest, _PORTION)):
            await _to_its_end(self._answers.add, [self._failure(child, code, message) for child in portion])
        self._waiting.clear()

    def _fill(self) -> None:
        bytes_queued = sum(child.line.length for child in self._children.values())
        for model, lines in self._waiting.items():
            room = self._window - sum(child.line.model == model for child in self._children.values())
            while lines and room > 0 and (bytes_queued < _MOST_BYTES or not self._children):
                line = lines.popleft()
                self._children[line.number] = _Child(line)
                bytes_queued += line.length
                room -= 1

    async def _queue(self) -> None:
        now, room = time.monotonic(), self._most - len(self._queued())
        due = [child for child in self._children.values() if not child.queued and child.due <= now]
        for portion in _portions(due[: max(room, 0)]):
            said = await self._server.submit(await asyncio.to_thread(self._new_jobs, portion))
            for child, answer in zip(portion, said, strict=True):
                match answer:
                    case QueueFull():
                        child.due = time.monotonic() + min(answer.retry_after_s, _LONGEST_WAIT_S)
                    case OutOfMemoryError():
                        child.due = time.monotonic() + _FULL_WAIT_S
                    case _:
                        child.queued = True
            if any(isinstance(answer, OutOfMemoryError) for answer in said):
                await self._take_back([child for child in portion if child.queued])
                return

    async def _take_back(self, newest: Sequence[_Child]) -> None:
        """A full server needs room for what its workers say, or nothing on it would ever end. So half of the window
        has to do, and a line more for each that ends."""
        queued = len(self._queued())
        self._most = max(queued // 2, 1)
        logger.warning("the server is out of memory: of %d lines, %d stay in its queue", queued, self._most)
        back = newest[max(len(newest) - (queued - self._most), 0) :]
        await self._server.forget([job for child in back for job in self._jobs(child)])
        for child in back:
            child.again(_FULL_WAIT_S)

    async def _collect(self) -> None:
        queued = self._queued()
        found = await self._server.look([self._job_id(child) for child in queued])
        endings = ((child, self._ending(child, each)) for child, each in zip(queued, found, strict=True))
        await self._write([(child, ended) for child, ended in endings if ended])

    def _ending(self, child: _Child, found: Found) -> LineResult | None:
        """None while the line is on its way, by another job perhaps."""
        if found.result is None:
            if not found.known and not self._last_word:
                child.again(_LOST_WAIT_S)
            return None
        match json.loads(found.result):
            case {"type": "failed", "error": dict(error)}:
                return self._failed(child, error)
            case {"type": "cancelled", "reason": str(reason)}:
                code, message = self._last_word or ("cancelled", f"The job was cancelled: {reason}.")
                return self._failure(child, code, message)
        return LineResult(self._job_id(child), self._custom_id(child), result=found.result)

    def _failed(self, child: _Child, error: dict[str, Any]) -> LineResult | None:
        # A deadline is the line's own wish: to try again would not be to keep it.
        if not error["retryable"] or error["type"] == "deadline" or child.failures + 1 >= _MOST_TRIES:
            return self._failure(child, error["type"], error["message"])
        if self._last_word:
            return self._failure(child, *self._last_word)
        child.again(min(2**child.failures, _LONGEST_WAIT_S) * random.uniform(0.5, 1.5))
        child.failures += 1
        return None

    async def _write(self, ended: Sequence[tuple[_Child, LineResult]]) -> None:
        """Write the files before deleting the jobs on the server, so that no crash loses a result."""
        if not ended:
            return
        jobs = [job for child, _ in ended for job in self._jobs(child)]
        try:
            await _to_its_end(self._answers.add, [ending for _, ending in ended])
            for child, _ in ended:
                del self._children[child.line.number]
            self._most += len(ended)
            await self._server.forget(jobs)
        except asyncio.CancelledError:  # the lines are in the files, so nobody would ask for these jobs again
            with suppress(TimeoutError):
                await asyncio.wait_for(self._server.forget(jobs), _LEAVE_S)
            raise

    def _queued(self) -> list[_Child]:
        return [child for child in self._children.values() if child.queued]

    def _jobs(self, child: _Child) -> Iterator[tuple[str, str]]:
        """Yield the id and model of each job that the line has had."""
        for retry in range(child.retry + 1):
            yield names.job(self._run_id, child.line.number, retry), child.line.model

    def _job_id(self, child: _Child) -> str:
        return names.job(self._run_id, child.line.number, child.retry)

    def _custom_id(self, child: _Child) -> str:
        return child.custom_id or self._source.request(child.line).custom_id

    def _new_jobs(self, children: Sequence[_Child]) -> list[NewJob]:
        """For a thread: lines may be large, and a backend has others to serve meanwhile."""
        return [self._new_job(child) for child in children]

    def _new_job(self, child: _Child) -> NewJob:
        request = self._source.request(child.line)
        child.custom_id = request.custom_id
        return NewJob(self._job_id(child), request.as_job(), child.line.model, "batch")

    def _failure(self, child: _Child, code: str, message: str) -> LineResult:
        return LineResult(self._job_id(child), self._custom_id(child), code=code, message=message)


def _portions(children: Sequence[_Child]) -> Iterator[list[_Child]]:
    portion, size = list[_Child](), 0
    for child in children:
        if portion and (len(portion) == _PORTION or size + child.line.length > _PORTION_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(child)
        size += child.line.length
    if portion:
        yield portion


async def _to_its_end(do: Callable[[T], None], given: T) -> None:
    """In a thread, since it waits for the disk; and to its end, for whoever is cancelled closes the files next."""
    writing = asyncio.ensure_future(asyncio.to_thread(do, given))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
