"""The queues of a server, with or without workers, and its dead letters: jobs that crashed workers."""

import hashlib
import json
import math
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.events import parse_as
from sluice.contract.keys import Lane
from sluice.errors import UnknownJob
from sluice.presence import Attendances
from sluice.transport import Retries, raise_outage

_SECONDS = re.compile(rb"\d{1,12}(\.\d{1,20})?(e\+\d{1,2})?")  # some clients have written 1.79592498e+9


@dataclass(frozen=True, slots=True)
class Queue:
    """One lane of a model that holds jobs."""

    model: str
    lane: Lane
    jobs: int  # queued and running
    oldest_s: float  # seconds since the oldest of them was queued
    workers: int  # live workers of the model

    @property
    def served(self) -> bool:
        """True if a live worker serves the model."""
        return self.workers > 0


@dataclass(frozen=True, slots=True)
class QueueHead:
    """The oldest jobs of a lane, those that are put off apart: as many as were looked at."""

    model: str
    lane: Lane
    jobs: int  # queued and running, of the whole lane
    running: int  # of those looked at
    waiting: dict[str, tuple[int, float]]  # the others by tenant ("": none): their number, seconds of the oldest
    complete: bool  # all jobs of the lane were looked at that are not put off


@dataclass(frozen=True, slots=True)
class MisplacedJobs:
    """Jobs under a key that no worker reads: `problem` says why, and where they belong."""

    key: str
    jobs: int
    problem: str


