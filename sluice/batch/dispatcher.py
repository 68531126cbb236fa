"""Dispatches the lines of a run: queues them within a window and writes each result to the files."""

import asyncio
import json
import logging
import random
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from sluice import errors
from sluice.batch.endpoints import CHAT, Endpoint
from sluice.batch.files import LineError, LineResult, ResultFiles, kept_record
from sluice.batch.outcomes import NOT_JSON, changes_for, details_of, limit_of, most_retries, raised_limit, wants_json
from sluice.batch.registry import JobStores, TokenLimits
from sluice.batch.source import Line, Source
from sluice.batch.transitions import LineAction, LineEvent, LineState, line_step
from sluice.contract.batch import Batch, LineDetails, line_job_id
from sluice.contract.events import JobError, parse_as
from sluice.errors import QueueFull, ServerFull
from sluice.interfaces.errors import ApiError
from sluice.submission import NewJob, Submitted
from sluice.transport import MAX_CALLS
from sluice.wording import cancelled_sentence

_POLL_S = 0.25
_MAX_WAIT_S = 60.0
_WORKERS_S = 5.0  # for workers to end jobs: cancelled ones, which no live worker holds then, or some on a full server

logger = logging.getLogger("sluice.batch")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a line's job, or of its run: an answer as the worker wrote it, or an error."""

    details: LineDetails
    result: bytes = b""
    error: LineError | None = None


