"""The client for backends without an event loop, such as Django, Flask and Celery: `SyncClient`.

Its calls run the asynchronous `Client` on an event loop in a background thread, so there is one implementation, and
all threads of a process share its few connections.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sluice.client import Client
from sluice.contract.redis_url import MapFile
from sluice.mapped import open_client
from sluice.streaming import BackgroundReader

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Work = Callable[[], Coroutine[Any, Any, T]]


class _Background:
    """An event loop in a thread of its own, and a `Client` on it. Usable only in the process that created it."""

    def __init__(self, client: Client, owner: object) -> None:
        self.client, self._pid = client, os.getpid()
        self._lock = threading.RLock()  # reentrant: garbage-collecting a stream may acquire it while it is held
        self._loop = asyncio.new_event_loop()
        self._stopping, self._closed = asyncio.Event(), False
        self._thread = threading.Thread(target=self._run, name="sluice-client", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(owner, self._close)  # called once, at the latest when the process exits

    def call(self, work: Work[T]) -> T:
        """Run the coroutine and block until it ends. An exception in the calling thread, such as KeyboardInterrupt or
        Celery's soft time limit, cancels it."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("SyncClient: a callback cannot call the client that runs it; use a thread of its own")
        future = self._schedule(work)
        if future is None:
            raise RuntimeError("SyncClient: this stream's client was closed, or the process forked; start a new stream")
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("SyncClient: closed by another thread during the call") from None
        finally:
            future.cancel()

    def dismiss(self, work: Work[None]) -> None:
        """Start the coroutine without waiting. Never raises or blocks, so garbage collection may call it."""
        self._schedule(work)

    def _close(self) -> None:
        """Cancel the pending calls, close the connections and end the thread."""
        if self._pid != os.getpid():
            _INHERITED.append(self)
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)  # seconds; `Client.aclose` takes less

    def _schedule(self, work: Work[T]) -> Future[T] | None:
        """Schedule the coroutine; None after `close` and in a forked child. `close` cancels scheduled calls."""
        if self._pid != os.getpid():
            return None
        with self._lock:
            return None if self._closed else asyncio.run_coroutine_threadsafe(work(), self._loop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._stopping.wait()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=1.0)
        await self.client.aclose()


# A forked child keeps the objects that it inherited: freeing them could write to sockets and to an epoll set that the
# parent still uses.
_INHERITED: list[_Background] = []


def _overridden(client: Client, method: F) -> F:
    """Return the client's own form of a method of `Client`; a function that is none as it is."""
    name = getattr(method, "__name__", "")
    own: F = getattr(type(client), name) if getattr(Client, name, None) is method else method
    return own


def blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[SyncClient, P], T]":
    """Make a method of `SyncClient` from a coroutine function whose first parameter is a `Client`."""

    @wraps(method)
    def call(self: "SyncClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        background = self._background()
        own = _overridden(background.client, method)
        return background.call(lambda: own(background.client, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[Client, P], AsyncGenerator[T]],
) -> "Callable[Concatenate[SyncClient, P], Generator[T]]":
    """Make a generator method of `SyncClient` from an asynchronous generator function on a `Client`."""

    @wraps(method)
    def iterate(self: "SyncClient", /, *args: P.args, **kwargs: P.kwargs) -> Generator[T]:
        background = self._background()
        own = _overridden(background.client, method)
        source = BackgroundReader(own(background.client, *args, **kwargs))
        try:
            while items := background.call(source.take):
                yield from items
        finally:
            background.dismiss(source.close)

    return iterate


class SyncClient:
    """The methods of `Client` without `await`, for any number of threads.

        client = SyncClient("redis://localhost:6379/0")  # one for each process, at import

        job = client.submit([{"role": "user", "content": "Hello!"}])
        for event in client.stream(job.id):
            ...

    Parameters, results and exceptions are those of `Client`; each call blocks its thread. Leaving a stream early, by
    `break` or `close()`, ends its subscription. Connections and the background thread start with the first call in each
    process, so a client that was created, or even used, before a fork (gunicorn's preload, Celery's prefork) works in
    the parent and the child; a stream that was started before the fork continues in the parent only. In a thread that
    runs an event loop the calls work but block that loop: use `Client` there. `on_progress` of `batch` and `purge` is
    called in the background thread: it must not call the client, and while it runs all other calls wait.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        outage_s: float | None = 60.0,
        servers: str | Path | None = None,
    ) -> None:
        """Create a client that connects with its first call. `outage_s`: the longest outage, in seconds, that `stream`,
        `result` and `batch_events` wait out; None waits for ever. `servers`: the file of a map of several servers, to
        use instead of `url` as `MappedClient` does. Raises ValueError if the URL or the file is invalid."""
        self._open = partial(open_client, url if servers is None else MapFile(servers), outage_s=outage_s)
        self._open()  # checks the URL; connects to nothing
        # By process id: a lock that another thread holds during a fork is never released in the child.
        self._locks: dict[int, threading.Lock] = {}
        self._backgrounds: dict[int, _Background] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; calls that are blocked in other threads raise RuntimeError. A
        process that exits closes its client, and a later call opens it again."""
        if background := self._backgrounds.pop(os.getpid(), None):
            background.close()

    submit = blocking(Client.submit)
    count_tokens = blocking(Client.count_tokens)
    embed = blocking(Client.embed)
    stream = iterating(Client.stream)
    stream_json = iterating(Client.stream_json)
    result = blocking(Client.result)
    cancel = blocking(Client.cancel)
    waits_for = blocking(Client.waits_for)
    state = blocking(Client.state)
    workers = blocking(Client.workers)
    ask_worker = blocking(Client.ask_worker)
    served_models = blocking(Client.served_models)
    supervised_models = blocking(Client.supervised_models)
    ask_supervisor = blocking(Client.ask_supervisor)
    aliases = blocking(Client.aliases)
    set_alias = blocking(Client.set_alias)
    queued = blocking(Client.queued)
    queues = blocking(Client.queues)
    queue_heads = blocking(Client.queue_heads)
    misplaced_jobs = blocking(Client.misplaced_jobs)
    purge = blocking(Client.purge)
    ping = blocking(Client.ping)
    dead_letters = blocking(Client.dead_letters)
    dead_letter = blocking(Client.dead_letter)
    retry = blocking(Client.retry)
    drop_dead_letter = blocking(Client.drop_dead_letter)
    batch = blocking(Client.batch)
    rerun_batch = blocking(Client.rerun_batch)
    submit_batch = blocking(Client.submit_batch)
    batch_status = blocking(Client.batch_status)
    batches = blocking(Client.batches)
    cancel_batch = blocking(Client.cancel_batch)
    batch_events = iterating(Client.batch_events)

    def _background(self) -> _Background:
        pid = os.getpid()
        with self._locks.setdefault(pid, threading.Lock()):
            if pid not in self._backgrounds:
                self._backgrounds[pid] = _Background(self._open(), self)
            return self._backgrounds[pid]
