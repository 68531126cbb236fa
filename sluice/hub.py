"""One pub/sub connection for any number of streams: a connection each costs ten times the latency at 256."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

_HOME = "sluice:hub"  # keeps the connection subscribed when no stream is open; nobody publishes here
_MOST_WAITING = 4096  # events of one slow reader; beyond it the list is the better buffer


class Mail:
    """What has come on one channel for one reader. An empty answer says: read the list."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._missed, self._news = False, asyncio.Event()

    def put(self, payload: bytes) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.clear()
            self._missed = True
        self._waiting.append(payload)
        self._news.set()

    def miss(self) -> None:
        """The channel was subscribed, or was away for a while."""
        self._missed = True
        self._news.set()

    async def take(self, silence_s: float) -> list[bytes]:
        """All that has come; nothing after a gap, or after so many seconds of silence."""
        try:
            async with asyncio.timeout(silence_s):  # until Python 3.12 wait_for loses cancellations
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        taken = [] if self._missed else list(self._waiting)
        self._missed = False
        self._waiting.clear()
        return taken


class Hub:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._readers: dict[str, set[Mail]] = {}
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Mail]:
        mail, readers = Mail(), self._readers.setdefault(channel, set())
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
        while self._task is not None and not self._task.done():
            self._task.cancel()  # again, if redis-py's wait_for has lost it
            await asyncio.wait([self._task], timeout=0.1)

    async def _subscribe(self, channel: str) -> None:
        """Its acknowledgement reaches the reader as `miss`. Not connected: the next connection subscribes all."""
        if self._task is None or self._task.done():  # closed, or its event loop was
            self._task = asyncio.create_task(self._run(), name="sluice-hub")
        if self._pubsub is not None:
            try:
                await self._pubsub.subscribe(channel)
            except (RedisError, OSError):
                pass  # the reading side sees the broken connection too, and starts over

    async def _unsubscribe(self, channel: str) -> None:
        if self._pubsub is not None:
            try:
                await self._pubsub.unsubscribe(channel)
            except (RedisError, OSError):
                pass

    async def _run(self) -> None:
        while True:
            try:
                await self._read()
            except (RedisError, OSError):
                await asyncio.sleep(0.1)

    async def _read(self) -> None:
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(_HOME)
            self._pubsub = pubsub  # from here on readers subscribe by themselves; those that came before, now
            try:
                await pubsub.subscribe(_HOME, *self._readers)
                while True:
                    message = await pubsub.get_message(timeout=60)
                    if message is not None:
                        self._pass_on(message["type"], message["channel"].decode(), message["data"])
            finally:
                self._pubsub = None

    def _pass_on(self, type: str, channel: str, data: bytes) -> None:
        for mail in self._readers.get(channel, ()):
            if type == "message":
                mail.put(data)
            elif type == "subscribe":  # the first, and any that redis-py sent again by itself
                mail.miss()
