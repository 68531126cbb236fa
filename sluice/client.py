"""The client for web backends: `submit`, `stream`, `result`, `cancel`."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice import letters, wire
from sluice.batch.board import Board
from sluice.batch.names import new_run
from sluice.batch.place import WINDOW, Place, Wish
from sluice.batch.status import Batch
from sluice.connection import connect
from sluice.errors import JobCancelled, JobFailed, UnknownJob
from sluice.hub import Hub
from sluice.letters import DeadLetter
from sluice.submission import NewJob, Submission, Submitted, lane_of
from sluice.wire import Event, JobError, Lane

_SILENCE_S = 1.0  # then the list is read, whatever the channel says


class Client:
    """Any number of jobs and streams over a handful of connections.

        async with Client("redis://localhost:6379/0") as client:
            job = await client.submit([{"role": "user", "content": "Hello!"}])
            async for event in client.stream(job.id):
                ...

    Methods raise redis-py's errors where the server is away, but a stream rides an outage out.
    """

    def __init__(self, url: str = "redis://localhost:6379/0", *, redis: Redis | None = None) -> None:
        """`redis`: a client of yours to use instead; it must not decode responses, and you close it.

        Raises ValueError if the URL cannot be read; its password is not in the sentence.
        """
        self._owned = redis is None
        self._redis: Redis = redis or connect(url)
        if self._redis.get_encoder().decode_responses:  # type: ignore[no-untyped-call]
            raise ValueError("a client with decode_responses=True cannot be used: give one without, or just the url")
        self._hub = Hub(self._redis)
        self._submission, self._board = Submission(self._redis), Board(self._redis)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._hub.aclose()
        if self._owned:
            await self._redis.aclose()

    async def submit(
        self,
        request: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        model: str = "default",
        lane: Lane | None = None,
        id: str | None = None,
    ) -> Submitted:
        """Queue a chat: the body of an OpenAI chat completion, or just its messages.

        Without a `lane`, the request's `service_tier` decides: "flex" is the batch lane, all else is interactive.

        Submitting an id twice queues one job, and the second call learns its state. The request is checked by
        the worker; a bad one ends as `failed` with a sentence. Raises `QueueFull`, or ValueError for a bad id,
        model or lane.
        """
        body = dict(request) if isinstance(request, Mapping) else {"messages": list(request)}
        job_id = uuid.uuid4().hex if id is None else id
        return await self._submission.submit(NewJob(job_id, body, model, lane or lane_of(body)))

    async def stream(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[Event]:
        """Every event after the given `seq`, once and in order, up to the final one.

        Late, dropped and repeated subscribers all see the same. Raises `UnknownJob` when there has been no
        trace of the job for `unknown_s` seconds.
        """
        async with aclosing(self._follow(job_id, after, unknown_s)) as heard:
            async for _, event in heard:
                yield event

    async def stream_json(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[bytes]:
        """The same as `stream`, each event as the JSON that the worker wrote: to pass on, or to keep."""
        async with aclosing(self._follow(job_id, after, unknown_s)) as heard:
            async for raw, _ in heard:
                yield raw

    async def _follow(self, job_id: str, after: int, unknown_s: float) -> AsyncGenerator[tuple[bytes, Event]]:
        wire.check_job_id(job_id)
        next_seq, known_at = after + 1, time.monotonic()
        async with self._hub.listen(wire.channel(job_id)) as mail:
            while True:
                news = [(raw, wire.parse_event(raw)) for raw in await mail.take(_SILENCE_S)]
                fresh = {event.seq for _, event in news if event.seq >= next_seq}
                if not news or (fresh and max(fresh) - next_seq >= len(fresh)):
                    news = await self._read_log(job_id, max(next_seq - 1, 0))  # `after` may name the final one
                for raw, event in news:
                    if event.seq == next_seq:
                        yield raw, event
                        next_seq += 1
                    if event.final and event.seq < next_seq:
                        return
                if news or await self._exists(job_id):
                    known_at = time.monotonic()
                elif time.monotonic() - known_at >= unknown_s:
                    raise UnknownJob(f"no trace of job {job_id!r}: never submitted, or its events have expired")

    async def result(self, job_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """The `chat.completion` object, waiting for it if need be.

        Raises `JobFailed`, `JobCancelled`, `UnknownJob`, or TimeoutError after `timeout` seconds.
        """
        wire.check_job_id(job_id)
        async with asyncio.timeout(timeout):
            stored = await self._redis.get(wire.result_key(job_id))
            if stored is None:
                async for _ in self.stream(job_id):
                    pass
                stored = await self._redis.get(wire.result_key(job_id))
        if stored is None:
            raise UnknownJob(f"the result of job {job_id!r} has expired")
        return _completion(json.loads(stored))

    async def cancel(self, job_id: str) -> None:
        """Ask for the end of a job, queued or running. Its stream then ends with `cancelled`, unless it has
        just finished."""
        wire.check_job_id(job_id)
        await self._redis.set(wire.cancel_key(job_id), "1", ex=wire.CANCEL_S)
        await self._redis.publish(wire.CONTROL, job_id)

    async def state(self, job_id: str) -> str | None:
        """queued, running, finished, failed or cancelled; None where there is no trace of the job."""
        wire.check_job_id(job_id)
        state: bytes | None = await self._redis.hget(wire.job_key(job_id), "state")  # type: ignore[misc]
        if state is None:  # other producers than ours write no state
            return "queued" if await self._redis.exists(wire.body_key(job_id)) else None
        return state.decode()

    async def workers(self) -> list[dict[str, str]]:
        """The live workers, as they describe themselves."""
        found = [key async for key in self._redis.scan_iter(match=wire.WORKERS, count=1000)]
        hashes: list[dict[bytes, bytes]] = [await self._redis.hgetall(key) for key in found]  # type: ignore[misc]
        return [{k.decode(): v.decode() for k, v in fields.items()} for fields in hashes if fields]

    async def dead_letters(self) -> list[DeadLetter]:
        """The jobs that took workers down with them, oldest first."""
        return await letters.read_all(self._redis)

    async def dead_letter(self, job_id: str) -> DeadLetter:
        """Raises `UnknownJob`."""
        return await letters.read(self._redis, job_id)

    async def retry(self, job_id: str) -> Submitted:
        """Submit a dead letter again, under a new id, and drop the letter. Raises `UnknownJob`, `QueueFull`."""
        letter = await self.dead_letter(job_id)
        await letters.take(self._redis, letter)
        try:
            return await self.submit(letter.request, model=letter.model, lane=letter.lane)
        except BaseException:
            await letters.put_back(self._redis, letter)
            raise

    async def drop_dead_letter(self, job_id: str) -> None:
        """Raises `UnknownJob`."""
        await letters.take(self._redis, await self.dead_letter(job_id))

    async def batch(
        self,
        input: str | Path,
        output: str | Path,
        *,
        errors: str | Path | None = None,
        models: Mapping[str, str] | None = None,
        completion_window: str | None = None,
        metadata: Mapping[str, str] | None = None,
        window: int = WINDOW,
        on_progress: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """Run an OpenAI Batch file to its end; outages of the server are waited out.

        Called again after it was cancelled or died, it goes on where it was. `models` maps the names in the file to
        served ones, "*" any other. What is not done when the completion window ("90m"; 24h) has run out ends as
        expired. A file with bad lines comes back as `failed`, with all of them in `errors`, and
        nothing of it is run. `window` is how many lines of a model are queued or running at once.
        Raises `BatchRefused`, ValueError, or OSError where a file cannot be written.
        """
        from sluice.batch.run import run  # files are locked as Unix does it, and a backend may be written elsewhere

        place = Place.beside(Path(input), Path(output), Path(errors) if errors else None)
        wish = Wish(models, completion_window, metadata, window, new_run(place.input.stem))
        return await run(self._redis, place, wish, on_progress)

    async def submit_batch(self, input: str | Path, folder: str | Path) -> Batch:
        """Leave a file in the folder that is workers' SLUICE_BATCH_DIR; they run it at its time. Raises OSError."""
        from sluice.batch.folder import Folder, submit

        return await submit(self._redis, Folder(Path(folder).absolute()), Path(input))

    async def feed_batches(self, folder: str | Path, *, take: bool, models: Mapping[str, str]) -> None:
        """One pass over such a folder: go on with what runs there, and `take` what lies in its inbox."""
        from sluice.batch.folder import Folder, feed

        await feed(self._redis, Folder(Path(folder).absolute()), take=take, models=models)

    async def batch_status(self, batch_id: str) -> Batch:
        """How a run goes, wherever it is fed. Raises `UnknownBatch`."""
        return await self._board.read(batch_id)

    async def batches(self) -> list[Batch]:
        """The runs that were heard of in the last week, oldest first."""
        return await self._board.read_all()

    async def cancel_batch(self, batch_id: str) -> Batch:
        """Ask for the end of a run, and say how it is now. Raises `UnknownBatch`."""
        batch = await self._board.read(batch_id)
        if not batch.ended:
            await self._board.ask_for_end(batch_id)
        return batch

    async def batch_events(self, batch_id: str) -> AsyncGenerator[Batch]:
        """How the run is now, and again whenever that has changed, to its end. Raises `UnknownBatch`."""
        last: Batch | None = None
        async with self._hub.listen(wire.batch_channel(batch_id)) as mail:
            while last is None or not last.ended:
                told = [Batch.from_json(raw) for raw in await mail.take(_SILENCE_S)]
                for batch in told or await self._read_batch(batch_id):
                    if batch != last:
                        yield batch
                        last = batch

    async def queued(self, model: str, lane: Lane) -> int:
        """Jobs in the lane, those that run included."""
        return int(await self._redis.zcard(wire.queue_key(model, lane)))

    async def ping(self) -> None:
        """Raises redis-py's error where no server answers."""
        await self._redis.ping()

    async def _read_batch(self, batch_id: str) -> list[Batch]:
        try:
            return [await self._board.read(batch_id)]
        except (RedisError, OSError):
            return []  # the events go on when the server is back

    async def _read_log(self, job_id: str, first: int) -> list[tuple[bytes, Event]]:
        try:
            said: list[bytes] = await self._redis.lrange(wire.log_key(job_id), first, -1)  # type: ignore[misc]
            if not said:  # it may have ended before `first`
                said = await self._redis.lrange(wire.log_key(job_id), -1, -1)  # type: ignore[misc]
        except (RedisError, OSError):
            return []  # the stream goes on when the server is back
        return [(raw, wire.parse_event(raw)) for raw in said]

    async def _exists(self, job_id: str) -> bool:
        try:
            return bool(await self._redis.exists(wire.body_key(job_id), wire.log_key(job_id)))
        except (RedisError, OSError):
            return True


def _completion(stored: dict[str, Any]) -> dict[str, Any]:
    match stored.get("type"):
        case "failed":
            error = stored["error"]
            raise JobFailed(JobError(error["type"], error["message"], error["retryable"]))
        case "cancelled":
            raise JobCancelled(stored["reason"])
    return stored
