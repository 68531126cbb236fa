"""Records jobs from the keys that every job has, and from what is kept of those that end while a capture runs. It
subscribes to no job: workers count the subscribers of jobs with `on_disconnect`."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, get_args

from redis.exceptions import NoPermissionError

from sluice.capture.file import CapturedJob
from sluice.client import Client
from sluice.contract import keys
from sluice.contract.events import FINAL
from sluice.contract.keys import JobFunction, Lane
from sluice.errors import UnknownJob
from sluice.transport import raise_outage

_PAGE = 1000  # ids of a lane in one read
_MAX_JOBS = 1000  # followed at once, whose requests are held
# Fields of a job's hash that are not in its request, its events or its result.
_FIELDS = ("attempt", "crashes", "tenant", "user", "alias", "worker", "queued_at", "started_at", "finished_at",
           "deadline", "seed", "fingerprint", "prompt_cache_key")  # fmt: skip
_OF_WORKER = ("name", "version", "protocol", "max_rows", "context_tokens", "max_output_tokens", "images", "tools",
              "reasoning", "embeddings")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """The jobs to record. `tenant`: of this one alone; `failed_only`: those that end as failed."""

    model: str
    tenant: str | None = None
    failed_only: bool = False


@dataclass(frozen=True, slots=True)
class _Followed:
    """A job that is recorded at its end, of the server of `client`, and its body."""

    id: str
    model: str
    lane: Lane
    body: bytes
    client: Client


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A job that was submitted, with the tenant that our submit stores."""

    followed: _Followed
    tenant: str


class _Queues:
    """Finds the jobs of a model that are submitted from `begin` on: in its queues, each once, and those that have just
    ended, whose bodies the scripts that end jobs keep while this goes on."""

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model
        self._keys = [keys.queue(model, lane) for lane in keys.LANES]
        self._began_ms = self._cursor_ms = self._ended_ms = 0.0
        self._seen = dict[str, float]()  # scores of the jobs that were found in the queues, by id
        self._last = set[bytes]()  # jobs that were found to have ended last, in the same millisecond

    async def begin(self) -> None:
        """Ask for bodies of jobs that end, and the server for its time."""
        _, (seconds, micros) = await _send(self._client, [self._ask, ("TIME",)])
        self._began_ms = self._cursor_ms = self._ended_ms = int(seconds) * 1000 + int(micros) // 1000

    @property
    def _ask(self) -> tuple[Any, ...]:
        """The command that asks for bodies of jobs that end: for longer than a look takes."""
        return ("SET", keys.capture(self._model), "1", "PX", 10_000)

    async def submitted(self) -> AsyncGenerator[list[_Submitted]]:
        """Yield the jobs in the queues, also those of producers whose clock is up to two seconds late."""
        from_ms = max(self._began_ms, self._cursor_ms - 2000)
        ranges = [("ZRANGEBYSCORE", key, from_ms, "+inf", "WITHSCORES", "LIMIT", 0, _PAGE) for key in self._keys]
        _, (seconds, micros), *pages = await _send(self._client, [self._ask, ("TIME",), *ranges])
        now_ms = self._cursor_ms = int(seconds) * 1000 + int(micros) / 1000
        new, scores = dict[str, Lane](), dict[str, float]()
        for lane, page in zip(keys.LANES, pages, strict=True):
            scored = [] if isinstance(page, Exception) else _pairs(page)
            if len(scored) == _PAGE:
                self._cursor_ms = min(self._cursor_ms, scored[-1][1] + 2000)
            for each, score in scored:
                # A score beyond is of a job for then.
                if score <= now_ms + 2000 and keys.is_job_id(_text(each)) and _text(each) not in self._seen:
                    new[_text(each)] = lane
                    scores[_text(each)] = score
        async for jobs in self._read(new, keys.body):
            yield [each for each in jobs if each.followed.body]  # one without has just ended
        self._seen |= scores  # not before: an interrupted look is made again
        self._seen = {each: score for each, score in self._seen.items() if score >= self._cursor_ms - 10_000}

    async def ended(self) -> AsyncGenerator[list[_Submitted]]:
        """Yield the jobs that have ended since the last call."""
        range_of = ("ZRANGEBYSCORE", keys.captured(self._model), self._ended_ms, "+inf", "WITHSCORES", "LIMIT", 0)
        (page,) = await _send(self._client, [(*range_of, _PAGE)])
        found, ended = [] if isinstance(page, Exception) else _pairs(page), dict[str, Lane]()
        for member in [each for each, _ in found if each not in self._last]:
            lane, _, job_id = _text(member)[15:].partition(":")
            if keys.is_job_id(job_id) and member[:15].isdigit() and int(member[:15]) >= self._began_ms:
                ended[job_id] = "batch" if lane == "batch" else "interactive"
        async for jobs in self._read(ended, partial(keys.captured, self._model)):
            yield jobs
        if found:
            self._ended_ms = found[-1][1]
            self._last = {each for each, score in found if score == self._ended_ms}

    async def _read(self, jobs: Mapping[str, Lane], body_key: Callable[[str], str]) -> AsyncGenerator[list[_Submitted]]:
        for start in range(0, len(jobs), 16):  # bodies of at most 16 MB each
            some = list(jobs.items())[start : start + 16]
            reads = [("GET", body_key(each)) for each, _ in some]
            tenants = [("HGET", keys.job(each), "tenant") for each, _ in some]
            answers = await _send(self._client, [*reads, *tenants])
            parts = zip(some, answers[: len(some)], answers[len(some) :], strict=True)
            yield [
                _Submitted(
                    _Followed(each, self._model, lane, body if isinstance(body, bytes) else b"", self._client),
                    _text(tenant),
                )
                for (each, lane), body, tenant in parts
            ]