@dataclass(slots=True)
class InFlightLine:
    """A line in the window, and the job that is currently queued for it."""

    line: Line
    retry: int = 0
    failures: int = 0
    custom_id: str = ""  # set when the line is queued
    endpoint: Endpoint = CHAT  # likewise
    wants_json: bool = False  # likewise
    state: LineState = LineState.WAITING
    due: float = 0.0  # if waiting: when to queue it, by the monotonic clock
    run_error: Outcome | None = None  # if closing
    mends: int = 0  # how many times it was run again for the kind of its outcome
    last: LineDetails | None = None  # of the outcome for which it is run again; None once its request is changed
    changes: dict[str, Any] = field(default_factory=dict)  # to its request
    limit: int | None = None  # of tokens, in the request that is queued
    to_keep: Outcome | None = None  # before its next job is queued

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
            case LineAction.MEND:
                self.retry += 1
                self.mends += 1
                self.failures = 0
                self.due = time.monotonic() + wait_s
                self.to_keep = outcome
                self.last = outcome.details if outcome else None
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
        self._limits = _Limits(batch.sluice.retry)
        self._max_queued = 1 << 20  # lines, until the server runs out of memory
        self._waiting = defaultdict[str, deque[Line]](deque)  # by model, so that a slow model does not delay the others
        for line in lines:
            self._waiting[line.model].append(line)
        self._in_flight: dict[int, InFlightLine] = {}  # by line number

    @property
    def done(self) -> bool:
        """True if every line has a result in the files."""
        return not self._in_flight and not any(self._waiting.values())

    def left(self) -> Counter[str]:
        """Return the number of unfinished lines of each model."""
        counts = Counter({model: len(lines) for model, lines in self._waiting.items()})
        counts.update(entry.line.model for entry in self._in_flight.values())
        return counts

    async def step(self, held: Collection[str] = ()) -> float:
        """Queue lines, but none of the `held` models, and collect results, once. Return the seconds to wait before the
        next step: 0 if more than half of the lines in the window ended in this one.

        Raises `BatchRefused` if the input has changed, OSError if a result file cannot be written, and redis-py's error
        if the server refuses a command.
        """
        self._fill(held)
        models = {each.line.model for each in self._in_flight.values() if each.last or "cut" in self._limits.retry}
        if models and self._limits.are_old:
            self._limits.update(await self._store.token_limits(models))
        await self._queue()
        before = len(self._in_flight)
        await self._collect()
        return 0.0 if len(self._in_flight) < before / 2 else _POLL_S

    async def end(self, code: str, message: str) -> None:
        """Cancel the queued jobs, and write this error for every unfinished line. A line that finishes within five
        seconds keeps its answer."""
        error = Outcome(LineDetails("failed"), error=LineError(code, message))
        await self._find_queued()
        await self._store.cancel([(self._job_id(entry), entry.line.model) for entry in self._queued()])
        await self._end_all(error)
        deadline = time.monotonic() + _WORKERS_S
        while self._in_flight and time.monotonic() < deadline:
            await self._collect()
            await asyncio.sleep(_POLL_S)
        await self._end_all(error)
        rest = (self._entry(line) for lines in self._waiting.values() for line in lines)
        while chunk := list(islice(rest, MAX_CALLS)):
            # Their custom_ids are read from the input, whose lines may be long.
            await _run_in_thread(
                lambda entries: self._results.add([self._result(each, error) for each in entries]), chunk
            )
        self._waiting.clear()

    async def _find_queued(self) -> None:
        """Find the jobs that a process which fed the run before had queued: those of the first lines that are left."""
        self._fill(())
        while waiting := [entry for entry in self._in_flight.values() if entry.state is LineState.WAITING]:
            jobs = await self._store.read([(self._job_id(entry), entry.line.model) for entry in waiting])
            known = [entry for entry, (result, exists) in zip(waiting, jobs, strict=True) if exists or result]
            made = await asyncio.to_thread(self._new_jobs, known)
            found = [entry for entry, job in zip(known, made, strict=True) if isinstance(job, NewJob)]
            if not found:
                return
            for entry in found:
                entry.apply(LineEvent.JOB_QUEUED)
            await self._collect()  # one that failed may have been queued again, under the id of its retry

    def _fill(self, held: Collection[str]) -> None:
        max_bytes = 64_000_000  # of all lines in the window, so that a run does not fill the server
        bytes_queued = sum(entry.line.length for entry in self._in_flight.values())
        in_flight = Counter(entry.line.model for entry in self._in_flight.values())
        for model, lines in self._waiting.items():
            if model in held:
                continue
            free = self._window - in_flight[model]
            while lines and free > 0 and (bytes_queued < max_bytes or not self._in_flight):
                line = lines.popleft()
                self._in_flight[line.number] = self._entry(line)
                bytes_queued += line.length
                free -= 1

    def _entry(self, line: Line) -> InFlightLine:
        """Return a line for the window: one that is run again goes on with its next job."""
        kept = self._results.kept(line.digest)
        if kept is None:
            return InFlightLine(line)
        return InFlightLine(line, retry=kept.retry, mends=kept.mends, last=kept.last, changes=dict(kept.changes))

    async def _queue(self) -> None:
        now, free = time.monotonic(), self._max_queued - len(self._queued())
        due = [entry for entry in self._in_flight.values() if entry.state is LineState.WAITING and entry.due <= now]
        for chunk in _chunks(due[: max(free, 0)]):
            made = list(zip(chunk, await asyncio.to_thread(self._new_jobs, chunk), strict=True))
            if refused := [(entry, made) for entry, made in made if isinstance(made, Outcome)]:
                ended = [entry.apply(LineEvent.REFUSED, outcome=outcome) for entry, outcome in refused]
                await self._write(ended, [entry for entry, _ in refused])
            jobs = [(entry, job) for entry, job in made if isinstance(job, NewJob)]
            outcomes = await self._store.submit([job for _, job in jobs])
            for (entry, _), outcome in zip(jobs, outcomes, strict=True):
                _apply_submission(entry, outcome)
            if any(isinstance(outcome, ServerFull) for outcome in outcomes):
                await self._halve_queue([entry for entry, _ in jobs if entry.has_job])
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
        pairs = zip(queued, jobs, strict=True)
        outcomes = [_apply_job(entry, self._job_id(entry), *job, self._limits) for entry, job in pairs]
        await self._keep([entry for entry in queued if entry.to_keep])
        await self._write(outcomes, queued)

    async def _keep(self, entries: Sequence[InFlightLine]) -> None:
        """Write the outcomes of lines that are run again to the disk, before their next jobs are queued."""
        to_keep = [(entry, entry.to_keep) for entry in entries if entry.to_keep]
        if to_keep:
            records = await asyncio.to_thread(lambda: [self._record(*each) for each in to_keep])
            await _run_in_thread(self._results.keep, records)
        for entry in entries:
            entry.to_keep = None

    def _record(self, entry: InFlightLine, outcome: Outcome) -> bytes:
        result = self._result(entry, outcome, entry.retry - 1)
        return kept_record(result.as_line(), entry.retry, entry.mends, entry.changes)

    async def _end_all(self, error: Outcome) -> None:
        entries = list(self._in_flight.values())
        await self._write([entry.apply(LineEvent.RUN_ENDED, outcome=error) for entry in entries], entries)

    async def _write(self, outcomes: Sequence[Outcome | None], entries: Sequence[InFlightLine]) -> None:
        """Write the outcomes of the lines that have one, and then delete their jobs on the server: in this order no
        crash loses a result."""
        ended = [(entry, outcome) for entry, outcome in zip(entries, outcomes, strict=True) if outcome is not None]
        if not ended:
            return
        jobs = [job for entry, _ in ended for job in self._jobs_of(entry)]
        results = await asyncio.to_thread(lambda: [self._result(*each) for each in ended])
        try:
            await _run_in_thread(self._results.add, results)
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

    def _new_jobs(self, entries: Sequence[InFlightLine]) -> list[NewJob | Outcome]:
        """Read and translate lines; the outcome of one that its endpoint refuses is the refusal. Runs in a
        thread: large lines would block the caller's event loop."""
        return [self._new_job(entry) for entry in entries]

    def _new_job(self, entry: InFlightLine) -> NewJob | Outcome:
        request = self._source.request(entry.line)
        entry.custom_id, entry.endpoint = request.custom_id, request.endpoint
        try:
            body = request.as_job()
        except ApiError as error:
            return _failed(entry, self._job_id(entry), error.form.code or "invalid_request", str(error), error)
        entry.wants_json = wants_json(body)
        if self._tenant is not None:
            body["tenant"] = self._tenant  # instead of one that the line names
        if last := entry.last:
            raised = self._limits.raised(limit_of(body | entry.changes), last, entry.line.model)
            entry.changes |= changes_for(body, last, raised, entry.retry)
            entry.last = None
        body |= entry.changes
        entry.limit = limit_of(body)
        return NewJob(self._job_id(entry), body, entry.line.model, "batch", request.endpoint.function, webhooks="none")

    def _result(self, entry: InFlightLine, outcome: Outcome, retry: int | None = None) -> LineResult:
        """Return the outcome in the form of the line's endpoint. Runs in a thread, as `_new_jobs`."""
        job_id = line_job_id(self._run_id, entry.line.number, entry.retry if retry is None else retry)
        try:
            outcome = self._translated(entry, outcome, job_id)
        except (AttributeError, LookupError, TypeError, ValueError, struct.error):
            outcome = _failed(entry, job_id, _FOREIGN.type, _FOREIGN.message, errors.JobFailed(_FOREIGN))
        return LineResult(job_id, self._custom_id(entry), outcome.result, outcome.error, outcome.details)

    def _translated(self, entry: InFlightLine, outcome: Outcome, job_id: str) -> Outcome:
        error = outcome.error
        if error is not None and error.code != NOT_JSON:
            return outcome
        body = self._source.request(entry.line).body
        answer = entry.endpoint.answer(body, job_id, error.body if error else outcome.result)
        return replace(outcome, error=replace(error, body=answer)) if error else replace(outcome, result=answer)


