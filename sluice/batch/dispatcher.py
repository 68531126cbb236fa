"""Dispatches the lines of a run: queues them within a window and writes each result to the files."""

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
from sluice.batch.job_store import JobStore, StoredJob
from sluice.batch.source import Line, Source
from sluice.errors import QueueFull
from sluice.submission import NewJob

_POLL_S = 0.25
_MAX_WINDOW_BYTES = 64_000_000  # of all lines in the window, so that a run does not fill the server
_MAX_QUEUED = 1 << 20  # lines, until the server runs out of memory
_MAX_TRIES = 5
_MAX_WAIT_S = 60.0
_LOST_WAIT_S = 0.5  # before a line is queued again whose job the server has lost
_FULL_WAIT_S = 5.0  # before a line that a full server rejected is queued again
_CANCEL_WAIT_S = 5.0  # for workers to end cancelled jobs; then no live worker holds them
_EXIT_WAIT_S = 1.0  # for the server, when the run is interrupted
_CHUNK_JOBS, _CHUNK_BYTES = 64, 4_000_000  # in one round trip

logger = logging.getLogger("sluice.batch")

T = TypeVar("T")


@dataclass(slots=True)
class _InFlightLine:
    """A line in the window, and the job that is currently queued for it."""

    line: Line
    retry: int = 0
    failures: int = 0
    custom_id: str = ""  # set when the line is queued
    queued: bool = False
    due: float = 0.0  # if not queued: when to queue it, by the monotonic clock

    def requeue_after(self, wait_s: float) -> None:
        """Schedule the line under a new job id, since ids are used once, after `wait_s` seconds."""
        self.retry, self.queued, self.due = self.retry + 1, False, time.monotonic() + wait_s


