"""Submission of jobs to their queues: one Lua call for each job, alone or many in one round trip."""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from sluice.contract import keys
from sluice.contract.keys import JobFunction, JobWebhooks, Lane
from sluice.contract.refusals import is_full
from sluice.contract.scripts import source
from sluice.errors import NoWorker, QueueFull, ServerFull
from sluice.tracing import current_traceparent, read_traceparent
from sluice.transport import Retries, RoundTrips, raise_outage, server_full

_FULL, _NO_WORKER = -1, -2  # submit.lua's return codes


@dataclass(frozen=True, slots=True)
class Submitted:
    """The outcome of a submission."""

    id: str
    new: bool  # False: there was a job of this id already, and nothing was queued
    state: str  # current state of the job: queued, running, finished, failed or cancelled
    served: bool = False  # True if a live worker serves the model
    model: str | None = None  # the model that the name in the call stands for; None if that is no alias


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """A string of the caller's own that is set in the same step as a job is queued: both, or neither. It replaces what
    the key held. Raises ValueError for a time to live that the server would refuse."""

    name: str
    value: bytes
    ttl_s: int

    def __post_init__(self) -> None:
        longest_s = 10**12  # far below what the server takes: it would refuse it after the body has been stored
        if not 1 <= self.ttl_s <= longest_s:
            raise ValueError(f"ttl_s must be from 1 to {longest_s:,} seconds, not {self.ttl_s!r}")


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be queued. Raises ValueError for a bad id, model, lane or `traceparent`."""

    id: str
    request: dict[str, Any]
    model: str
    lane: Lane
    function: JobFunction = "chat"
    extra_keys: Sequence[ExtraKey] = ()
    webhooks: JobWebhooks = ""
    traceparent: str = ""

    def __post_init__(self) -> None:
        keys.check_job_id(self.id)
        keys.check_model_name(self.model)
        if self.lane not in keys.LANES:
            raise ValueError(f"lane must be one of {', '.join(keys.LANES)}, not {self.lane!r}")
        if self.webhooks not in get_args(JobWebhooks):
            raise ValueError(f"webhooks must be response, none, or empty for those of a job, not {self.webhooks!r}")
        if self.traceparent and not read_traceparent(self.traceparent):
            raise ValueError(f"traceparent must look like 00-{'1' * 32}-{'2' * 16}-01, not {self.traceparent[:100]!r}")


def new_job(
    request: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    model: str,
    lane: Lane | None = None,
    *,
    id: str | None = None,
    function: JobFunction = "chat",
    extra_keys: Sequence[ExtraKey] = (),
    webhooks: JobWebhooks = "",
    traceparent: str | None = None,
) -> NewJob:
    """Return the job for a request or only its messages, with a random id, the request's lane and the trace of the
    current span unless given."""
    body = dict(request) if isinstance(request, Mapping) else {"messages": list(request)}
    id = uuid.uuid4().hex if id is None else id
    trace = current_traceparent() if traceparent is None else traceparent
    return NewJob(id, body, model, lane or lane_of(body), function, extra_keys, webhooks, trace)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of `submit.lua`."""

    keys: list[str]
    args: list[str | bytes | int]

    @property
    def is_long(self) -> bool:
        """True if it delays the calls that share its round trip: its body and extra keys have more than 64 KiB."""
        return sum(len(arg) for arg in self.args if isinstance(arg, bytes)) > 65_536


