"""The asyncio client for web backends: `submit`, `stream`, `result`, `cancel`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from redis.asyncio import Redis

from sluice.batch.registry import BatchRegistry
from sluice.batch.source import WINDOW, RunOptions, RunPaths
from sluice.cancellation import Cancellation, CancelOutcome
from sluice.contract import keys
from sluice.contract.batch import Batch, new_run_id
from sluice.contract.events import Event, JobError, parse_as
from sluice.contract.keys import JobFunction, JobWebhooks, Lane
from sluice.contract.models import Model
from sluice.errors import JobCancelled, JobFailed, UnknownJob
from sluice.interfaces.embeddings import vectors_of
from sluice.presence import Attendances, Workers, serves
from sluice.queues import DeadLetter, DeadLetters, MisplacedJobs, Queue, QueueHead, Queues
from sluice.streaming import SILENCE_S, Hub, Streams
from sluice.submission import ExtraKey, NewJob, Submission, Submitted, new_job
from sluice.transport import Retries, connect

T = TypeVar("T")


class Client:
    """The asyncio client. Any number of jobs and streams share a few connections.

        async with Client("redis://localhost:6379/0") as client:
            job = await client.submit([{"role": "user", "content": "Hello!"}])
            async for event in client.stream(job.id):
                ...

    An unresponsive connection is dropped within a few seconds and replaced. Calls are retried for about five seconds;
    calls that wait for a job or a run (`stream`, `result`, `batch_events`) survive an outage of up to `outage_s`
    seconds. After that `ServerUnreachable` is raised. If the server refuses a command, for example because of a wrong
    password or a missing permission, redis-py's error is raised at once.
    """

    def __init__(
        self, url: str = "redis://localhost:6379/0", *, redis: Redis | None = None, outage_s: float | None = 60.0
    ) -> None:
        """Create a client that connects with its first call.
        `redis`: an existing client to use instead of `url`; it must not decode responses, and the caller closes it.
        `outage_s`: the longest outage to wait out, in seconds; None waits for ever. Raises ValueError if the URL is
        invalid (the message never quotes its password) or `redis` decodes responses.
        """
        self._owned = redis is None
        self._redis: Redis = redis or connect(url)
        if self._redis.get_encoder().decode_responses:  # type: ignore[no-untyped-call]
            raise ValueError("a client with decode_responses=True cannot be used: give one without, or just the url")
        self._retries, self._hub = Retries(self._redis, outage_s), Hub(self._redis)
        self._streams = Streams(self._redis, self._hub, self._retries)
        self._submission = Submission(self._redis, self._retries)
        self._registry = BatchRegistry(self._redis)
        self._cancellation = Cancellation(self._redis, self._retries)
        self._attendances = Attendances(self._redis, self._retries)
        self._queues = Queues(self._redis, self._retries, self._attendances)
        self._workers = Workers(self._redis, self._retries)
        self._dead_letters = DeadLetters(self._redis, self._retries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the pub/sub connection, and the Redis client unless the caller passed it in."""
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
        function: JobFunction = "chat",
        extra_keys: Sequence[ExtraKey] = (),
        webhooks: JobWebhooks = "",
        traceparent: str | None = None,
    ) -> Submitted:
        """Queue a chat: the body of an OpenAI chat completion, or only its messages. With "count" as `function`, its
        prompt tokens are counted: see `count_tokens`; with "embed" it is a request for embeddings: see `embed`. `model`
        may be an alias: `Submitted.model` is what it stood for. Without a `lane`, the request's `service_tier` decides:
        "flex" is the batch lane, all else is interactive.

        A job for a model without a worker waits for one; `Submitted.served` is True if a live worker serves the model.
        With `wait_worker_s` the job is queued only once a worker is alive, and `NoWorker` is raised if none appears
        within that many seconds; 0 does not wait.

        The worker validates the request; an invalid one ends as `failed` with an explanation. A call that is cancelled,
        or raises `ServerUnreachable`, may have queued its job, or queue it within a few seconds. With an `id` of your
        own you can submit it again, which queues one job and returns its state, or `cancel` it, which holds for a job
        that is queued later, too.

        `extra_keys` are set in the same step as the job is queued: the server has both or neither. `webhooks`: sent at
        the job's end: "none" instead of `job.finished` and the like, or those of a "response". `traceparent`: of the
        trace that the job belongs to, in W3C's form; None: that of OpenTelemetry's current span, if there is one.

        Raises `QueueFull`, `ServerFull`, `ServerUnreachable`, or ValueError for a bad id, model, lane or `traceparent`.
        """
        job = new_job(
            request, model, lane, id=id, function=function, extra_keys=extra_keys, webhooks=webhooks,
            traceparent=traceparent,
        )  # fmt: skip
        return await self._submit(job, wait_worker_s)

    async def count_tokens(
        self,
        request: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        model: str = "default",
        lane: Lane | None = None,
        wait_worker_s: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Return the number of prompt tokens that `submit` would use for the same request, images included.

        A worker counts without a free row, and without computing the prompt. Waits at most `timeout` seconds.
        Raises `JobFailed` for a request that a chat would be refused for, and what `submit` and `result` raise.
        """
        job = new_job(request, model, lane, function="count")
        async with asyncio.timeout(timeout):
            await self._submit(job, wait_worker_s)
            counted = await self.result(job.id)
        return int(counted["usage"]["prompt_tokens"])

    async def embed(
        self,
        input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        model: str = "default",
        dimensions: int | None = None,
        lane: Lane | None = None,
        wait_worker_s: float | None = None,
        timeout: float | None = None,
    ) -> list[list[float]]:
        """Return the vector of each input, computed by an embedding model: of a text, of texts, of the token ids of one
        input, or of lists of them. `dimensions`: the first so many numbers, scaled to the length 1; None: all.

        Waits at most `timeout` seconds; the job continues. To have its usage, or to follow or cancel it, `submit` the
        request with "embed" as `function`. Raises `JobFailed` for an input that is too long, and what `submit` and
        `result` raise.
        """
        texts = input if isinstance(input, str) else list(input)
        request = {"input": texts, "encoding_format": "base64", "dimensions": dimensions}
        job = new_job(request, model, lane, function="embed")
        async with asyncio.timeout(timeout):
            await self._submit(job, wait_worker_s)
            embedded = await self.result(job.id)
        return await asyncio.to_thread(lambda: list(vectors_of(embedded)))

    async def _submit(self, job: NewJob, wait_worker_s: float | None) -> Submitted:
        if wait_worker_s is None:
            return await self._submission.submit(job)
        return await self._submission.submit_once_served(job, wait_worker_s, self._workers.models)

    async def stream(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[Event]:
        """Yield every event after sequence number `after`, once and in order, up to the final one.

        Late, reconnected and repeated subscribers all receive the same events. In addition a `Progress` of the phase
        `waiting` comes within about two seconds after the last live worker has gone, and when one has come back; and
        of the phase `loading`, in bytes, while a supervisor loads the model for the job. Neither is `stored`, and its
        `seq` is that of the event before it. Raises `UnknownJob` if there has been no
        trace of the job for `unknown_s` seconds, `UnreadableLog` if its list of events holds a foreign item or its
        numbers are not in order, `ServerUnreachable` after an outage of the client's `outage_s`, and ValueError if
        `after` is not an integer from -1 to 2**53.
        """
        async with aclosing(self._streams.follow(job_id, after, unknown_s)) as events:
            async for _, event in events:
                yield event

    async def stream_json(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[bytes]:
        """Yield the events of `stream`, each as the JSON that the worker wrote, to forward or to store."""
        async with aclosing(self._streams.follow(job_id, after, unknown_s)) as events:
            async for raw, _ in events:
                yield raw

    async def result(self, job_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the `chat.completion` object, or what another kind of job returns, waiting until the job has ended.

        Raises `JobFailed`, `JobCancelled`, `UnknownJob`, `UnreadableLog`, TimeoutError after `timeout` seconds (None
        waits for ever), or `ServerUnreachable`.
        """
        keys.check_job_id(job_id)
        async with asyncio.timeout(timeout):
            stored = await self._stored_result(job_id)
            if stored is None:
                async with aclosing(self._streams.follow(job_id)) as events:
                    async for _ in events:
                        pass
                stored = await self._stored_result(job_id)
            if stored is None:
                raise UnknownJob(f"the result of job {job_id!r} has expired")
            is_long = len(stored) > 65_536  # bytes: from here on parsing would hold up the event loop
            return _completion(await asyncio.to_thread(json.loads, stored) if is_long else json.loads(stored))

    async def _stored_result(self, job_id: str) -> bytes | None:
        key = keys.result(job_id)
        stored: bytes | None = await self._retries.run_until_answered(lambda: self._redis.get(key))
        return stored

    async def cancel(self, job_id: str) -> CancelOutcome:
        """Cancel a job and return the outcome.

        "cancelled": the job was still queued and has ended, with or without a live worker. "requested": the job runs,
        and its stream ends with `cancelled` unless it finishes first. "ended": the job had ended before. A request for
        an id that is not known yet holds for an hour.

        Raises `CancelNotStored` if the server is out of memory; the workers have received the request all the same.
        """
        keys.check_job_id(job_id)
        return await self._cancellation.cancel(job_id)

    @property
    def redis(self) -> Redis:
        """The redis-py client that this client uses, for keys of the caller's own. It does not decode responses."""
        return self._redis

    @property
    def retries(self) -> Retries:
        """Sends commands of `redis` until they are answered, for at most five seconds."""
        return self._retries

    @property
    def absent(self) -> Sequence[str]:
        """Sentences about servers that did not answer the last time: lists go without them. None without a map."""
        return ()

    @property
    def servers(self) -> "Sequence[Client]":
        """A client for each server, the default one first: this one alone, unless a map names several."""
        return (self,)

    async def ask_all(self, ask: Callable[["Client"], Awaitable[T]]) -> list[T]:
        """Return the answers of all servers, the default one's first; a map's that do not answer are left out."""
        return [await ask(self)]

    def of_model(self, model: str) -> "Client":
        """Return the client of the server that has the model's jobs: this one, unless a map names several."""
        return self

    async def of_job(self, job_id: str, names: Sequence[str] = ()) -> "Client":
        """Return the client of the server that has a trace of the job, or one of the keys `names`; the default server's
        if none has. Raises `ServerUnreachable` if a server that may have it does not answer."""
        return self

    async def _has(self, job_id: str, names: Sequence[str] = ()) -> bool:
        """Return True if the server has a trace of the job, or one of the keys `names`."""
        traces = [name(job_id) for name in (keys.job, keys.body, keys.log, keys.result)]
        return bool(await self._retries.run(lambda: self._redis.exists(*traces, *names)))

    async def waits_for(self, job_id: str) -> str | None:
        """Return the model for which a queued job waits; None if it is not queued or its hash names no model."""
        keys.check_job_id(job_id)
        read = partial(self._redis.hmget, keys.job(job_id), ["state", "model"])
        state, model = await self._retries.run(read)
        return model.decode() if state == b"queued" and model else None

    async def state(self, job_id: str) -> str | None:
        """Return queued, running, finished, failed or cancelled; None if there is no trace of the job. Ends the job if
        its deadline has passed and no worker has it."""
        keys.check_job_id(job_id)
        state: bytes | None = await self._retries.run(lambda: self._redis.hget(keys.job(job_id), "state"))
        if state in (b"queued", b"running"):
            (found,) = await self._attendances.check_all([job_id])
            return found.state if found else state.decode()
        if state is None:  # other producers than ours write no state
            return "queued" if await self._retries.run(lambda: self._redis.exists(keys.body(job_id))) else None
        return state.decode("utf-8", "replace")

    async def workers(self) -> list[dict[str, str]]:
        """Return the fields that each live worker publishes about itself; `state` is `running` or `draining`."""
        return await self._workers.read_all()

    async def ask_worker(self, worker: Mapping[str, str], what: Literal["drain", "restart"]) -> bool:
        """Ask a worker, as `workers` returns it, to drain (end its jobs and leave), or to drain and start again, one
        worker of a model after the other. Returns at once; False if that process has ended."""
        return await self._workers.ask(worker, what)

    async def aliases(self) -> dict[str, str]:
        """Return the model that each alias stands for."""
        return await self._workers.aliases()

    async def set_alias(self, alias: str, model: str | None, *, served_only: bool = True) -> str | None:
        """Let a name stand for a model from now on, or with None for no model, and return the model that it stood for.

        A job runs on the model that the alias names when it is submitted; jobs that wait keep theirs. With
        `served_only` the model must have a live worker. Raises ValueError if a live worker serves the alias's name, or
        if the model is an alias itself.
        """
        return await self._workers.set_alias(alias, model, served_only=served_only)

    async def served_models(self) -> set[str]:
        """Return the names that jobs may have: of models that live workers serve, of those that a supervisor loads when
        a job comes, and their aliases."""
        return await self._workers.models()

    async def supervised_models(self) -> dict[str, dict[str, Model]]:
        """Return the models of each supervisor of several (`sluice up` or `sluice worker` with more than one `--model`)
        by their names: `state` is `unloaded`, `loading`, `loaded` or `unloading`."""
        return await self._workers.supervised()

    async def ask_supervisor(self, supervisor: str, what: Literal["load", "unload"], model: str) -> None:
        """Ask a supervisor to load a model, or to end its process; it comes back when a job needs it. Returns at once;
        `supervised_models` shows what happens."""
        await self._workers.ask_supervisor(supervisor, {"do": what, "model": model})

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters, the jobs that crashed workers, oldest first."""
        return await self._dead_letters.read_all()

    async def dead_letter(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises `UnknownJob`."""
        return await self._dead_letters.read(job_id)

    async def retry(self, job_id: str) -> Submitted:
        """Submit the job of a dead letter under a new id, and delete the letter. The id follows from the letter: a
        call that failed or was cancelled, whatever it had done, may be repeated, and queues one job. Raises
        `UnknownJob`, `QueueFull`, `ServerFull`, and ValueError if the letter's body is missing or broken."""
        letter = await self.dead_letter(job_id)
        request = letter.request | ({"model": letter.model} if letter.request.get("model") is not None else {})
        job = new_job(request, letter.model, letter.lane, id=letter.retry_id, function=letter.function)
        submitted = await self._submission.submit(job)
        with suppress(UnknownJob):  # another client has retried it, too, or has just dropped it
            await self._dead_letters.delete(letter)
        return submitted

    async def drop_dead_letter(self, job_id: str) -> None:
        """Delete a dead letter. Raises `UnknownJob`."""
        await self._dead_letters.delete(await self.dead_letter(job_id))

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
        retry: Mapping[str, int] | None = None,
        on_progress: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """Run an OpenAI Batch file to its end, or resume its run, and return the final status; outages are waited out.
        `models` maps the names in the file to served ones; one that ends in "*" is any other name with this beginning.
        Lines that have not ended after the completion window ("90m"; default 24h) end as expired. A file with bad lines
        is `failed`; with `served_only` so is one for a model without a worker, if others are served. `window`: lines of
        a model that are queued or running at once. `retry`: how many times a line is run again, by the kind of its
        outcome ("cut", "invalid", "refused", "failed"). Raises `BatchRefused`, ValueError or OSError, or as redis-py.
        """
        from sluice.batch.run import run_batch  # imported here, since it needs fcntl, which Windows lacks

        paths = RunPaths.next_to_output(Path(input), Path(output), Path(errors) if errors else None)
        id = new_run_id(paths.input.stem)
        options = RunOptions(models, completion_window, metadata, window, id, served_only, retry=retry)
        return await run_batch(self._redis, paths, options, on_progress, self._redis_of)

    async def rerun_batch(
        self,
        run: str | Path,
        kinds: Collection[str] = ("failed", "invalid"),
        retry: Mapping[str, int] | None = None,
        on_progress: Callable[[Batch], None] = lambda batch: None,
    ) -> Batch:
        """Run lines of an ended run again, given its id or output file, as `rerun_lines`. Raises `UnknownBatch` too."""
        from sluice.batch.rerun import rerun_lines  # as in `batch`

        return await rerun_lines(self._redis, run, kinds, RunOptions(retry=retry), on_progress, self._redis_of)

    async def submit_batch(
        self,
        input: str | Path,
        folder: str | Path,
        *,
        models: Mapping[str, str] | None = None,
        completion_window: str | None = None,
        metadata: Mapping[str, str] | None = None,
        tenant: str | None = None,
        retry: Mapping[str, int] | None = None,
        not_before: float | None = None,
        priority: int = 0,
        id: str | None = None,
    ) -> Batch:
        """Copy a file into the workers' SLUICE_BATCH_DIR. At a scheduled time from `not_before` (Unix seconds) on, they
        run it and its completion window begins. Names that `models` lacks are mapped by SLUICE_BATCH_MODELS. Lines of a
        higher `priority` go first. Of an `id` there is one run. Raises OSError, or ValueError."""
        from sluice.batch.folder import RunFolder, submit_file

        own = {"tenant": tenant, "not_before": not_before, "priority": priority}
        id = id or new_run_id(Path(input).stem)
        options = RunOptions(models, completion_window, metadata, id=id, retry=retry, **own)  # type: ignore[arg-type]
        return await submit_file(self._redis, RunFolder(Path(folder).absolute()), Path(input), options)

    def _redis_of(self, model: str) -> Redis:
        return self.of_model(model).redis

    async def batch_status(self, batch_id: str) -> Batch:
        """Return the status of a run, whichever host feeds it. Raises `UnknownBatch`."""
        batch: Batch = await self._retries.run(lambda: self._registry.read(batch_id))
        return batch

    async def batches(self) -> list[Batch]:
        """Return the runs that reported within the last week, oldest first."""
        found = await self._retries.scan(keys.BATCHES)
        batches: list[Batch] = await self._retries.run(lambda: self._registry.read_all(found))
        return batches

    async def cancel_batch(self, batch_id: str) -> Batch:
        """Request the cancellation of a run, and return its status before that. Raises `UnknownBatch`."""
        batch = await self.batch_status(batch_id)
        if not batch.ended:
            await self._retries.run(lambda: self._registry.request_cancel(batch_id))
        return batch

    async def batch_events(self, batch_id: str) -> AsyncGenerator[Batch]:
        """Yield the status of a run now and after each change, until it has ended. Raises `UnknownBatch`, and
        `ServerUnreachable` after an outage of the client's `outage_s`."""
        last: Batch | None = None
        async with self._hub.listen(keys.batch_channel(batch_id)) as subscription:
            while last is None or not last.ended:
                published = [Batch.from_json(raw) for raw in await subscription.take(SILENCE_S)]
                for batch in published or [
                    await self._retries.run_until_answered(lambda: self._registry.read(batch_id))
                ]:
                    if batch != last:
                        yield batch
                        last = batch

    async def queued(self, model: str, lane: Lane) -> int:
        """Return the number of jobs in the lane, including those that run."""
        return int(await self._retries.run(lambda: self._redis.zcard(keys.queue(model, lane))))

    async def queues(self) -> list[Queue]:
        """Return every queue that holds jobs, with the number of workers that serve its model; one that a supervisor
        would load for a job has one. Ends the jobs past their deadline that no worker has, in queues without a worker,
        among the oldest 10,000 of each: elsewhere a worker ends them."""
        served = [worker.get("model", "") for worker in await self.workers() if serves(worker)]
        unloaded = {name for each in (await self.supervised_models()).values() for name in each} - {*served}
        return await self._queues.read_all([*served, *unloaded], await self.aliases())

    async def queue_heads(self) -> list[QueueHead]:
        """Return how long tenants have waited, of the oldest 300 jobs of a queue; of fewer if there are many queues."""
        return await self._queues.read_heads()

    async def misplaced_jobs(self) -> list[MisplacedJobs]:
        """Return keys like `sluice:queue:default`, without a lane or with a wrong one, whose jobs no worker takes."""
        return await self._queues.read_misplaced()

    async def purge(
        self,
        model: str,
        lane: Lane,
        *,
        older_than_s: float = 0.0,
        on_progress: Callable[[int, int], None] = lambda checked, cancelled: None,
    ) -> int:
        """Cancel the jobs that wait in a queue, but not those that run. Returns the number of jobs cancelled.
        `older_than_s`: cancel only jobs that were queued at least this many seconds ago. `on_progress` is called after
        each page of up to 1,000 jobs, with the total numbers of jobs checked and of jobs cancelled so far.
        """
        checked = cancelled = 0
        async for ids in self._queues.pages(model, lane, older_than_s=older_than_s):
            cancelled += await self._cancellation.end_waiting(keys.queue(model, lane), ids)
            checked += len(ids)
            on_progress(checked, cancelled)
        return cancelled

    async def ping(self) -> None:
        """Check that the server answers, with at most one retry. Raises `ServerUnreachable`."""
        await self._retries.run_for(self._redis.ping, 0.0)


def _completion(stored: dict[str, Any]) -> dict[str, Any]:
    match stored.get("type"):
        case "failed":
            raise JobFailed(parse_as(JobError, stored["error"]))
        case "cancelled":
            raise JobCancelled(stored["reason"])
    return stored
