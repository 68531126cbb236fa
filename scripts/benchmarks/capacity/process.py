"""A process of the load: workers with a simulated engine around the worker's own queue code, or chats and readers.

It prints `ready`, reads the begin and the end of the measurement in Unix seconds, and prints a `Measured` as JSON."""

import asyncio
import json
import logging
import math
import os
import random
import re
import resource
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from arq.worker import func

from sluice import Client
from sluice.contract import keys
from sluice.errors import ServerUnreachable
from worker.bounded_json.reader import BodyReader
from worker.monitoring.metrics import Metrics
from worker.queue.job.job import Job, JobResult
from worker.queue.job.publisher import JobLog
from worker.queue.job.runner import JobFunctions
from worker.queue.redis_server import RedisServer, redis_from_settings
from worker.queue.worker import QueueWorker
from worker.settings import Settings

MODEL = "capacity"


@dataclass(frozen=True, slots=True)
class Load:
    """The load on one server: as many chats as rows, each followed by another when its answer ends."""

    workers: int
    rows: int  # of a worker
    steps: float  # of a worker in a second; each appends a token to every row
    tokens: int  # of an answer, on average
    read: int  # chats that `sluice.Client` reads; a socket that drops what comes is subscribed to the others


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a load that one process is."""

    url: str
    kind: Literal["workers", "chats"]
    load: Load
    number: int  # of this process, from 0
    of: int  # number of processes of this kind


@dataclass(slots=True)
class Measured:
    """Measurements of one process between the begin and the end, in seconds."""

    cpu_s: float = 0.0
    tokens: int = 0  # that its workers appended
    failed: int = 0  # chats that were given up since the server did not answer for long
    lags: list[float] = field(default_factory=list)  # times by which the event loop woke late
    pickups: list[float] = field(default_factory=list)  # from the submission until the job runs
    received: list[float] = field(default_factory=list)  # from the append of a token until a client has it


class _Window:
    """The time of the measurement."""

    def __init__(self) -> None:
        self._begin = self._end = math.inf
        self.measured = Measured()

    def is_open(self) -> bool:
        """Return True during the measurement."""
        return self._begin <= time.time() < self._end

    async def measure(self) -> Measured:
        """Wait for the begin and the end, and return what was measured between them."""
        begin, end = map(float, (await asyncio.to_thread(sys.stdin.readline)).split())
        self._begin, self._end = begin, end
        await asyncio.sleep(begin - time.time())
        before = time.process_time()
        while (due := time.time() + 0.02) < end:
            await asyncio.sleep(0.02)
            self.measured.lags.append(time.time() - due)
        self.measured.cpu_s = time.process_time() - before
        return self.measured


class _Rows:
    """Stands for the engine of a worker: a token for every row in each step."""

    def __init__(self, load: Load, window: _Window) -> None:
        self._step_s, self._window = 1 / load.steps, window
        self._left = dict[str, int]()  # tokens, by job
        self._running = dict[str, tuple[JobLog, asyncio.Event]]()

    async def chat(self, ctx: dict[str, Any], request: dict[str, Any]) -> JobResult:
        """Run a job, as the worker's functions are called."""
        job: Job = ctx["job"]
        if self._window.is_open():
            self._window.measured.pickups.append(time.time() - request["at"])
        job_id, tokens = job.claim.job_id, request["max_tokens"]
        job.log.emit("started", model=MODEL, fingerprint="", worker=ctx["worker"], seed=0)
        ended = asyncio.Event()
        self._left[job_id], self._running[job_id] = tokens, (job.log, ended)
        await ended.wait()
        job.usage.completion_tokens = tokens
        timings = dict.fromkeys(("queue_s", "prefill_s", "ttft_s", "decode_s", "tokens_per_s"), 0.0)
        return JobResult("length", timings, {"choices": []}, is_answer=False)

    async def run(self, first_s: float) -> None:
        """Step from `first_s` seconds on. Steps that are late by more than their time are left out."""
        due = time.monotonic() + first_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - self._step_s) + self._step_s
            self._step()

    def _step(self) -> None:
        if self._window.is_open():
            self._window.measured.tokens += len(self._running)
        for job_id, (log, ended) in list(self._running.items()):
            log.emit("delta", token_ids=[self._left[job_id]], content=" word")
            self._left[job_id] -= 1
            if self._left[job_id] == 0:
                ended.set()
                del self._left[job_id], self._running[job_id]


async def _start_workers(share: Share, window: _Window, stack: AsyncExitStack) -> list[Coroutine[Any, Any, None]]:
    """Connect the workers of this process, and return what they run."""
    load, running = share.load, list[Coroutine[Any, Any, None]]()
    reader, metrics = BodyReader(), Metrics(MODEL)
    for number in range(share.number, load.workers, share.of):
        settings = Settings(
            redis_url=share.url, model="none", model_name=MODEL, worker_name=f"worker-{number}", max_rows=load.rows,
            queue_limit=1_000_000,
        )  # fmt: skip
        redis = await stack.enter_async_context(redis_from_settings(settings))
        rows = _Rows(load, window)
        functions = JobFunctions([func(rows.chat, name="chat")], {"worker": settings.worker_name}, reader)
        worker = QueueWorker(functions, server=RedisServer(redis, settings), settings=settings, metrics=metrics)
        await worker.connect()
        # The steps of all workers are spread over the time of one.
        running += [worker.main(), rows.run(number / load.workers / load.steps)]
    return running


