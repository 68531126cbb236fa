"""One pub/sub connection for any number of streams: a connection each costs ten times the latency at 256."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.transport.retries import ANSWER_S, is_transient, time_limit

_HOME = "sluice:hub"  # keeps the connection subscribed when no stream is open; nobody publishes here
_QUIET_S = 1.0  # after which the connection has to show that it is alive
# redis-py raises the last where one task sends just as another finds the connection broken.
_BROKEN = (RedisError, OSError, AttributeError)
_MOST_WAITING = 4096  # events of one slow reader; beyond it the list is the better buffer


class Subscription:
    """Buffers the messages of one channel for one reader. An empty batch means: read the list instead."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._missed, self._news = False, asyncio.Event()
        self._failure: Exception | None = None

    def put(self, payload: bytes) -> None:
        """Buffer a message; if the buffer is full, drop all and mark a gap."""
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.clear()
            self._missed = True
        self._waiting.append(payload)
        self._news.set()

    def mark_gap(self) -> None:
        """Record that messages may be missing: the channel was just subscribed, again perhaps."""
        self._missed = True
        self._news.set()

    def set_error(self, error: Exception) -> None:
        """Record that the server refuses the subscription."""
        self._failure = error
        self._news.set()

    async def take(self, silence_s: float) -> list[bytes]:
        """Wait for messages and return all; none after a gap or `silence_s` seconds without one. Raises the server's
        refusal."""
        try:
            async with asyncio.timeout(silence_s):  # until Python 3.12 wait_for loses cancellations
                await self._news.wait()
        except TimeoutError:
            return []
        if self._failure:
            raise self._failure
        self._news.clear()
        taken = [] if self._missed else list(self._waiting)
        self._missed = False
        self._waiting.clear()
        return taken


class Hub:
    """Shares one pub/sub connection among all subscriptions of a client."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._readers: dict[str, set[Subscription]] = {}
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Subscription]:
        """Subscribe to a channel while the context is open."""
        mail, readers = Subscription(), self._readers.setdefault(channel, set())
        readers.add(mail)
        try:
            await self._subscribe(channel)
            yield mail
        finally:
            readers.discard(mail)
            if not readers and self._readers.get(channel) is readers:
                del self._readers[channel]
                await self._unsubscribe(channel)

    async def aclose(self) -> None:
        """Close the connection."""
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again, if redis-py's wait_for has lost it
            await asyncio.wait([self._task], timeout=0.1)

    async def _subscribe(self, channel: str) -> None:
        """Subscribe now, or with the next connection. The acknowledgement calls `Subscription.mark_gap`."""
        if self._task is None or self._task.done():  # closed, or its event loop was
            self._task = asyncio.create_task(self._run(), name="sluice-hub")
        if self._pubsub is not None:
            await _send(self._pubsub.subscribe, channel)

    async def _unsubscribe(self, channel: str) -> None:
        if self._pubsub is not None:
            await _send(self._pubsub.unsubscribe, channel)

    async def _run(self) -> None:
        while True:
            try:
                await self._read()
            except _BROKEN as error:
                if isinstance(error, RedisError) and not is_transient(error):
                    return self._fail(error)
                await asyncio.sleep(0.1)

    def _fail(self, error: Exception) -> None:
        for readers in self._readers.values():
            for mail in readers:
                mail.set_error(error)

    async def _read(self) -> None:
        pubsub = self._redis.pubsub()
        try:
            async with time_limit(ANSWER_S):
                await pubsub.subscribe(_HOME)
            self._pubsub = pubsub  # from here on readers subscribe by themselves; those that came before, now
            async with time_limit(ANSWER_S):
                await pubsub.subscribe(_HOME, *self._readers)
            await self._listen(pubsub)
        finally:
            self._pubsub = None
            await _close(pubsub)

    async def _listen(self, pubsub: PubSub) -> None:
        """Dispatch messages. Raises redis-py's TimeoutError if a quiet connection turns out to be dead."""
        asked_at: float | None = None
        while True:
            async with time_limit(_QUIET_S + ANSWER_S):  # redis-py may connect again in it
                message = await pubsub.get_message(timeout=_QUIET_S)
            if message is not None:
                asked_at = None
                if message["channel"] is not None:
                    self._pass_on(message["type"], message["channel"].decode(), message["data"])
            elif asked_at is None:
                asked_at = time.monotonic()
                async with time_limit(ANSWER_S):
                    await pubsub.subscribe(_HOME)  # is acknowledged, and needs no permission that a PING might lack
            elif time.monotonic() - asked_at >= ANSWER_S:
                raise RedisTimeoutError("a quiet connection does not answer")

    def _pass_on(self, type: str, channel: str, data: bytes) -> None:
        for mail in self._readers.get(channel, ()):
            if type == "message":
                mail.put(data)
            elif type == "subscribe":  # the first, and any that redis-py sent again by itself
                mail.mark_gap()


async def _send(command: Callable[[str], Awaitable[None]], channel: str) -> None:
    try:
        async with time_limit(ANSWER_S):
            await command(channel)
    except _BROKEN:
        pass  # the reading side sees the broken connection too, and starts over


async def _close(pubsub: PubSub) -> None:
    """Return the connection to the pool, disconnected. Closing a dead TLS connection gracefully takes 30 s."""
    if (connection := getattr(pubsub, "connection", None)) is not None:  # which redis-py declares as None
        await connection.disconnect(nowait=True)
    await pubsub.aclose()  # type: ignore[no-untyped-call]