class LineDispatcher:
    """Queues the lines of one run and collects their results.

    `window`: the largest number of lines of one model that are queued or running at once.
    """

    def __init__(
        self, run_id: str, source: Source, lines: Iterable[Line], store: JobStore, results: ResultFiles, window: int
    ) -> None:
        self._run_id, self._source, self._store, self._results = run_id, source, store, results
        self._window, self._max_queued = window, _MAX_QUEUED
        self._waiting = defaultdict[str, deque[Line]](deque)  # by model, so that a slow model does not delay the others
        for line in lines:
            self._waiting[line.model].append(line)
        self._in_flight: dict[int, _InFlightLine] = {}  # by line number
        self._early_end: tuple[str, str] | None = None  # error code and message, set by `end`

    @property
    def done(self) -> bool:
        """True if every line has a result in the files."""
        return not self._in_flight and not any(self._waiting.values())

    async def step(self) -> float:
        """Queue lines and collect results, once. Return the seconds to wait before the next step: 0 if more than half
        of the lines in the window ended in this one.

        Raises `BatchRefused` if the input has changed, OSError if a result file cannot be written, and redis-py's error
        if the server refuses a command.
        """
        self._fill()
        await self._queue()
        before = len(self._in_flight)
        await self._collect()
        return 0.0 if len(self._in_flight) < before / 2 else _POLL_S

    async def end(self, code: str, message: str) -> None:
        """Cancel the queued jobs, and write this error for every unfinished line. A line that finishes within five
        seconds keeps its answer."""
        self._early_end = code, message
        await self._store.cancel([self._job_id(entry) for entry in self._queued()])
        deadline = time.monotonic() + _CANCEL_WAIT_S
        while self._queued() and time.monotonic() < deadline:
            await self._collect()
            await asyncio.sleep(_POLL_S)
        await self._write([(entry, self._error(entry, code, message)) for entry in self._in_flight.values()])
        rest = (_InFlightLine(line) for lines in self._waiting.values() for line in lines)
        while chunk := list(islice(rest, _CHUNK_JOBS)):
            await _run_in_thread(self._results.add, [self._error(entry, code, message) for entry in chunk])
        self._waiting.clear()

    def _fill(self) -> None:
        bytes_queued = sum(entry.line.length for entry in self._in_flight.values())
        for model, lines in self._waiting.items():
            free = self._window - sum(entry.line.model == model for entry in self._in_flight.values())
            while lines and free > 0 and (bytes_queued < _MAX_WINDOW_BYTES or not self._in_flight):
                line = lines.popleft()
                self._in_flight[line.number] = _InFlightLine(line)
                bytes_queued += line.length
                free -= 1

    async def _queue(self) -> None:
        now, free = time.monotonic(), self._max_queued - len(self._queued())
        due = [entry for entry in self._in_flight.values() if not entry.queued and entry.due <= now]
        for chunk in _chunks(due[: max(free, 0)]):
            outcomes = await self._store.submit(await asyncio.to_thread(self._new_jobs, chunk))
            for entry, outcome in zip(chunk, outcomes, strict=True):
                match outcome:
                    case QueueFull():
                        entry.due = time.monotonic() + min(outcome.retry_after_s, _MAX_WAIT_S)
                    case OutOfMemoryError():
                        entry.due = time.monotonic() + _FULL_WAIT_S
                    case _:
                        entry.queued = True
            if any(isinstance(outcome, OutOfMemoryError) for outcome in outcomes):
                await self._halve_queue([entry for entry in chunk if entry.queued])
                return

    async def _halve_queue(self, newest: Sequence[_InFlightLine]) -> None:
        """Halve the limit of queued lines, and withdraw the ones of `newest` that exceed it. Each line that ends raises
        the limit by one.

        A full server needs memory for the events of its workers, or no job on it could end.
        """
        queued = len(self._queued())
        self._max_queued = max(queued // 2, 1)
        logger.warning("the server is out of memory: %d lines were queued, now at most %d", queued, self._max_queued)
        excess = newest[max(len(newest) - (queued - self._max_queued), 0) :]
        await self._store.delete([job for entry in excess for job in self._jobs_of(entry)])
        for entry in excess:
            entry.requeue_after(_FULL_WAIT_S)

    async def _collect(self) -> None:
        queued = self._queued()
        jobs = await self._store.read([self._job_id(entry) for entry in queued])
        results = ((entry, self._result(entry, stored)) for entry, stored in zip(queued, jobs, strict=True))
        await self._write([(entry, result) for entry, result in results if result])

    def _result(self, entry: _InFlightLine, stored: StoredJob) -> LineResult | None:
        """Return the result of a line; None if its job has not ended, or if the line is to be queued again."""
        if stored.result is None:
            if not stored.exists and not self._early_end:
                entry.requeue_after(_LOST_WAIT_S)
            return None
        match json.loads(stored.result):
            case {"type": "failed", "error": dict(error)}:
                return self._retry_or_fail(entry, error)
            case {"type": "cancelled", "reason": str(reason)}:
                code, message = self._early_end or ("cancelled", f"The job was cancelled: {reason}.")
                return self._error(entry, code, message)
        return LineResult(self._job_id(entry), self._custom_id(entry), result=stored.result)

    def _retry_or_fail(self, entry: _InFlightLine, error: dict[str, Any]) -> LineResult | None:
        # A deadline is part of the request, so a missed one is not retried.
        if not error["retryable"] or error["type"] == "deadline" or entry.failures + 1 >= _MAX_TRIES:
            return self._error(entry, error["type"], error["message"])
        if self._early_end:
            return self._error(entry, *self._early_end)
        entry.requeue_after(min(2**entry.failures, _MAX_WAIT_S) * random.uniform(0.5, 1.5))
        entry.failures += 1
        return None

    async def _write(self, ended: Sequence[tuple[_InFlightLine, LineResult]]) -> None:
        """Write the results, then delete the jobs on the server: in this order no crash loses a result."""
        if not ended:
            return
        jobs = [job for entry, _ in ended for job in self._jobs_of(entry)]
        try:
            await _run_in_thread(self._results.add, [result for _, result in ended])
            for entry, _ in ended:
                del self._in_flight[entry.line.number]
            self._max_queued += len(ended)
            await self._store.delete(jobs)
        except asyncio.CancelledError:  # with the lines in the files, no later run would delete these jobs
            with suppress(TimeoutError):
                await asyncio.wait_for(self._store.delete(jobs), _EXIT_WAIT_S)
            raise

    def _queued(self) -> list[_InFlightLine]:
        return [entry for entry in self._in_flight.values() if entry.queued]

    def _jobs_of(self, entry: _InFlightLine) -> Iterator[tuple[str, str]]:
        """Yield the id and the model of each job queued for the line so far."""
        for retry in range(entry.retry + 1):
            yield names.job(self._run_id, entry.line.number, retry), entry.line.model

    def _job_id(self, entry: _InFlightLine) -> str:
        return names.job(self._run_id, entry.line.number, entry.retry)

    def _custom_id(self, entry: _InFlightLine) -> str:
        return entry.custom_id or self._source.request(entry.line).custom_id

    def _new_jobs(self, entries: Sequence[_InFlightLine]) -> list[NewJob]:
        """Read and serialize lines. Runs in a thread: large lines would block the caller's event loop."""
        return [self._new_job(entry) for entry in entries]

    def _new_job(self, entry: _InFlightLine) -> NewJob:
        request = self._source.request(entry.line)
        entry.custom_id = request.custom_id
        return NewJob(self._job_id(entry), request.as_job(), entry.line.model, "batch")

    def _error(self, entry: _InFlightLine, code: str, message: str) -> LineResult:
        return LineResult(self._job_id(entry), self._custom_id(entry), code=code, message=message)


def _chunks(entries: Sequence[_InFlightLine]) -> Iterator[list[_InFlightLine]]:
    chunk, size = list[_InFlightLine](), 0
    for entry in entries:
        if chunk and (len(chunk) == _CHUNK_JOBS or size + entry.line.length > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += entry.line.length
    if chunk:
        yield chunk


async def _run_in_thread(write: Callable[[T], None], argument: T) -> None:
    """Call `write` in a thread, since it waits for the disk. If cancelled, wait for it to return: the caller closes the
    files next."""
    writing = asyncio.ensure_future(asyncio.to_thread(write, argument))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await writing
        raise