class Recorder:
    """Records jobs of a server, or of the servers of a map."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._followed = dict[str, _Followed]()
        self._recorded = set[str]()  # of the next jobs
        self._look: Callable[[], Awaitable[None]] | None = None  # follows what was submitted since the last time
        self._workers = dict[str, dict[str, Any]]()
        self.skipped = 0  # jobs that came while too many were followed

    @property
    def following(self) -> int:
        """Jobs that are not recorded yet."""
        return len(self._followed)

    async def record_next(self, wanted: Wanted, count: int) -> AsyncGenerator[CapturedJob]:
        """Yield the next jobs that are submitted, each at its end. Ends after `count` jobs. An outage is waited out.
        Raises as redis-py."""
        client, recorded = self._client.of_model(wanted.model), 0
        queues = _Queues(client, wanted.model)
        await queues.begin()

        def room() -> int:
            return _MAX_JOBS if wanted.failed_only else count - recorded

        async def look() -> None:
            for found in (queues.submitted(), queues.ended()):
                async for jobs in found:
                    self._follow(jobs, wanted, room())

        self._look = look
        while True:
            await look()
            async for job in self._ended(failed_only=wanted.failed_only):
                recorded += 1
                self._recorded.add(job.id)
                yield job
                if recorded == count:
                    return
            await asyncio.sleep(max(0.2, self.following / 1000))  # for some 2,000 commands a second at most

    async def record_known(self, job_ids: Sequence[str]) -> AsyncGenerator[CapturedJob]:
        """Yield these jobs, each at its end. Raises `UnknownJob`, and as redis-py."""
        for job_id in dict.fromkeys(job_ids):
            client = await self._client.of_job(job_id)
            self._followed[job_id] = await self._find(client, job_id)
        while self._followed:
            async for job in self._ended():
                yield job
            if self._followed:
                await asyncio.sleep(0.2)

    async def record_unfinished(self) -> list[CapturedJob]:
        """Return the jobs that have not ended, with their events so far."""
        if self._look:
            await self._look()
        followed = list(self._followed.values())
        self._followed.clear()
        return [await self._read(each) for each in followed]

    def _follow(self, jobs: Sequence[_Submitted], wanted: Wanted, room: int) -> None:
        """Follow the wanted ones of these jobs, as long as there is room for them."""
        held = sum(len(each.body) for each in self._followed.values())
        for job in jobs:
            if job.tenant and wanted.tenant not in (None, job.tenant):
                continue
            if job.followed.id in self._followed or job.followed.id in self._recorded:
                continue
            if held > 256_000_000 or self.following >= _MAX_JOBS:
                self.skipped += 1
            elif self.following < room and wanted.tenant in (None, job.tenant or _tenant(job.followed.body)):
                self._followed[job.followed.id] = job.followed
                held += len(job.followed.body)

    async def _find(self, client: Client, job_id: str) -> _Followed:
        """Return a job by its id; the body of one that crashed workers is in its dead letter. Raises `UnknownJob`."""
        commands = [("GET", keys.body(job_id)), ("HMGET", keys.job(job_id), "model", "lane"),
                    ("EXISTS", keys.log(job_id), keys.result(job_id)), ("HGET", keys.DEAD, job_id)]  # fmt: skip
        body, fields, exists, letter = await _send(client, commands)
        parked = _parsed(letter)
        if not isinstance(body, bytes):
            body = str(parked.get("body", "")).encode("utf-8", "replace")
        model, lane = (_text(each) for each in fields) if isinstance(fields, list) else ("", "")
        if not (body or model or exists or parked):
            raise UnknownJob(f"there is no trace of job {job_id!r}: never submitted, or its events have expired.")
        model = model or str(parked.get("model", ""))
        return _Followed(job_id, model if keys.is_model_name(model) else "default",
                         "batch" if lane == "batch" else "interactive", body, client)  # fmt: skip

    async def _ended(self, *, failed_only: bool = False) -> AsyncGenerator[CapturedJob]:
        """Yield the followed jobs that have ended, or of which there is no trace any more. `failed_only`: the others
        are not read, which may be long."""
        for client in {each.client for each in self._followed.values()}:
            own = [each for each in self._followed.values() if each.client is client]
            commands = [
                part for each in own for part in (("HMGET", keys.job(each.id), "state"), ("EXISTS", keys.body(each.id)))
            ]
            answers = iter(await _send(client, commands))
            for each, state, has_body in zip(own, answers, answers, strict=True):
                found = _text(state[0]) if isinstance(state, list) else ""
                if found in FINAL or not (found or has_body):
                    # First: if this is cancelled, the job is still among those to record.
                    job = await self._read(each) if found == "failed" or not failed_only else None
                    del self._followed[each.id]
                    if job is not None:
                        yield job

    async def _read(self, job: _Followed) -> CapturedJob:
        commands = [("HGETALL", keys.job(job.id)), ("LRANGE", keys.log(job.id), 0, -1), ("GET", keys.result(job.id))]
        stored, log, result = await _send(job.client, commands)
        fields = {_text(name): _text(value) for name, value in _hash(stored).items()}
        events = [_parsed(each) for each in log] if isinstance(log, list) else []
        function, request = _request(job.body)
        return CapturedJob(
            id=job.id,
            model=job.model,
            lane=job.lane,
            function=function if request is not None else _known_function(fields.get("function")),
            state=fields.get("state", ""),
            request=request,
            body="" if request is not None else _text(job.body),
            stored={name: fields[name] for name in _FIELDS if name in fields},
            events=[each for each in events if each],
            result=_parsed(result) or None,
            worker=await self._worker(fields.get("worker", "")),
        )

    async def _worker(self, name: str) -> dict[str, Any]:
        """Return what is known of a worker; it may have left since."""
        if name and name not in self._workers:
            for each in await self._client.workers():
                self._workers[each.get("name", "")] = _described(each)
        return self._workers.get(name, {})


async def _send(client: Client, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the answers, waiting out an outage. A foreign value under a key is an error among them."""

    async def send() -> list[Any]:
        async with client.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        raise_outage(answers)
        for answer in answers:
            if isinstance(answer, NoPermissionError):
                raise answer
        return answers

    return list(await client.retries.run_until_answered(send)) if commands else []