_ENDED = re.compile(rb'"id":"([\w.-]+)","seq":\d+,"attempt":\d+,"type":"finished"')


class _Sink(asyncio.Protocol):
    """Subscribes to channels, and reads of what comes only which jobs have ended: costs the server what a client does,
    and this machine little."""

    def __init__(self) -> None:
        self._tail = b""
        self._ended = dict[bytes, asyncio.Event]()
        self._lost = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set_exception(ConnectionError(f"the server has closed the connection of a subscriber: {error}"))

    async def until_lost(self) -> None:
        """Wait for the end of the connection. Raises ConnectionError."""
        await self._lost

    def listen(self, job_id: str) -> asyncio.Event:
        """Subscribe to a job, and return an event that is set when it has ended."""
        ended = self._ended[job_id.encode()] = asyncio.Event()
        self._send("SUBSCRIBE", keys.channel(job_id))
        return ended

    def _send(self, *parts: str) -> None:
        assert self._transport is not None
        text = "".join(f"${len(part)}\r\n{part}\r\n" for part in parts)
        self._transport.write(f"*{len(parts)}\r\n{text}".encode())

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        if b'"type":"finished"' in data:
            for job_id in _ENDED.findall(data):
                if ended := self._ended.pop(job_id, None):
                    ended.set()
                    self._send("UNSUBSCRIBE", keys.channel(job_id.decode()))
        self._tail = data[-300:]  # longer than the beginning of an event, which may come in two pieces


class _Chats:
    """Submits chats, and reads their answers."""

    def __init__(self, share: Share, window: _Window, client: Client, sink: _Sink) -> None:
        self._share, self._window = share, window
        self._client, self._sink = client, sink

    async def run(self, number: int, begin_s: float) -> None:
        """Submit a chat after `begin_s` seconds, and another one whenever the answer has ended."""
        await asyncio.sleep(begin_s)
        tokens = self._share.load.tokens
        # The first answers have any length, so that later ones do not end together.
        for turn, longest in _turns(1, tokens):
            job_id = f"{number}-{turn}"
            request = {"messages": [], "max_tokens": random.randint(longest - tokens + 1, longest), "at": time.time()}
            try:
                await self._chat(job_id, request, is_read=number < self._share.load.read)
            except ServerUnreachable:
                if self._window.is_open():
                    self._window.measured.failed += 1
                await asyncio.sleep(1.0)

    async def _chat(self, job_id: str, request: dict[str, Any], *, is_read: bool) -> None:
        ended = None if is_read else self._sink.listen(job_id)
        await self._client.submit(request, model=MODEL, id=job_id)
        if ended:
            await ended.wait()
        else:
            await self._read(job_id)

    async def _read(self, job_id: str) -> None:
        async for event in self._client.stream(job_id):
            if event.type == "delta" and self._window.is_open():
                self._window.measured.received.append(time.time() - event.ts)


def _turns(first: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the number of each chat, and the most tokens of its answer."""
    yield first, tokens
    while True:
        first += 1
        yield first, tokens + tokens // 2


async def _start_chats(share: Share, window: _Window, stack: AsyncExitStack) -> list[Coroutine[Any, Any, None]]:
    client = await stack.enter_async_context(Client(share.url))
    host, _, port = share.url.removeprefix("redis://").removesuffix("/0").partition(":")
    _, sink = await asyncio.get_running_loop().create_connection(_Sink, host, int(port))
    chats = _Chats(share, window, client, sink)
    numbers = range(share.number, share.load.workers * share.load.rows, share.of)
    # 500 a second: a burst of all takes longer to settle.
    return [sink.until_lost(), *(chats.run(number, number / 500) for number in numbers)]


async def _run(share: Share) -> Measured:
    window = _Window()
    async with AsyncExitStack() as stack:
        start = _start_workers if share.kind == "workers" else _start_chats
        tasks = [asyncio.create_task(each) for each in await start(share, window, stack)]
        print("ready", flush=True)
        measuring = asyncio.create_task(window.measure())
        await asyncio.wait([measuring, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if ended := [task for task in tasks if task.done()]:  # none ends but by an error
            print(f"error: {ended[0].exception()!r}", file=sys.stderr, flush=True)
            os._exit(1)
        print(json.dumps(asdict(await measuring)), flush=True)
        os._exit(0)  # without a drain: the server goes with its data


def main() -> None:
    """Run the share that the first argument names as JSON."""
    given = json.loads(sys.argv[1])
    logging.getLogger("sluice").setLevel(logging.ERROR)  # each worker warns of what is so for a benchmark's server
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 10_000 <= hard:  # a worker has four connections
        resource.setrlimit(resource.RLIMIT_NOFILE, (10_000, hard))
    asyncio.run(_run(Share(**{**given, "load": Load(**given["load"])})))


if __name__ == "__main__":
    main()
