"""The client for web backends: `submit`, `stream`, `result`, `cancel`."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Self

from redis.asyncio import Redis

from sluice import wire
from sluice.batch.names import new_run
from sluice.batch.options import WINDOW, RunOptions, RunPaths
from sluice.batch.registry import BatchRegistry
from sluice.batch.status import Batch
from sluice.cancellation import Cancellation, Outcome
from sluice.dead_letters import DeadLetter, Letters
from sluice.errors import JobCancelled, JobFailed, NoWorker, UnknownJob
from sluice.presence import Workers
from sluice.queues import Queue, Queues
from sluice.streaming.hub import Hub
from sluice.streaming.streams import SILENCE_S, Streams
from sluice.submission import NewJob, Submission, Submitted, lane_of
from sluice.transport.connection import connect
from sluice.transport.retries import Retries
from sluice.wire import Event, JobError, Lane

_WORKER_EVERY_S = 0.25  # how often a submit that waits for a worker looks again


class Client:
    """Any number of jobs and streams over a handful of connections.

        async with Client("redis://localhost:6379/0") as client:
            job = await client.submit([{"role": "user", "content": "Hello!"}])
            async for event in client.stream(job.id):
                ...

    No connection is waited for in vain: a silent one is dropped within a few seconds, and a new one made. Calls are
    tried again for about five seconds; what waits for a job or a run (`stream`, `result`, `batch_events`) rides out
    an outage of up to `outage_s` seconds. Then `ServerUnreachable` is raised. What the server refuses, for a
    wrong password or a missing permission, is raised at once, as redis-py's error.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        redis: Redis | None = None,
        outage_s: float | None = 60.0,
    ) -> None:
        """`redis`: a client of yours to use instead; it must not decode responses, and you close it. `outage_s`: None
        waits for ever.

        Raises ValueError if the URL cannot be read; its password is not in the sentence.
        """
        self._owned = redis is None
        self._redis: Redis = redis or connect(url)
        if self._redis.get_encoder().decode_responses:  # type: ignore[no-untyped-call]
            raise ValueError("a client with decode_responses=True cannot be used: give one without, or just the url")
        self._retries, self._hub = Retries(self._redis, outage_s), Hub(self._redis)
        self._streams = Streams(self._redis, self._hub, self._retries)
        self._submission, self._board = Submission(self._redis, self._retries), BatchRegistry(self._redis)
        self._cancellation = Cancellation(self._redis, self._retries)
        self._queues, self._workers = Queues(self._redis, self._retries), Workers(self._redis, self._retries)
        self._letters = Letters(self._redis, self._retries)

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
        wait_worker_s: float | None = None,
    ) -> Submitted:
        """Queue a chat: the body of an OpenAI chat completion, or just its messages.

        Without a `lane`, the request's `service_tier` decides: "flex" is the batch lane, all else is interactive.

        A job for a model that nobody serves waits for a worker; `served` of the answer says whether there is one. With
        `wait_worker_s` the job is queued only once a worker is alive, and `NoWorker` is raised if there is none within
        so many seconds; 0 does not wait.

        Submitting an id twice queues one job, and the second call learns its state. The request is checked by
        the worker; a bad one ends as `failed` with a sentence. Raises `QueueFull`, or ValueError for a bad id,
        model or lane.
        """
        body = dict(request) if isinstance(request, Mapping) else {"messages": list(request)}
        job = NewJob(uuid.uuid4().hex if id is None else id, body, model, lane or lane_of(body))
        if wait_worker_s is None:
            return await self._submission.submit(job)
        return await self._submit_once_served(job, time.monotonic() + wait_worker_s)

    async def _submit_once_served(self, job: NewJob, until: float) -> Submitted:
        while True:
            try:
                return await self._submission.submit(job, needs_worker=True)
            except NoWorker:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise NoWorker(job.model, list(await self._workers.models())) from None
                await asyncio.sleep(min(_WORKER_EVERY_S, left_s))

    async def stream(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[Event]:
        """Every event after the given `seq`, once and in order, up to the final one.

        Late, dropped and repeated subscribers all see the same. Raises `UnknownJob` when there has been no
        trace of the job for `unknown_s` seconds, `UnreadableLog` when its list of events holds a foreign item,
        `ServerUnreachable` after an outage of the client's `outage_s`, and ValueError where `after` is not an integer
        from -1 to 2**53.
        """
        async with aclosing(self._streams.follow(job_id, after, unknown_s)) as heard:
            async for _, event in heard:
                yield event

    async def stream_json(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[bytes]:
        """The same as `stream`, each event as the JSON that the worker wrote: to pass on, or to keep."""
        async with aclosing(self._streams.follow(job_id, after, unknown_s)) as heard:
            async for raw, _ in heard:
                yield raw

    async def result(self, job_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """The `chat.completion` object, waiting for it if need be.

        Raises `JobFailed`, `JobCancelled`, `UnknownJob`, TimeoutError after `timeout` seconds, or
        `ServerUnreachable`.
        """
        wire.check_job_id(job_id)
        async with asyncio.timeout(timeout):
            stored = await self._stored_result(job_id)
            if stored is None:
                async for _ in self.stream(job_id):
                    pass
                stored = await self._stored_result(job_id)
        if stored is None:
            raise UnknownJob(f"the result of job {job_id!r} has expired")
        return _completion(json.loads(stored))

    async def cancel(self, job_id: str) -> Outcome:
        """End a job. One that waits in its queue is "cancelled" at once, whether a worker is there or not. For one that
        runs the end is "requested": its stream then ends with `cancelled`, unless it has just finished. "ended": there
        was nothing left to cancel. A request for an id that is not known yet holds for an hour.

        Raises `CancelNotStored` where the server is full: the workers were told all the same."""
        wire.check_job_id(job_id)
        return await self._cancellation.cancel(job_id)

    async def waits_for(self, job_id: str) -> str | None:
        """Return the model for which a queued job waits; None if it does not wait, or a plain producer queued it."""
        wire.check_job_id(job_id)
        read = partial(self._redis.hmget, wire.job_key(job_id), ["state", "model"])
        state, model = await self._retries.run(read)
        return model.decode() if state == b"queued" and model else None

    async def state(self, job_id: str) -> str | None:
        """queued, running, finished, failed or cancelled; None where there is no trace of the job."""
        wire.check_job_id(job_id)
        state: bytes | None = await self._retries.run(lambda: self._redis.hget(wire.job_key(job_id), "state"))
        if state is None:  # other producers than ours write no state
            return "queued" if await self._retries.run(lambda: self._redis.exists(wire.body_key(job_id))) else None
        return state.decode()

    async def workers(self) -> list[dict[str, str]]:
        """The live workers, as they describe themselves."""
        return await self._workers.read_all()

    async def dead_letters(self) -> list[DeadLetter]:
        """The jobs that took workers down with them, oldest first."""
        return await self._letters.read_all()

    async def dead_letter(self, job_id: str) -> DeadLetter:
        """Raises `UnknownJob`."""
        return await self._letters.read(job_id)

    async def retry(self, job_id: str) -> Submitted:
        """Submit a dead letter again, under a new id, and drop the letter. Raises `UnknownJob`, `QueueFull`, and
        ValueError if its body is gone or broken."""
        letter = await self.dead_letter(job_id)
        request = letter.request
        await self._letters.take(letter)
        try:
            return await self.submit(request, model=letter.model, lane=letter.lane)
        except BaseException:
            await self._letters.put_back(letter)
            raise

    async def drop_dead_letter(self, job_id: str) -> None:
        """Raises `UnknownJob`."""
        await self._letters.take(await self.dead_letter(job_id))

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
        served_only: bool = False,
        on_progress: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """Run an OpenAI Batch file to its end; outages of the server are waited out, however long.

        Called again after it was cancelled or died, it goes on where it was. `models` maps the names in the file to
        served ones, "*" any other. What is not done when the completion window ("90m"; 24h) has run out ends as
        expired. A file with bad lines comes back as `failed`, with all of them in `errors`, and
        nothing of it is run or kept. `window` is how many lines of a model are queued or running at once. With
        `served_only` a file for a model that nobody serves is bad too, if others are served; else its lines wait for
        a worker.
        Raises `BatchRefused`, ValueError, OSError where a file cannot be written, or redis-py's error where the
        server refuses.
        """
        from sluice.batch.run import run  # files are locked as Unix does it, and a backend may be written elsewhere

        place = RunPaths.beside(Path(input), Path(output), Path(errors) if errors else None)
        run_id = new_run(place.input.stem)
        wish = RunOptions(models, completion_window, metadata, window, run_id, served_only, names_expected=True)
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
        batch: Batch = await self._retries.run(lambda: self._board.read(batch_id))
        return batch

    async def batches(self) -> list[Batch]:
        """The runs that were heard of in the last week, oldest first."""
        keys = await self._retries.scan(wire.BATCHES)
        batches: list[Batch] = await self._retries.run(lambda: self._board.read_all(keys))
        return batches

    async def cancel_batch(self, batch_id: str) -> Batch:
        """Ask for the end of a run, and say how it is now. Raises `UnknownBatch`."""
        batch = await self.batch_status(batch_id)
        if not batch.ended:
            await self._retries.run(lambda: self._board.request_cancel(batch_id))
        return batch

    async def batch_events(self, batch_id: str) -> AsyncGenerator[Batch]:
        """How the run is now, and again whenever that has changed, to its end. Raises `UnknownBatch`, and
        `ServerUnreachable` after an outage of the client's `outage_s`."""
        last: Batch | None = None
        async with self._hub.listen(wire.batch_channel(batch_id)) as mail:
            while last is None or not last.ended:
                told = [Batch.from_json(raw) for raw in await mail.take(SILENCE_S)]
                for batch in told or [await self._retries.run_until_answered(lambda: self._board.read(batch_id))]:
                    if batch != last:
                        yield batch
                        last = batch

    async def queued(self, model: str, lane: Lane) -> int:
        """Jobs in the lane, those that run included."""
        return int(await self._retries.run(lambda: self._redis.zcard(wire.queue_key(model, lane))))

    async def queues(self) -> list[Queue]:
        """Every queue in which there are jobs, and how many workers serve it."""
        return await self._queues.read_all([worker.get("model", "") for worker in await self.workers()])

    async def purge(
        self,
        model: str,
        lane: Lane,
        *,
        older_than_s: float = 0.0,
        on_progress: Callable[[int, int], None] = lambda done, ended: None,
    ) -> int:
        """Cancel the jobs that wait in a queue, those that run excepted. Returns the number of those that ended.

        `older_than_s`: only those that were queued so long ago. `on_progress` receives how many were looked at, and
        how many of them ended."""
        done = ended = 0
        async for ids in self._queues.pages(model, lane, older_than_s=older_than_s):
            ended += await self._cancellation.end_waiting(wire.queue_key(model, lane), ids)
            done += len(ids)
            on_progress(done, ended)
        return ended

    async def ping(self) -> None:
        """Raises `ServerUnreachable` where no server answers."""
        await self._retries.run_for(self._redis.ping, 0.0)

    async def _stored_result(self, job_id: str) -> bytes | None:
        stored: bytes | None = await self._retries.run_until_answered(lambda: self._redis.get(wire.result_key(job_id)))
        return stored


def _completion(stored: dict[str, Any]) -> dict[str, Any]:
    match stored.get("type"):
        case "failed":
            error = stored["error"]
            raise JobFailed(JobError(error["type"], error["message"], error["retryable"]))
        case "cancelled":
            raise JobCancelled(stored["reason"])
    return stored