def _pairs(page: Sequence[Any]) -> list[tuple[bytes, float]]:
    """Return the ids and scores of a range, as both versions of the protocol send it."""
    pairs = page if page and isinstance(page[0], list | tuple) else list(zip(page[::2], page[1::2], strict=True))
    return [(job_id, float(score)) for job_id, score in pairs]


def _tenant(body: bytes) -> str:
    """Return the tenant of a plain producer's job, as its worker reads it."""
    request = _request(body)[1] or {}
    return str(request.get("tenant") or request.get("safety_identifier") or request.get("user") or "")


def _request(body: bytes) -> tuple[JobFunction, dict[str, Any] | None]:
    """Return the function and the request of a body; None if it holds none."""
    match _parsed(body):
        case {"f": str() as function, "a": [{**request}]}:
            return _known_function(function), {str(name): value for name, value in request.items()}
    return "chat", None


def _known_function(name: str | None) -> JobFunction:
    known: dict[str | None, JobFunction] = {each: each for each in get_args(JobFunction)}
    return known.get(name, "chat")


def _described(worker: Mapping[str, str]) -> dict[str, Any]:
    """Return what a worker publishes about itself that matters to its answers, without the paths of its folders."""
    found: dict[str, Any] = {name: worker[name] for name in _OF_WORKER if name in worker}
    for name in ("packages", "settings"):
        found[name] = _parsed(worker.get(name))
    with suppress(ValueError, RecursionError):
        checkpoints = json.loads(worker.get("checkpoints", "[]"))
        found["checkpoints"] = [_without_path(each) for each in checkpoints if isinstance(each, str)]
    return found


def _without_path(checkpoint: str) -> str:
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint)
    return checkpoint if is_hub_id else PurePath(checkpoint).name


def _parsed(value: object) -> dict[str, Any]:
    """Parse JSON; empty if it is no object."""
    try:
        found = json.loads(value) if isinstance(value, bytes | str) else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _hash(answer: Any) -> Mapping[Any, Any]:
    """Return a hash, as both versions of the protocol send it."""
    if isinstance(answer, list):
        return dict(zip(answer[::2], answer[1::2], strict=True))
    return answer if isinstance(answer, dict) else {}


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