class _Limits:
    """How many times lines are run again, and with how many tokens at most."""

    def __init__(self, retry: Mapping[str, int]) -> None:
        self.retry = retry
        self._noted = set[str]()  # of a run, once each
        self._tokens: TokenLimits = {}
        self._until = 0.0  # by the monotonic clock

    @property
    def are_old(self) -> bool:
        """True if those of the workers are to be read: others may have started."""
        return time.monotonic() >= self._until

    def update(self, tokens: TokenLimits) -> None:
        """Take what live workers allow."""
        self._tokens = tokens
        self._until = time.monotonic() + (60.0 if tokens else _WORKERS_S)

    def raised(self, asked: int | None, details: LineDetails, model: str) -> int | None:
        """Return the limit of tokens for a cut answer that is run again, as `raised_limit` does."""
        context, most = self._tokens.get(model, (None, None))
        bounds = [] if context is None else [context - details.input_tokens]
        limit = raised_limit(asked, details, bounds if most is None else [*bounds, most])
        if details.finish_reason == "length" and "cut" in self.retry:
            self._note(asked, details.output_tokens, limit)
        return limit

    def _note(self, asked: int | None, length: int, limit: int | None) -> None:
        if limit is None:
            note = "the context, the worker's memory or SLUICE_MAX_OUTPUT_TOKENS allows no longer one: it stays cut off"
        elif asked is None:
            note = "its request has no max_tokens, so it is run again with twice as many"
        else:
            return
        if note not in self._noted:
            self._noted.add(note)
            logger.warning("an answer was cut off at %d tokens, and %s; likewise others of this run", length, note)


