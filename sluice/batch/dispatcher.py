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

from sluice import errors
from sluice.batch.files import LineError, LineResult, ResultFiles
from sluice.batch.registry import JobStores
from sluice.batch.source import Line, Source
from sluice.batch.transitions import LineAction, LineEvent, LineState, line_step
from sluice.contract.batch import Batch, line_job_id
from sluice.contract.events import JobError, parse_as
from sluice.errors import QueueFull, ServerFull
from sluice.openai import error_reply
from sluice.submission import NewJob, Submitted
from sluice.transport import MAX_CALLS
from sluice.wording import cancelled_sentence

_POLL_S = 0.25
_MAX_WAIT_S = 60.0
_WORKERS_S = 5.0  # for workers to end jobs: cancelled ones, which no live worker holds then, or some on a full server

logger = logging.getLogger("sluice.batch")

T = TypeVar("T")

Outcome = bytes | LineError  # of a line: an answer, as the worker wrote it, or an error


@dataclass(slots=True)
class InFlightLine:
    """A line in the window, and the job that is currently queued for it."""

    line: Line
    retry: int = 0
    failures: int = 0
    custom_id: str = ""  # set when the line is queued
    wants_json: bool = False  # likewise
    state: LineState = LineState.WAITING
    due: float = 0.0  # if waiting: when to queue it, by the monotonic clock
    run_error: Outcome | None = None  # if closing

    @property
    def has_job(self) -> bool:
        """True if a job of the line is on the server."""
        return self.state in (LineState.QUEUED, LineState.CLOSING)

    def apply(self, event: LineEvent, *, wait_s: float = 0.0, outcome: Outcome | None = None) -> Outcome | None:
        """Enter the state that follows. Returns the line's outcome if it has ended: that of the event, or the run's.
        `wait_s`: before the line is queued again."""
        self.state, action = line_step(self.state, event)
        match action:
            case LineAction.POSTPONE | LineAction.RETRY:
                self.retry += action is LineAction.RETRY
                self.failures += event is LineEvent.JOB_TO_RETRY
                self.due = time.monotonic() + wait_s
            case LineAction.CLOSE:
                self.run_error = outcome
            case LineAction.RECORD:
                return outcome
            case LineAction.RECORD_RUN_ERROR:
                return self.run_error
        return None


class LineDispatcher:
    """Queues the lines of one run and collects their results.

    `window`: the largest number of lines of one model that are queued or running at once.
    """

    def __init__(
        self, batch: Batch, source: Source, lines: Iterable[Line], store: JobStores, results: ResultFiles, window: int
    ) -> None:
        self._run_id = batch.id
        self._tenant = batch.sluice.tenant
        self._source = source
        self._store = store
        self._results = results
        self._window = window
        self._max_queued = 1 << 20  # lines, until the server runs out of memory
        self._waiting = defaultdict[str, deque[Line]](deque)  # by model, so that a slow model does not delay the others
        for line in lines:
            self._waiting[line.model].append(line)
        self._in_flight: dict[int, InFlightLine] = {}  # by line number

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
        error = LineError(code, message)
        await self._store.cancel([(self._job_id(entry), entry.line.model) for entry in self._queued()])
        await self._end_all(error)
        deadline = time.monotonic() + _WORKERS_S
        while self._in_flight and time.monotonic() < deadline:
            await self._collect()
            await asyncio.sleep(_POLL_S)
        await self._end_all(error)
        rest = (InFlightLine(line) for lines in self._waiting.values() for line in lines)
        while chunk := list(islice(rest, MAX_CALLS)):
            await _run_in_thread(self._results.add, [self._result(entry, error) for entry in chunk])
        self._waiting.clear()

    def _fill(self) -> None:
        max_bytes = 64_000_000  # of all lines in the window, so that a run does not fill the server
        bytes_queued = sum(entry.line.length for entry in self._in_flight.values())
        for model, lines in self._waiting.items():
            free = self._window - sum(entry.line.model == model for entry in self._in_flight.values())
            while lines and free > 0 and (bytes_queued < max_bytes or not self._in_flight):
                line = lines.popleft()
                self._in_flight[line.number] = InFlightLine(line)
                bytes_queued += line.length
                free -= 1

    async def _queue(self) -> None:
        now, free = time.monotonic(), self._max_queued - len(self._queued())
        due = [entry for entry in self._in_flight.values() if entry.state is LineState.WAITING and entry.due <= now]
        for chunk in _chunks(due[: max(free, 0)]):
            outcomes = await self._store.submit(await asyncio.to_thread(self._new_jobs, chunk))
            for entry, outcome in zip(chunk, outcomes, strict=True):
                _apply_submission(entry, outcome)
            if any(isinstance(outcome, ServerFull) for outcome in outcomes):
                await self._halve_queue([entry for entry in chunk if entry.has_job])
                return

    async def _halve_queue(self, newest: Sequence[InFlightLine]) -> None:
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
            entry.apply(LineEvent.JOB_GONE, wait_s=_WORKERS_S)

    async def _collect(self) -> None:
        queued = self._queued()
        jobs = await self._store.read([(self._job_id(entry), entry.line.model) for entry in queued])
        await self._write([_apply_job(entry, *job) for entry, job in zip(queued, jobs, strict=True)], queued)

    async def _end_all(self, error: LineError) -> None:
        entries = list(self._in_flight.values())
        await self._write([entry.apply(LineEvent.RUN_ENDED, outcome=error) for entry in entries], entries)

    async def _write(self, outcomes: Sequence[Outcome | None], entries: Sequence[InFlightLine]) -> None:
        """Write the outcomes of the lines that have one, and then delete their jobs on the server: in this order no
        crash loses a result."""
        pairs = zip(entries, outcomes, strict=True)
        ended = [(entry, self._result(entry, outcome)) for entry, outcome in pairs if outcome is not None]
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
                async with asyncio.timeout(1.0):  # the run is interrupted
                    await self._store.delete(jobs)
            raise

    def _queued(self) -> list[InFlightLine]:
        return [entry for entry in self._in_flight.values() if entry.has_job]

    def _jobs_of(self, entry: InFlightLine) -> Iterator[tuple[str, str]]:
        """Yield the id and the model of each job queued for the line so far."""
        for retry in range(entry.retry + 1):
            yield line_job_id(self._run_id, entry.line.number, retry), entry.line.model

    def _job_id(self, entry: InFlightLine) -> str:
        return line_job_id(self._run_id, entry.line.number, entry.retry)

    def _custom_id(self, entry: InFlightLine) -> str:
        return entry.custom_id or self._source.request(entry.line).custom_id

    def _new_jobs(self, entries: Sequence[InFlightLine]) -> list[NewJob]:
        """Read and serialize lines. Runs in a thread: large lines would block the caller's event loop."""
        return [self._new_job(entry) for entry in entries]

    def _new_job(self, entry: InFlightLine) -> NewJob:
        request = self._source.request(entry.line)
        entry.custom_id, entry.wants_json = request.custom_id, request.wants_json
        own = {"tenant": self._tenant} if self._tenant is not None else {}  # instead of one that the line names
        return NewJob(self._job_id(entry), request.as_job() | own, entry.line.model, "batch", webhooks="none")

    def _result(self, entry: InFlightLine, outcome: Outcome) -> LineResult:
        job_id, custom_id = self._job_id(entry), self._custom_id(entry)
        if isinstance(outcome, LineError):
            return LineResult(job_id, custom_id, error=outcome)
        return LineResult(job_id, custom_id, result=outcome)