class Queues:
    """Reads the queues of a server."""

    def __init__(self, redis: Redis, retries: Retries, attendances: Attendances) -> None:
        self._redis, self._retries = redis, retries
        self._attendances = attendances

    async def read_all(self, workers: Collection[str], aliases: Mapping[str, str]) -> list[Queue]:
        """Return every queue with jobs, sorted by model and lane. `workers`: the model of each live worker. `aliases`:
        the model of each, whose workers take the jobs under its name."""
        lanes = sorted(filter(None, map(keys.parse_queue, await self._retries.scan(keys.QUEUES))))
        named = {alias: model for alias, model in aliases.items() if alias not in workers}
        serving = [*workers, *(alias for alias, model in named.items() for each in workers if each == model)]
        found = [await self._read(model, lane, serving) for model, lane in lanes]
        return [queue for queue in found if queue is not None]

    async def read_heads(self) -> list[QueueHead]:
        """Return the head of every queue with jobs, sorted by model and lane, in two round trips. Only reads. Looks at
        300 jobs of a queue at most, and at 3,000 in all unless there are more than 300 queues."""
        lanes = sorted(filter(None, map(keys.parse_queue, await self._retries.scan(keys.QUEUES))))
        limit, now_ms = min(300, max(10, 3000 // max(1, len(lanes)))), await self._now() * 1000

        def ask_for_jobs(pipe: Any) -> None:
            for name in (keys.queue(*lane) for lane in lanes):
                pipe.zcard(name)
                pipe.zrangebyscore(name, "-inf", now_ms, start=0, num=limit, withscores=True)

        answers = await self._answers(ask_for_jobs)
        heads = [
            (lane, jobs, oldest)
            for lane, jobs, oldest in zip(lanes, answers[::2], answers[1::2], strict=True)
            if not isinstance(oldest, Exception) and jobs  # the error of a foreign value
        ]

        def ask_for_states(pipe: Any) -> None:
            for job in (keys.job(id.decode("utf-8", "surrogateescape")) for *_, oldest in heads for id, _ in oldest):
                pipe.hget(job, "state")
                pipe.hget(job, "tenant")

        answers = await self._answers(ask_for_states)
        states = iter(zip(answers[::2], answers[1::2], strict=True))
        return [
            _head(*lane, jobs, [((now_ms - score) / 1000, *next(states)) for _, score in oldest], len(oldest) < limit)
            for lane, jobs, oldest in heads
        ]

    async def _answers(self, ask: Callable[[Any], None]) -> list[Any]:
        """Return the answers of a pipeline, among them the errors of foreign values."""

        async def send() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipe:
                ask(pipe)
                answers: list[Any] = await pipe.execute(raise_on_error=False)
            raise_outage(answers)
            return answers

        answers: list[Any] = await self._retries.run(send)
        return answers

    async def read_misplaced(self) -> list[MisplacedJobs]:
        """Return the keys that begin like a queue and hold jobs which no worker takes."""
        found = []
        for name in sorted(await self._retries.scan(keys.QUEUES)):
            key = name.decode("utf-8", "replace")
            problem = keys.queue_problem(key)
            if problem and await self._retries.run(partial(self._redis.type, name)) == b"zset":
                jobs: int = await self._retries.run(partial(self._redis.zcard, name))
                found.append(MisplacedJobs(key, jobs, problem))
        return found

    async def _read(self, model: str, lane: Lane, workers: Collection[str]) -> Queue | None:
        key = keys.queue(model, lane)
        if await self._retries.run(lambda: self._redis.type(key)) != b"zset":
            return None  # the queue has just emptied, or is a foreign value
        if model not in workers:
            await self._end_overdue(model, lane)
        jobs: int = await self._retries.run(lambda: self._redis.zcard(key))
        oldest = await self._retries.run(lambda: self._redis.zrange(key, 0, 0, withscores=True))
        since_s = await self._now() - oldest[0][1] / 1000 if oldest else 0.0
        return Queue(model, lane, jobs, max(0.0, since_s), list(workers).count(model)) if jobs else None

    async def _end_overdue(self, model: str, lane: Lane) -> None:
        """End those of the oldest 10,000 jobs that are past their deadline. Others are read only: 1,000 take two round
        trips."""
        async for ids in self.pages(model, lane, most=10_000):
            late = await self._retries.run(partial(self._past_deadline, ids))
            await self._attendances.check_all(late)

    async def _past_deadline(self, ids: Sequence[bytes]) -> list[str]:
        """Return those of the jobs that may be past their deadline: the script decides, when it ends them."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for id in ids:
                pipe.hget(keys.job(id.decode("utf-8", "surrogateescape")), "deadline")
            (seconds, _), *deadlines = await pipe.execute(raise_on_error=False)
        return [
            id.decode("utf-8", "surrogateescape")
            for id, text in zip(ids, deadlines, strict=True)
            if isinstance(text, bytes) and _SECONDS.fullmatch(text) and float(text) <= seconds + 1
        ]

    async def pages(
        self, model: str, lane: Lane, *, older_than_s: float = 0.0, most: float = math.inf
    ) -> AsyncGenerator[Sequence[bytes]]:
        """Yield pages of the ids of the jobs that were queued at least `older_than_s` seconds ago, oldest first, and
        not many more than `most`. The ids are read before the first page is yielded."""
        key = keys.queue(model, lane)
        per_reply = 1000  # ids
        until_ms = (await self._now() - older_than_s) * 1000 if older_than_s else "+inf"
        ids: list[bytes] = []
        while True:
            read = partial(self._redis.zrangebyscore, key, "-inf", until_ms, start=len(ids), num=per_reply)
            page = await self._retries.run(read)
            ids += page
            if len(page) < per_reply or len(ids) >= most:
                break
        for start in range(0, len(ids), per_reply):
            yield ids[start : start + per_reply]

    async def _now(self) -> float:
        seconds, microseconds = await self._retries.run(self._redis.time)
        return float(seconds + microseconds / 1e6)


def _head(model: str, lane: Lane, jobs: int, looked_at: Sequence[tuple[float, Any, Any]], complete: bool) -> QueueHead:
    """Count jobs, each of its age in seconds, state and tenant, as they were answered; the oldest first."""
    waiting, running = dict[str, tuple[int, float]](), 0
    for age_s, state, tenant in looked_at:
        if state == b"running":
            running += 1
            continue
        name = tenant[: keys.TENANT_CHARACTERS].decode("utf-8", "replace") if isinstance(tenant, bytes) else ""
        before, oldest_s = waiting.get(name, (0, min(age_s, 1e12)))  # a foreign score may be infinite
        waiting[name] = before + 1, oldest_s
    return QueueHead(model, lane, jobs, running, waiting, complete)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that crashed workers `crashes` times, and the request that it held."""

    id: str
    model: str
    lane: keys.Lane
    crashes: int
    parked_at: float  # Unix seconds
    error: dict[str, Any]
    body: str  # arq's serialized job, as it was queued

    @property
    def function(self) -> keys.JobFunction:
        """The kind of the job: `chat` if it names none of the contract's."""
        match json.loads(self.body):
            case {"f": "count" | "embed" as kind}:
                return "count" if kind == "count" else "embed"
        return "chat"

    @property
    def retry_id(self) -> str:
        """The id of the job that retries it: always the same one, and another for each letter of a job."""
        return hashlib.sha256(repr((self.id, self.parked_at)).encode()).hexdigest()[:32]

    @property
    def request(self) -> dict[str, Any]:
        """The request of the job. Raises ValueError if the body is missing or broken."""
        match json.loads(self.body):
            case {"a": [{**request}]}:
                return {str(name): value for name, value in request.items()}
        raise ValueError("the body holds no request")


class DeadLetters:
    """Reads and removes dead letters."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries

    async def read_all(self) -> list[DeadLetter]:
        """Return all dead letters, oldest first."""
        stored: dict[bytes, bytes] = await self._retries.run(lambda: self._redis.hgetall(keys.DEAD))
        return sorted((_letter(id, text) for id, text in stored.items()), key=lambda letter: letter.parked_at)

    async def read(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises `UnknownJob`."""
        stored: bytes | None = await self._retries.run(lambda: self._redis.hget(keys.DEAD, job_id))
        if stored is None:
            raise UnknownJob(f"there is no dead letter {job_id!r}")
        return _letter(job_id.encode(), stored)

    async def delete(self, letter: DeadLetter) -> None:
        """Delete a letter. Raises `UnknownJob` if another client has deleted it first."""
        num_tries = 0

        async def drop() -> int:
            nonlocal num_tries
            num_tries += 1
            dropped: int = await self._redis.hdel(keys.DEAD, letter.id)  # type: ignore[misc]
            return dropped

        # If the letter is absent at a later try, an earlier one deleted it and the reply was lost.
        if not await self._retries.run(drop) and num_tries == 1:
            raise UnknownJob(f"another client has just removed the dead letter {letter.id!r}")


_UNREADABLE = {"type": "internal", "message": "This entry cannot be read: it was not written by a worker."}


def _letter(id: bytes, stored: bytes) -> DeadLetter:
    """Parse a letter. An unreadable one becomes a letter without a body, so that it can be listed and dropped."""
    readable_id = id.decode("utf-8", "backslashreplace")
    match _parse_json(stored):
        case {
            "id": str(), "model": str(), "lane": "interactive" | "batch", "crashes": int(), "body": str(),
            "parked_at": int() | float() as parked_at, "error": {},
        } as entry if 0 <= parked_at < 253_000_000_000:  # in the years of `datetime`  # fmt: skip
            return parse_as(DeadLetter, {**entry, "id": readable_id})
    return DeadLetter(readable_id, "?", "interactive", 0, 0.0, _UNREADABLE, "")


def _parse_json(stored: bytes) -> Any:
    try:
        return json.loads(stored)
    except (ValueError, RecursionError):
        return None
