"""The client of several servers, over which a map spreads the models: a `Client` for each of them."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from redis.exceptions import RedisError

from sluice.cancellation import CancelOutcome
from sluice.client import Client
from sluice.contract import keys
from sluice.contract.batch import Batch
from sluice.contract.events import Event
from sluice.contract.keys import Lane
from sluice.contract.models import Model
from sluice.contract.redis_url import MapFile, Servers
from sluice.errors import NoWorker, ServerUnreachable, UnknownJob
from sluice.queues import DeadLetter, MisplacedJobs, Queue, QueueHead
from sluice.submission import NewJob, Submitted

logger = logging.getLogger("sluice.client")

T = TypeVar("T")


def open_client(server: str, *, outage_s: float | None = 60.0) -> Client:
    """Return the client of a server by its URL, or of the servers of a `MapFile`. Raises ValueError."""
    return MappedClient(server, outage_s=outage_s) if isinstance(server, MapFile) else Client(server, outage_s=outage_s)


class MappedClient(Client):
    """A `Client` of all servers of a map.

        async with MappedClient("servers.toml") as client: ...

    A job is submitted to the server of its model. An id finds its server again: this client remembers the last 10,000
    that it submitted or found, and asks every server for others, so an id may be used once on all of them together.
    Lists (`workers`, `queues`, …) are those of all servers; one that does not answer is left out, and named in
    `absent`. Its own models raise `ServerUnreachable`, which names it. Offline runs report on the default server.
    """

    def __init__(self, file: str | Path, *, outage_s: float | None = 60.0) -> None:
        """Create a client that connects with its first call. `outage_s`: as for `Client`. Raises ValueError if the file
        is invalid (the message never quotes a password)."""
        self._servers = Servers.read(file)
        self._clients = {url: Client(url, outage_s=outage_s) for url in self._servers.urls}
        self._outage_s = outage_s
        self._absent = dict[str, str]()  # why, by URL
        self._places = dict[str, str]()  # URL by job id, the one that was used last at the end
        super().__init__(redis=self._default.redis, outage_s=outage_s)

    @property
    def _default(self) -> Client:
        return self._clients[self._servers.default]

    async def aclose(self) -> None:
        """Close all connections."""
        await super().aclose()
        for client in self._clients.values():
            await client.aclose()

    @property
    def absent(self) -> Sequence[str]:
        """Sentences about servers that did not answer the last time: lists go without them."""
        return [f"{self._servers.describe(url)}: {why}" for url, why in self._absent.items()]

    @property
    def servers(self) -> Sequence[Client]:
        """A client for each server of the map, the default one first."""
        return (self._default, *(client for client in self._clients.values() if client is not self._default))

    def of_model(self, model: str) -> Client:
        """Return the client of the server that has the model's jobs."""
        return self._clients[self._servers.of_model(model)]

    async def of_job(self, job_id: str, names: Sequence[str] = ()) -> Client:
        """Return the client of the server that has a trace of the job, or one of the keys `names`; the default server's
        if none has. Raises `ServerUnreachable` if a server that may have it does not answer."""
        return await self._find(job_id, names) or self._default

    async def _has(self, job_id: str, names: Sequence[str] = ()) -> bool:
        """Return True if a server has a trace of the job, or one of the keys `names`."""
        return await self._find(job_id, names) is not None

    async def _submit(self, job: NewJob, wait_worker_s: float | None) -> Submitted:
        url = self._servers.of_model(job.model)
        self._remember(job.id, url)  # before the call, which may be cancelled and queue the job all the same
        try:
            with self._naming(url):
                return await self._clients[url]._submit(job, wait_worker_s)
        except NoWorker:
            raise NoWorker(job.model, [*await self.served_models()]) from None

    async def stream(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[Event]:
        """Yield the events of a job, as `Client.stream` does."""
        client = await self._when_known(job_id, unknown_s)
        async with aclosing(client.stream(job_id, after=after, unknown_s=unknown_s)) as events:
            async for event in events:
                yield event

    async def stream_json(self, job_id: str, *, after: int = -1, unknown_s: float = 10.0) -> AsyncGenerator[bytes]:
        """Yield the events of a job as JSON, as `Client.stream_json` does."""
        client = await self._when_known(job_id, unknown_s)
        async with aclosing(client.stream_json(job_id, after=after, unknown_s=unknown_s)) as events:
            async for event in events:
                yield event

    async def result(self, job_id: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the result of a job, as `Client.result` does."""
        async with asyncio.timeout(timeout):
            return await (await self._when_known(job_id, unknown_s=10.0)).result(job_id)

    async def cancel(self, job_id: str) -> CancelOutcome:
        """Cancel a job, as `Client.cancel` does. A request for an unknown id is stored on every server."""
        keys.check_job_id(job_id)
        if (client := await self._find(job_id)) is not None:
            return await client.cancel(job_id)
        await asyncio.gather(*(client.cancel(job_id) for client in self._clients.values()))
        return "requested"

    async def waits_for(self, job_id: str) -> str | None:
        """Return the model for which a queued job waits, as `Client.waits_for` does."""
        keys.check_job_id(job_id)
        return await (await self.of_job(job_id)).waits_for(job_id)

    async def state(self, job_id: str) -> str | None:
        """Return the state of a job, as `Client.state` does."""
        keys.check_job_id(job_id)
        return await (await self.of_job(job_id)).state(job_id)

    async def workers(self) -> list[dict[str, str]]:
        """Return the fields of each live worker of all servers."""
        return _joined(await self.ask_all(lambda client: client.workers()))

    async def ask_worker(self, worker: Mapping[str, str], what: Literal["drain", "restart"]) -> bool:
        """Ask a worker, on whichever server it is, as `Client.ask_worker` does."""
        return any(await self.ask_all(lambda client: client.ask_worker(worker, what)))

    async def served_models(self) -> set[str]:
        """Return the names that jobs may have, of all servers, as `Client.served_models` does."""
        return {*_joined(await self.ask_all(_served_names))}

    async def supervised_models(self) -> dict[str, dict[str, Model]]:
        """Return the models of each supervisor of all servers, as `Client.supervised_models` does."""
        found = await self.ask_all(lambda client: client.supervised_models())
        return {supervisor: models for supervisors in found for supervisor, models in supervisors.items()}

    async def ask_supervisor(self, supervisor: str, what: Literal["load", "unload"], model: str) -> None:
        """Ask a supervisor, on the server of the model, as `Client.ask_supervisor` does."""
        await self.of_model(model).ask_supervisor(supervisor, what, model)

    async def aliases(self) -> dict[str, str]:
        """Return the model that each alias stands for, of all servers."""
        found = await self.ask_all(lambda client: client.aliases())
        return {alias: model for aliases in found for alias, model in aliases.items()}

    async def set_alias(self, alias: str, model: str | None, *, served_only: bool = True) -> str | None:
        """Let a name stand for a model, as `Client.set_alias` does. Raises ValueError also if the map gives the name to
        another server than the model: a submit reads the aliases of one server."""
        client = self.of_model(alias)
        if model is not None and self.of_model(model) is not client:
            url = self._servers.of_model(model)
            raise ValueError(
                f"the alias {alias!r} is not on the server of {model!r}: name it in the map beside the model, with"
                f" {self._servers.describe(url)}"
            )
        return await client.set_alias(alias, model, served_only=served_only)

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters of all servers, oldest first."""
        return sorted(_joined(await self.ask_all(lambda client: client.dead_letters())), key=attrgetter("parked_at"))

    async def dead_letter(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises `UnknownJob`."""
        return await (await self._of_letter(job_id)).dead_letter(job_id)

    async def retry(self, job_id: str) -> Submitted:
        """Submit the job of a dead letter again, as `Client.retry` does."""
        return await (await self._of_letter(job_id)).retry(job_id)

    async def drop_dead_letter(self, job_id: str) -> None:
        """Delete a dead letter. Raises `UnknownJob`."""
        await (await self._of_letter(job_id)).drop_dead_letter(job_id)

    async def _of_letter(self, job_id: str) -> Client:
        """Return the client of the server that has the dead letter. Raises `UnknownJob`, or `ServerUnreachable` if one
        that may have it does not answer."""

        async def has_it(client: Client) -> bool:
            return any(letter.id == job_id for letter in await client.dead_letters())

        answers = await asyncio.gather(*(self._ask(url, has_it) for url in self._clients))
        for client, answer in zip(self._clients.values(), answers, strict=True):
            if answer is True:
                return client
        for answer in answers:
            if isinstance(answer, RedisError):
                raise answer
        raise UnknownJob(f"there is no dead letter {job_id!r}")

    async def queued(self, model: str, lane: Lane) -> int:
        """Return the number of jobs in the lane, including those that run."""
        return await self.of_model(model).queued(model, lane)

    async def queues(self) -> list[Queue]:
        """Return every queue that holds jobs, on the server of its model."""

        async def own(client: Client) -> list[Queue]:
            return [queue for queue in await client.queues() if self.of_model(queue.model) is client]

        return sorted(_joined(await self.ask_all(own)), key=attrgetter("model", "lane"))

    async def queue_heads(self) -> list[QueueHead]:
        """Return how long tenants have waited, of every queue of all servers."""
        return sorted(_joined(await self.ask_all(lambda client: client.queue_heads())), key=attrgetter("model", "lane"))

    async def misplaced_jobs(self) -> list[MisplacedJobs]:
        """Return the keys that hold jobs which no worker takes; also queues on another server than that of their
        model."""

        async def strays(client: Client) -> list[MisplacedJobs]:
            strayed = [queue for queue in await client.queues() if self.of_model(queue.model) is not client]
            return [
                *await client.misplaced_jobs(),
                *(
                    MisplacedJobs(
                        keys.queue(queue.model, queue.lane), queue.jobs, "the map names another server for this model"
                    )
                    for queue in strayed
                    if not queue.served
                ),
            ]

        return _joined(await self.ask_all(strays))

    async def purge(
        self,
        model: str,
        lane: Lane,
        *,
        older_than_s: float = 0.0,
        on_progress: Callable[[int, int], None] = lambda checked, cancelled: None,
    ) -> int:
        """Cancel the jobs that wait in a queue, as `Client.purge` does."""
        client = self.of_model(model)
        return await client.purge(model, lane, older_than_s=older_than_s, on_progress=on_progress)

    async def batches(self) -> list[Batch]:
        """Return the runs that reported within the last week; none if the default server does not answer."""
        found = await self._ask(self._servers.default, lambda client: client.batches())
        return [] if isinstance(found, RedisError) else found

    async def ping(self) -> None:
        """Check that one of the servers answers: each serves its models alone. Raises `ServerUnreachable` of the
        default one."""
        tries = [asyncio.create_task(self._ask(url, lambda client: client.ping())) for url in self._clients]
        try:
            for done in asyncio.as_completed(tries):
                if not isinstance(await done, RedisError):
                    return
        finally:
            for each in tries:
                each.cancel()
        if isinstance(error := tries[0].result(), RedisError):
            raise error

    def _remember(self, job_id: str, url: str) -> None:
        self._places.pop(job_id, None)
        self._places[job_id] = url
        if len(self._places) > 10_000:  # ids: about 2 MB
            del self._places[next(iter(self._places))]

    async def _find(self, job_id: str, names: Sequence[str] = ()) -> Client | None:
        """Return the client of the server that has a trace of the job, or one of the keys; None if none has. Raises
        `ServerUnreachable` if one that may have it does not answer."""
        if (known := self._places.get(job_id)) is not None:
            return self._clients[known]

        async def ask(url: str) -> tuple[str, bool | RedisError]:
            return url, await self._ask(url, lambda client: client._has(job_id, names))

        asked = [asyncio.create_task(ask(url)) for url in self._clients]
        failed: RedisError | None = None
        try:
            for done in asyncio.as_completed(asked):
                url, found = await done
                if isinstance(found, RedisError):
                    failed = failed or found
                elif found:
                    self._remember(job_id, url)
                    return self._clients[url]
        finally:
            for each in asked:
                each.cancel()
        if failed is not None:
            raise failed
        return None

    async def _when_known(self, job_id: str, unknown_s: float) -> Client:
        """Return the client of the server that has the job, once there is a trace of it; the default server's after
        `unknown_s` seconds. Waits out an outage of a server that may have it."""
        keys.check_job_id(job_id)
        started, waits_s = time.monotonic(), 0.0
        while True:
            try:
                if (client := await self._find(job_id)) is not None:
                    return client
            except ServerUnreachable:
                if self._outage_s is not None and time.monotonic() - started >= self._outage_s:
                    raise
            else:
                waits_s = waits_s or time.monotonic()
                if time.monotonic() - waits_s >= unknown_s:
                    return self._default
            await asyncio.sleep(0.25)

    async def ask_all(self, ask: Callable[[Client], Awaitable[T]]) -> list[T]:
        """Return the answers of the servers that answer. Raises the error of the default one if none does."""
        answers = await asyncio.gather(*(self._ask(url, ask) for url in self._clients))
        found = [answer for answer in answers if not isinstance(answer, RedisError)]
        if not found and isinstance(error := answers[0], RedisError):
            raise error
        return found

    async def _ask(self, url: str, ask: Callable[[Client], Awaitable[T]]) -> T | RedisError:
        """Return the answer of a server, or its error. One that did not answer the last time is asked again only if a
        PING comes back within half a second, or each list would take the five seconds of an outage."""
        client = self._clients[url]
        try:
            with self._naming(url):
                if url in self._absent:
                    await _ping(client)
                answer = await ask(client)
        except RedisError as error:
            if url not in self._absent:
                logger.warning("%s", error)
            self._absent[url] = str(error.__cause__ or error)
            return error
        if self._absent.pop(url, None):
            logger.warning("%s answers again", self._servers.describe(url))
        return answer

    @contextmanager
    def _naming(self, url: str) -> Iterator[None]:
        """Name the server in the error of an outage."""
        try:
            yield
        except ServerUnreachable as error:
            raise ServerUnreachable(f"{self._servers.describe(url)}: {error}") from error


async def _served_names(client: Client) -> list[str]:
    return [*await client.served_models()]


async def _ping(client: Client) -> None:
    try:
        async with asyncio.timeout(0.5):
            await client.ping()
    except TimeoutError:
        raise ServerUnreachable("no answer within 0.5 s") from None


def _joined(lists: Sequence[Sequence[T]]) -> list[T]:
    return [each for one in lists for each in one]