def _apply_submission(entry: InFlightLine, outcome: Submitted | QueueFull | ServerFull) -> None:
    match outcome:
        case QueueFull():
            entry.apply(LineEvent.JOB_REJECTED, wait_s=min(outcome.retry_after_s, _MAX_WAIT_S))
        case ServerFull():
            entry.apply(LineEvent.JOB_REJECTED, wait_s=_WORKERS_S)
        case _:
            entry.apply(LineEvent.JOB_QUEUED)


def _apply_job(entry: InFlightLine, result: bytes | None, exists: bool) -> Outcome | None:
    """Apply what has happened to the queued job of a line. Returns the line's outcome if it has ended."""
    if result is None:
        return None if exists else entry.apply(LineEvent.JOB_GONE, wait_s=0.5)
    match json.loads(result):
        case {"type": "failed", "error": dict(error)}:
            return _apply_failure(entry, parse_as(JobError, error))
        case {"type": "cancelled", "reason": str(reason)}:
            cancelled = _line_error("cancelled", cancelled_sentence(reason), errors.JobCancelled(reason))
            return entry.apply(LineEvent.JOB_CANCELLED, outcome=cancelled)
        case {"choices": [dict(choice), *_]} if entry.wants_json and (problem := _json_problem(choice)):
            return entry.apply(LineEvent.JOB_ENDED, outcome=LineError("answer_not_json", problem, 200, result))
    return entry.apply(LineEvent.JOB_ENDED, outcome=result)


def _apply_failure(entry: InFlightLine, error: JobError) -> Outcome | None:
    # A deadline is part of the request, so a missed one is not retried. Others are tried five times.
    if not error.retryable or error.type == "deadline" or entry.failures + 1 >= 5:
        failed = _line_error(error.type, error.message, errors.JobFailed(error))
        return entry.apply(LineEvent.JOB_ENDED, outcome=failed)
    wait_s = min(2**entry.failures, _MAX_WAIT_S) * random.uniform(0.5, 1.5)
    return entry.apply(LineEvent.JOB_TO_RETRY, wait_s=wait_s)


def _line_error(code: str, message: str, error: errors.SluiceError) -> LineError:
    """Return the error of a line whose job ended with this one."""
    reply = error_reply(error)
    return LineError(code, message, reply.status, json.dumps(reply.body).encode())


def _json_problem(choice: dict[str, Any]) -> str | None:
    """Return what is wrong with an answer that should be JSON; None for JSON, and for tool calls without text."""
    message = choice.get("message") or {}
    content = message.get("content") or ""
    if message.get("tool_calls") and not content:
        return None
    try:
        json.loads(content)
    except RecursionError:
        return None  # it is nested deeper than Python can read, which is no fault of it
    except ValueError:
        is_cut = choice.get("finish_reason") == "length"
        remedy = "it was cut off, so raise max_tokens." if is_cut else "ask again, or for less."
        return f"response_format: the answer is not JSON; {remedy}"
    return None


def _chunks(entries: Sequence[InFlightLine]) -> Iterator[list[InFlightLine]]:
    """Divide lines into those that one round trip queues: at most 4 MB, so that others do not wait for long."""
    chunk, size = list[InFlightLine](), 0
    for entry in entries:
        if chunk and (len(chunk) == MAX_CALLS or size + entry.line.length > 4_000_000):
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