def _apply_submission(entry: InFlightLine, outcome: Submitted | QueueFull | ServerFull) -> None:
    match outcome:
        case QueueFull():
            entry.apply(LineEvent.JOB_REJECTED, wait_s=min(outcome.retry_after_s, _MAX_WAIT_S))
        case ServerFull():
            entry.apply(LineEvent.JOB_REJECTED, wait_s=_WORKERS_S)
        case _:
            entry.apply(LineEvent.JOB_QUEUED)


def _apply_job(entry: InFlightLine, job_id: str, result: bytes | None, exists: bool, limits: _Limits) -> Outcome | None:
    """Apply what has happened to the queued job of a line. Returns the line's outcome if it has ended."""
    if result is None:
        return None if exists else entry.apply(LineEvent.JOB_GONE, wait_s=0.5)
    answer = _read_result(result)
    if isinstance(answer, JobError):
        return _apply_failure(entry, job_id, answer, limits.retry)
    match answer:
        case {"type": "cancelled", "reason": str(reason)}:
            cancelled = _failed(entry, job_id, "cancelled", cancelled_sentence(reason), errors.JobCancelled(reason))
            return entry.apply(LineEvent.JOB_CANCELLED, outcome=cancelled)
    details = details_of(answer, wants_json=entry.wants_json)
    outcome = Outcome(details, result)
    if details.kind == "invalid":
        outcome = Outcome(details, error=LineError(NOT_JSON, _not_json(details), 200, result))
    raised = limits.raised(entry.limit, details, str(answer.get("model")))
    return _end(entry, outcome, most_retries(details, limits.retry, raised))


# Any client can write a result.
_FOREIGN = JobError("internal", "the result of the line's job was not written by a worker", False)


def _read_result(result: bytes) -> dict[str, Any] | JobError:
    """Return the result of a job, or its error; an error of its own for what no worker wrote."""
    try:
        ended: dict[str, Any] = json.loads(result)
        return parse_as(JobError, ended["error"]) if ended.get("type") == "failed" else ended
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return _FOREIGN


def _apply_failure(entry: InFlightLine, job_id: str, error: JobError, retry: Mapping[str, int]) -> Outcome | None:
    # A deadline is part of the request, so a missed one is not retried. Others are tried five times.
    wait_s = min(2**entry.failures, _MAX_WAIT_S) * random.uniform(0.5, 1.5)
    if error.retryable and error.type != "deadline" and entry.failures + 1 < 5:
        return entry.apply(LineEvent.JOB_TO_RETRY, wait_s=wait_s)
    failed = _failed(entry, job_id, error.type, error.message, errors.JobFailed(error))
    # A request that is itself at fault fails again.
    times = retry.get("failed", 0) if error.retryable or error.type == "deadline" else 0
    return _end(entry, failed, times, wait_s)


def _end(entry: InFlightLine, outcome: Outcome, times: int, wait_s: float = 0.0) -> Outcome | None:
    """Apply the end of a line's job, which is run again if it was so fewer than `times`."""
    if entry.mends < times:
        return entry.apply(LineEvent.JOB_TO_MEND, wait_s=wait_s, outcome=outcome)
    return entry.apply(LineEvent.JOB_ENDED, outcome=outcome)


def _failed(entry: InFlightLine, job_id: str, code: str, message: str, error: errors.SluiceError | ApiError) -> Outcome:
    """Return the outcome of a line whose request or job ended with this error."""
    status, body = entry.endpoint.error(error, job_id)
    return Outcome(LineDetails("failed"), error=LineError(code, message, status, json.dumps(body).encode()))


def _not_json(details: LineDetails) -> str:
    is_cut = details.finish_reason == "length"
    remedy = "it was cut off, so raise max_tokens." if is_cut else "ask again, or for less."
    return f"response_format: the answer is not JSON; {remedy}"


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
