"""Records jobs from the keys that every job has. It only reads, and subscribes to no job: workers count the subscribers
of jobs with `on_disconnect`."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, NoReturn, get_args

from redis.exceptions import NoPermissionError

from sluice.capture.file import CapturedJob
from sluice.client import Client
from sluice.contract import keys
from sluice.contract.events import FINAL
from sluice.contract.keys import JobFunction, Lane
from sluice.contract.scripts import read_lua
from sluice.errors import UnknownJob
from sluice.streaming import Hub
from sluice.transport import raise_outage

_POLL_S = 0.05  # for jobs of producers that wake no worker
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
    """A job that has not ended, of the server of `client`, and its body."""

    id: str
    model: str
    lane: Lane
    body: bytes
    client: Client


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job in a queue, with the tenant that our submit stores; its body is empty if it has just ended."""

    followed: _Followed
    tenant: str


class _Queues:
    """Finds the jobs of a model that were submitted since `begin`, each once."""

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model
        self._keys = [keys.queue(model, lane) for lane in keys.LANES]
        self._script = client.redis.register_script(read_lua("sluice.capture", "waiting"))
        self._began_ms = self._cursor_ms = self._latest_ms = 0.0
        self._seen = dict[str, float]()  # scores of the jobs that were returned, by id

    async def begin(self) -> None:
        """Ask the server for its time."""
        ((seconds, micros),) = await _send(self._client, [("TIME",)])
        self._began_ms = self._cursor_ms = self._latest_ms = int(seconds) * 1000 + int(micros) // 1000

    async def just_submitted(self) -> list[_Waiting]:
        """Return jobs of producers that use the server's clock, with their bodies, in one round trip: a worker may
        refuse them in the next milliseconds."""
        known = [each for each, score in self._seen.items() if score >= self._latest_ms]
        call = partial(self._script, keys=self._keys, args=[self._latest_ms, *known])
        found = await self._client.retries.run_until_answered(call)
        return self._new([(int(at) - 1, *rest) for at, *rest in found])

    async def submitted(self) -> list[_Waiting]:
        """Return all jobs, also of producers whose clock is up to two seconds late."""
        from_ms = max(self._began_ms, self._cursor_ms - 2000)
        ranges = [("ZRANGEBYSCORE", key, from_ms, "+inf", "WITHSCORES", "LIMIT", 0, _PAGE) for key in self._keys]
        (seconds, micros), *pages = await _send(self._client, [("TIME",), *ranges])
        now_ms = self._cursor_ms = int(seconds) * 1000 + int(micros) / 1000
        new = list[tuple[int, bytes, float]]()
        for at, page in enumerate(pages):
            scored = [] if isinstance(page, Exception) else _pairs(page)
            if len(scored) == _PAGE:
                self._cursor_ms = min(self._cursor_ms, scored[-1][1] + 2000)
            # A score beyond is of a job for then.
            new += [
                (at, each, score)
                for each, score in scored
                if score <= now_ms + 2000 and keys.is_job_id(_text(each)) and _text(each) not in self._seen
            ]
        jobs = list[_Waiting]()
        for start in range(0, len(new), 16):  # bodies of at most 16 MB each
            some = new[start : start + 16]
            reads = [("GET", keys.body(_text(each))) for _, each, _ in some]
            tenants = [("HGET", keys.job(_text(each)), "tenant") for _, each, _ in some]
            answers = await _send(self._client, [*reads, *tenants])
            parts = zip(some, answers[: len(some)], answers[len(some) :], strict=True)
            jobs += self._new([(*each, body, tenant) for each, body, tenant in parts], now_ms)
        self._seen = {each: score for each, score in self._seen.items() if score >= self._cursor_ms - 10_000}
        return jobs

    def _new(self, found: Sequence[tuple[Any, ...]], now_ms: float = math.inf) -> list[_Waiting]:
        """Return the jobs that were not returned before. `found`: of each the index of its queue, id, score, body and
        tenant. A job whose score is later than `now_ms` was scheduled."""
        new = list[_Waiting]()
        for at, job_id, score, body, tenant in found:
            name = _text(job_id)
            if name not in self._seen and keys.is_job_id(name):
                self._seen[name] = float(score)
                self._latest_ms = max(self._latest_ms, min(float(score), now_ms))
                followed = _Followed(
                    name, self._model, keys.LANES[at], body if isinstance(body, bytes) else b"", self._client
                )
                new.append(_Waiting(followed, _text(tenant)))
        return new


class Recorder:
    """Records jobs of a server, or of the servers of a map."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._followed = dict[str, _Followed]()
        self._workers = dict[str, dict[str, Any]]()
        self.skipped = 0  # jobs that ended, or began while too many were followed, before they could be read

    @property
    def following(self) -> int:
        """Jobs that are not recorded yet."""
        return len(self._followed)

    async def record_next(self, wanted: Wanted, count: int) -> AsyncGenerator[CapturedJob]:
        """Yield the next jobs that are submitted, each at its end. Ends after `count` jobs. An outage is waited out.
        Raises as redis-py."""
        client, recorded = self._client.of_model(wanted.model), 0
        queues, hub = _Queues(client, wanted.model), Hub(client.redis)
        await queues.begin()

        def room() -> int:
            return _MAX_JOBS if wanted.failed_only else count - recorded

        # A task of its own: jobs come and go while ends are read.
        woken, looked_at = asyncio.create_task(self._follow_woken(hub, queues, wanted, room)), 0.0
        try:
            while not woken.done():
                if self.following < room():
                    self._follow(await queues.submitted(), wanted, room())
                interval_s = max(0.2, self.following / 1000)  # for some 2,000 commands a second at most
                if time.monotonic() - looked_at < interval_s:
                    await asyncio.wait([woken], timeout=_POLL_S)
                    continue
                looked_at = time.monotonic()
                async for job in self._ended(failed_only=wanted.failed_only):
                    recorded += 1
                    yield job
                    if recorded == count:
                        return
            woken.result()
        finally:
            woken.cancel()
            await asyncio.wait([woken])
            await hub.aclose()

    async def _follow_woken(self, hub: Hub, queues: _Queues, wanted: Wanted, room: Callable[[], int]) -> NoReturn:
        async with hub.listen(keys.wake(wanted.model)) as wake:
            while True:
                if await wake.take(60.0) and self.following < room():
                    self._follow(await queues.just_submitted(), wanted, room())

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
        followed = list(self._followed.values())
        self._followed.clear()
        return [await self._read(each) for each in followed]

    def _follow(self, jobs: Sequence[_Waiting], wanted: Wanted, room: int) -> None:
        """Follow the wanted ones of these jobs, as long as there is room for them."""
        held = sum(len(each.body) for each in self._followed.values())
        for job in jobs:
            if job.tenant and wanted.tenant not in (None, job.tenant):
                continue
            if not job.followed.body or held > 256_000_000 or self.following >= _MAX_JOBS:
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