class Submission:
    """Queues jobs with the script `submit.lua`."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._script = redis.register_script(source("submit"))
        self._calls = RoundTrips[_Call, list[Any]](self._send)

    async def submit(self, job: NewJob, *, needs_worker: bool = False) -> Submitted:
        """Queue one job. Raises `QueueFull`, `ServerFull`, and `NoWorker` if `needs_worker` and no live worker serves
        the model. A call that is cancelled may have queued its job, or queue it later."""
        call = _Call(_keys(job), _args(job, submission=uuid.uuid4().hex, needs_worker=needs_worker))
        try:
            answer = await self._send_alone(call) if call.is_long else await self._calls.call(call)
        except RedisError as error:
            if is_full(error) and not isinstance(error, ServerFull):
                raise server_full(error) from error  # the answer of a pipeline
            raise
        outcome = _read(job, answer)
        if not isinstance(outcome, Submitted):
            raise outcome
        return outcome

    async def _send_alone(self, call: _Call) -> list[Any]:
        answers: list[list[Any]] = await self._retries.run(partial(self._send_one, call))
        return answers[0]

    async def _send(self, calls: Sequence[_Call]) -> Sequence[list[Any] | Exception]:
        """Send calls that name their submissions, so that they may be repeated."""
        send = partial(self._send_one, calls[0]) if len(calls) == 1 else partial(self._send_all, calls)
        answers: list[list[Any] | Exception] = await self._retries.run(send)
        return answers

    async def _send_one(self, call: _Call) -> list[Any]:
        return [await self._script(keys=call.keys, args=call.args)]

    async def _send_all(self, calls: Sequence[_Call]) -> list[Any]:
        answers = await self._run_all(calls)
        raise_outage(answers)
        return answers

    async def _run_all(self, calls: Sequence[_Call]) -> list[Any]:
        """Return the answers of the server, errors included. redis-py's scripts would ask it before each pipeline if it
        knows them: another round trip."""
        answers = await self._pipelined(calls)
        unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            await self._redis.script_load(self._script.script)
            again = await self._pipelined([calls[index] for index in unknown])
            for index, answer in zip(unknown, again, strict=True):
                answers[index] = answer
        return answers

    async def _pipelined(self, calls: Sequence[_Call]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(self._script.sha, len(call.keys), *call.keys, *call.args)  # type: ignore[arg-type]
            answers: list[Any] = await pipe.execute(raise_on_error=False)  # else the error quotes the whole request
        return answers

    async def submit_once_served(
        self, job: NewJob, wait_s: float, served_models: Callable[[], Awaitable[Collection[str]]]
    ) -> Submitted:
        """Queue one job when a live worker serves its model. Raises `NoWorker`, with the models that are served, after
        `wait_s` seconds without one."""
        until = time.monotonic() + wait_s
        while True:
            try:
                return await self.submit(job, needs_worker=True)
            except NoWorker as missing:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise NoWorker(missing.model, list(await served_models())) from None
                await asyncio.sleep(min(0.25, left_s))

    async def submit_all(self, jobs: Sequence[NewJob]) -> list[Submitted | QueueFull | ServerFull]:
        """Queue jobs in one round trip, and return an outcome for each. Raises redis-py's other errors; some of the
        jobs may have been queued by then."""
        answers = await self._run_all([_Call(_keys(job), _args(job)) for job in jobs])
        return [_read_or_raise(job, answer) for job, answer in zip(jobs, answers, strict=True)]


def _keys(job: NewJob) -> list[str]:
    return [
        keys.body(job.id),
        keys.queue(job.model, job.lane),
        keys.job(job.id),
        keys.wake(job.model),
        keys.model(job.model),
        *(extra.name for extra in job.extra_keys),
    ]


def _args(job: NewJob, *, submission: str = "", needs_worker: bool = False) -> list[str | bytes | int]:
    """Return the ARGV of `submit.lua`. `submission` identifies the call, so a resent one recognizes its own job."""
    extra = [part for key in job.extra_keys for part in (key.value, key.ttl_s * 1000)]
    body = _arq_job(job)
    marks = marks_of(body) if job.function == "chat" else ("", len(body))  # no other job computes a prompt
    trace = read_traceparent(job.traceparent)
    return [job.id, body, keys.JOB_LIFE_S * 1000, *_hash_fields(job.request, job.lane), submission, int(needs_worker),
            job.function, _user(job.request), *marks, job.webhooks, trace, *extra]  # fmt: skip


def marks_of(body: bytes) -> tuple[str, int]:
    """Return the marks of a job's prompt as 'mark end mark end ...', and the bytes from `"messages":` on, which the
    ends count too. A mark is made of all bytes up to its end, so jobs with one in common have prompts that begin alike.
    Fields before the messages may differ from job to job, so none counts. Of a file's `data:` URL only the beginning
    counts: an image has far fewer tokens than a text of its bytes."""
    body = _without_files(body)
    head = body[: 1 << 18]  # a client chooses the length of a body; so many bytes take 0.6 ms
    first = max(0, head.find(b'"messages":'))
    wanted = set[int]()
    for size in (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18):
        # The last six: a turn that is D bytes longer has a mark less than D before the end of this one.
        last = (len(head) - first) // size
        wanted.update(at * size for at in range(max(1, last - 5), last + 1))
    found, chain = list[str](), ""
    block = 1024  # bytes
    for end in range(block, len(head) - first + 1, block):
        chunk = head[first + end - block : first + end]
        chain = hashlib.sha1(chain.encode() + chunk, usedforsecurity=False).hexdigest()
        if end in wanted:
            found += [chain[:12], str(end)]
    return " ".join(found), len(body) - first


def _without_files(body: bytes) -> bytes:
    """Return a body of which the `data:` URLs in base64 are cut to 4 KiB, if they are among the first 500 strings that
    begin with "data:"."""
    parts, at = list[bytes](), 0
    for _ in range(500):  # a client chooses how many there are
        first = body.find(b'"data:', at)
        end = body.find(b'"', first + 1) if first >= 0 else -1
        if end < 0:
            break
        is_file = body.find(b";base64,", first, first + 128) >= 0  # a text may begin with "data:"
        parts.append(body[at : min(end, first + 4096) if is_file else end])
        at = end
    return b"".join((*parts, body[at:]))


def _read_or_raise(job: NewJob, answer: list[Any] | RedisError) -> Submitted | QueueFull | ServerFull:
    match answer:
        case RedisError() if is_full(answer):
            return server_full(answer)
        case RedisError():
            raise answer
    outcome = _read(job, answer)
    assert not isinstance(outcome, NoWorker), "this call requires no worker"
    return outcome


def _read(job: NewJob, answer: list[Any]) -> Submitted | QueueFull | NoWorker:
    code, *fields = answer
    if code == _NO_WORKER:
        return NoWorker(fields[0].decode() or job.model, ())
    if code == _FULL:
        length, limit, retry_after_s = fields
        estimate_s = float(retry_after_s or 60.0)  # unknown if no job has ended within the last minute
        return QueueFull(length, limit, min(estimate_s, 3600.0))  # no rate is steady for longer
    state, served, target = fields
    return Submitted(job.id, bool(code), state.decode(), bool(served), target.decode() or None)


def _arq_job(job: NewJob) -> bytes:
    """Serialize a job in arq's wire format, with JSON in place of pickle."""
    body: dict[str, Any] = {"t": None, "f": job.function, "a": [job.request], "k": {}, "et": int(time.time() * 1000)}
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _hash_fields(request: dict[str, Any], lane: Lane) -> list[str]:
    """Return the fields of the job's hash that are known before a worker claims it. Invalid values become '', which the
    worker rejects."""
    tenant = request.get("tenant") or request.get("safety_identifier") or request.get("user")
    return [
        lane,
        _bounded_text(tenant, keys.TENANT_CHARACTERS),
        _deadline_text(request.get("deadline_s")),
        _bounded_text(request.get("prompt_cache_key"), keys.CACHE_KEY_CHARACTERS),
    ]


def _user(request: dict[str, Any]) -> str:
    """Return the user of the tenant, with whose other users it takes turns; empty if it is invalid."""
    return _bounded_text(request.get("user") or request.get("safety_identifier"), keys.TENANT_CHARACTERS)


def _bounded_text(value: object, max_characters: int) -> str:
    fits = isinstance(value, str) and len(value) <= max_characters
    return str(value).encode(errors="replace").decode() if fits else ""


def _deadline_text(value: object) -> str:
    """Return a deadline as text, or empty if it is invalid or longer than 10^9 s: one that has already passed would end
    the job before its error is found."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return str(value) if 0 < value <= 1e9 else ""


def lane_of(request: Mapping[str, Any]) -> Lane:
    """Return the lane that a request's `service_tier` selects."""
    return "batch" if request.get("service_tier") == "flex" else "interactive"
