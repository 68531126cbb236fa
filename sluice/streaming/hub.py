"""One pub/sub connection for any number of streams: one for each has ten times the latency at 256 streams."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.transport.interruption import Interruption
from sluice.transport.retries import ANSWER_S, is_transient, time_limit
from sluice.transport.round_trips import RoundTrips

_IDLE_CHANNEL = "sluice:hub"  # keeps the connection subscribed when no stream is open; no client publishes on it
_QUIET_S = 1.0  # of silence, after which the connection is tested
_AFTER_STALL_S = 0.1  # for reading an answer that arrived while the process was stopped
# redis-py raises AttributeError if one task sends while another finds the connection broken.
_BROKEN = (RedisError, OSError, AttributeError)
_MAX_BUFFERED = 4096  # events for one slow reader; if it falls further behind, it reads the list instead


class Subscription:
    """Buffers the messages of one channel for one reader. If `take` returns none, the reader should read the list."""

    def __init__(self) -> None:
        self._buffer: deque[bytes] = deque()
        self._has_gap, self._ready = False, asyncio.Event()
        self._error: Exception | None = None

    def put(self, payload: bytes) -> None:
        """Buffer a message; if the buffer is full, drop all and mark a gap."""
        if len(self._buffer) >= _MAX_BUFFERED:
            self._buffer.clear()
            self._has_gap = True
        self._buffer.append(payload)
        self._ready.set()

    def mark_gap(self) -> None:
        """Record that messages may be missing, because the channel was subscribed just now or again."""
        self._has_gap = True
        self._ready.set()

    def set_error(self, error: Exception) -> None:
        """Record that the server refuses the subscription."""
        self._error = error
        self._ready.set()

    async def take(self, silence_s: float) -> list[bytes]:
        """Wait for messages and return all; none after a gap or `silence_s` seconds without one. Raises the server's
        refusal."""
        if not self._ready.is_set():  # else a time limit would cost more than the rest
            try:
                async with asyncio.timeout(silence_s):  # until Python 3.12 wait_for loses cancellations
                    await self._ready.wait()
            except TimeoutError:
                return []
        if self._error:
            raise self._error
        self._ready.clear()
        messages = [] if self._has_gap else list(self._buffer)
        self._has_gap = False
        self._buffer.clear()
        return messages


class Hub:
    """Shares one pub/sub connection among all subscriptions of a client."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._subscriptions: dict[str, set[Subscription]] = {}
        self._pubsub: PubSub | None = None
        self._task: asyncio.Task[None] | None = None
        self._changes = RoundTrips[str, None](self._send_changes)
        self._received = 0  # messages and acknowledgements

    @asynccontextmanager
    async def listen(self, channel: str) -> AsyncIterator[Subscription]:
        """Subscribe to a channel while the context is open."""
        subscription = Subscription()
        subscriptions = self._subscriptions.setdefault(channel, set())
        subscriptions.add(subscription)
        try:
            await self._subscribe(channel)
            yield subscription
        finally:
            subscriptions.discard(subscription)
            if not subscriptions and self._subscriptions.get(channel) is subscriptions:
                del self._subscriptions[channel]
                await self._unsubscribe(channel)

    async def aclose(self) -> None:
        """Close the connection."""
        while self._task is not None and not self._task.done():
            self._task.cancel()  # repeated, since redis-py's wait_for can lose a cancellation
            await asyncio.wait([self._task], timeout=0.1)

    async def _subscribe(self, channel: str) -> None:
        """Subscribe now, or with the next connection. Redis's acknowledgement leads to `Subscription.mark_gap`."""
        if self._task is None or self._task.done():  # the hub was closed, or its event loop
            self._task = asyncio.create_task(self._run(), name="sluice-hub")
        if self._pubsub is not None:
            await self._changes.call(channel)

    async def _unsubscribe(self, channel: str) -> None:
        if self._pubsub is not None:
            await self._changes.call(channel)

    async def _send_changes(self, channels: Sequence[str]) -> list[None]:
        """Subscribe to those of the channels that have subscriptions now, and unsubscribe from the others."""
        wanted = [channel for channel in channels if channel in self._subscriptions]
        if wanted and self._pubsub is not None:
            await _send(self._pubsub.subscribe, *wanted)
        # Only now: meanwhile another round trip may have subscribed to a channel that is wanted again.
        unwanted = {channel for channel in channels if channel not in self._subscriptions}
        if unwanted and self._pubsub is not None:
            await _send(self._pubsub.unsubscribe, *unwanted)
        return [None] * len(channels)

    async def _run(self) -> None:
        while True:
            try:
                await self._read()
            except _BROKEN as error:
                if isinstance(error, RedisError) and not is_transient(error):
                    return self._fail(error)
                await asyncio.sleep(0.1)

    def _fail(self, error: Exception) -> None:
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.set_error(error)

    async def _read(self) -> None:
        pubsub = self._redis.pubsub()
        try:
            async with time_limit(ANSWER_S):
                await pubsub.subscribe(_IDLE_CHANNEL)
            self._pubsub = pubsub  # from now on `_subscribe` sends; earlier channels follow below
            async with time_limit(ANSWER_S):
                await pubsub.subscribe(_IDLE_CHANNEL, *self._subscriptions)
            await self._listen(pubsub)
        finally:
            self._pubsub = None
            await _close(pubsub)

    async def _listen(self, pubsub: PubSub) -> None:
        """Dispatch messages. Raises redis-py's TimeoutError if a quiet connection turns out to be dead."""
        # A time limit for each message costs as much as the message, so a second task checks the connection instead.
        has_timeout = self._redis.connection_pool.connection_kwargs.get("socket_timeout") is not None
        wait_s = _QUIET_S if has_timeout else None  # redis-py applies the timeout of the caller's client otherwise
        with Interruption() as block:
            checking = asyncio.create_task(self._check(pubsub, block))
            try:
                while True:
                    message = await pubsub.get_message(timeout=wait_s)
                    if message is not None:
                        self._received += 1
                        if message["channel"] is not None:
                            self._dispatch(message["type"], message["channel"].decode(), message["data"])
            finally:
                checking.cancel()

    async def _check(self, pubsub: PubSub, block: Interruption) -> None:
        """Test the connection whenever it is quiet, and interrupt the block if it is dead: again, should redis-py lose
        the cancellation."""
        while True:
            try:
                await self._wait_until_dead(pubsub)
            except _BROKEN as error:
                block.interrupt(error)

    async def _wait_until_dead(self, pubsub: PubSub) -> NoReturn:
        """Raise redis-py's TimeoutError, or the error of sending, when the connection is dead, but not within
        `_QUIET_S` seconds."""
        while True:
            before = self._received
            await asyncio.sleep(_QUIET_S)
            if self._received == before:
                async with time_limit(ANSWER_S):  # redis-py may reconnect in this call
                    # Redis acknowledges it, and it needs no permission that the user might lack, as for PING.
                    await pubsub.subscribe(_IDLE_CHANNEL)
                await asyncio.sleep(ANSWER_S)
                await asyncio.sleep(_AFTER_STALL_S)
                if self._received == before:
                    raise RedisTimeoutError("a quiet connection does not answer")

    def _dispatch(self, type: str, channel: str, data: bytes) -> None:
        for subscription in self._subscriptions.get(channel, ()):
            if type == "message":
                subscription.put(data)
            elif type == "subscribe":  # the first one, or a repetition after redis-py reconnected
                subscription.mark_gap()


async def _send(command: Callable[..., Awaitable[None]], *channels: str) -> None:
    try:
        async with time_limit(ANSWER_S):
            await command(*channels)
    except _BROKEN:
        pass  # `_run` finds the broken connection too, and reconnects


async def _close(pubsub: PubSub) -> None:
    """Return the connection to the pool, disconnected. Closing a dead TLS connection gracefully takes 30 s."""
    if (connection := getattr(pubsub, "connection", None)) is not None:  # declared as None in redis-py
        await connection.disconnect(nowait=True)
    await pubsub.aclose()  # type: ignore[no-untyped-call]
