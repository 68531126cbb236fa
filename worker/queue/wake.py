"""Receives wake-ups and cancellations by pub/sub."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError

from sluice.contract import keys
from worker.queue.server.permissions import Need, forbidden

logger = logging.getLogger("sluice.queue")

# A flood of messages is read at this pace, which leaves most of the event loop's and the interpreter's time to streams.
_AT_ONCE = 32  # messages: some 2 ms of work
_WINDOW_S = 0.01
_QUIET_S = 5.0  # silence after which a ping is sent; without an answer for as long again, the connection is lost


class ControlListener:
    """Calls `wake` when there may be work, `cancel` with each id to cancel, and `on_reconnect` on each new connection,
    since messages may have been lost before it."""

    def __init__(
        self,
        redis: Redis,
        model: str,
        *,
        keyspace_events: bool,
        wake: Callable[[], None],
        cancel: Callable[[str], None],
        on_reconnect: Callable[[], Awaitable[None]],
    ) -> None:
        self._redis = redis
        self._model = model
        self._keyspace_events = keyspace_events
        self._wake = wake
        self._cancel = cancel
        self._on_reconnect = on_reconnect

    async def run(self) -> None:
        """Listen, and reconnect after errors, until this task is cancelled."""
        while True:
            try:
                await self._listen()
            except (RedisError, OSError):
                await asyncio.sleep(0.2)

    async def _listen(self) -> None:
        channels = [keys.wake(self._model), keys.CONTROL]
        if self._keyspace_events:
            await allow_keyspace_events(self._redis)
            channels += await self._keyspace_channels()
        async with self._redis.pubsub() as pubsub:
            await pubsub.subscribe(*channels)
            pace = _Pace()
            async for message in _messages(pubsub):
                await self._handle(message["type"], message["channel"], message["data"])
                await pace.keep()

    async def _keyspace_channels(self) -> list[str]:
        """Return the channels that our user may subscribe to: the server refuses SUBSCRIBE if one channel is denied."""
        db = self._redis.connection_pool.connection_kwargs.get("db", 0)
        channels = [f"__keyspace@{db}__:{keys.queue(self._model, lane)}" for lane in keys.LANES]
        denied = await forbidden(self._redis, [Need("SUBSCRIBE", (channel,), channel) for channel in channels])
        return [channel for channel in channels if channel not in {need.name for need in denied}]

    async def _handle(self, type: str, channel: bytes, data: bytes) -> None:
        if type == "subscribe":  # also after redis-py has reconnected by itself
            self._wake()
            if channel == keys.CONTROL.encode():
                await self._on_reconnect()
        elif channel == keys.CONTROL.encode():
            self._cancel(data.decode("utf-8", "surrogateescape"))
        elif channel == keys.wake(self._model).encode() or data == b"zadd":
            self._wake()


class _Pace:
    """Limits a loop to `_AT_ONCE` rounds in each `_WINDOW_S`. Messages wait on the server meanwhile, which closes the
    connection if they take too much memory; what they asked for is then found by the poll and the cancel keys."""

    def __init__(self) -> None:
        self._left, self._ends = _AT_ONCE, 0.0  # rounds of this window, and its end by the monotonic clock

    async def keep(self) -> None:
        """Count a round, and wait for the end of the window if it was the last one."""
        self._left -= 1
        if not self._left:
            await asyncio.sleep(max(0.0, self._ends - time.monotonic()))
            self._left, self._ends = _AT_ONCE, time.monotonic() + _WINDOW_S


async def _messages(pubsub: PubSub) -> AsyncIterator[dict[str, Any]]:
    """Yield messages, and send a ping when none arrive: `PubSub.listen` would drop a quiet connection after
    `socket_timeout`, and messages before the next connection would be lost."""
    asked = False
    while True:
        message = await pubsub.get_message(timeout=_QUIET_S)
        if message is None and asked:
            raise ConnectionLost("no answer to a ping")
        if asked := message is None:
            await pubsub.ping()
        else:
            yield message


async def allow_keyspace_events(redis: Redis) -> None:
    """Add "Kz" to the server's notify-keyspace-events if the server permits it. Other flags are kept."""
    try:
        flags = (await redis.config_get("notify-keyspace-events")).get("notify-keyspace-events", "")
        if "K" not in flags or not {"z", "A"} & set(flags):
            await redis.config_set("notify-keyspace-events", flags + "Kz")
    except ResponseError as refused:
        logger.debug("notify-keyspace-events cannot be set: %s", refused)
