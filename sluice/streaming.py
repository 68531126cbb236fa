"""Reads a job's events, each once and in order: new ones from the channel, missed ones from the list."""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Generic, NoReturn, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.contract import keys
from sluice.contract.events import Event, ProgressPhase, parse_event
from sluice.errors import UnknownJob, UnreadableLog
from sluice.presence import Attendances
from sluice.transport import (
    ANSWER_S,
    Interruption,
    Retries,
    RoundTrips,
    is_transient,
    raise_outage,
    refuse_demoted,
    time_limit,
)

_IDLE_CHANNEL = "sluice:hub"  # keeps the connection subscribed when no stream is open; no client publishes on it
_QUIET_S = 1.0  # of silence, after which the connection is tested
# redis-py raises AttributeError if one task sends while another finds the connection broken.
_BROKEN = (RedisError, OSError, AttributeError)


class Subscription:
    """Buffers the messages of one channel for one reader. If `take` returns none, the reader should read the list."""

    def __init__(self) -> None:
        self._buffer: deque[bytes] = deque()
        self._has_gap, self._ready = False, asyncio.Event()
        self._error: Exception | None = None

    def put(self, payload: bytes) -> None:
        """Buffer a message; if the buffer is full, drop all and mark a gap."""
        if len(self._buffer) >= 4096:  # a reader that is so far behind reads the list instead
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
        """Raise redis-py's TimeoutError, or the error of sending, when the connection is dead or its server demoted;
        not within `_QUIET_S` seconds."""
        while True:
            before = self._received
            await asyncio.sleep(_QUIET_S)
            if self._received == before:
                async with time_limit(ANSWER_S):  # redis-py may reconnect in this call
                    # Redis acknowledges it, and it needs no permission that the user might lack, as for PING.
                    await pubsub.subscribe(_IDLE_CHANNEL)
                await refuse_demoted(pubsub)
                await asyncio.sleep(ANSWER_S)
                await asyncio.sleep(0.1)  # to read an answer that arrived while the process was stopped
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


SILENCE_S = 1.0  # without a message, after which the list is read
LAST_SEQ = 2**53  # integers beyond it do not survive JSON in every language

T = TypeVar("T")


def check_after(after: int) -> None:
    """Check a sequence number. Raises ValueError if it is not an integer from -1 to 2**53."""
    if isinstance(after, bool) or not isinstance(after, int) or not -1 <= after <= LAST_SEQ:
        raise ValueError(f"after: must be an integer from -1, for all events, to 2**53; it is {after!r}")


@dataclass(frozen=True, slots=True)
class _Read:
    job_id: str
    first: int  # index of the first item to read


@dataclass(frozen=True, slots=True)
class _Log:
    """The items of a log from an index on; its last item, if it has one; and if the job's body is there."""

    items: list[bytes]
    last: list[bytes]
    has_body: bool


class Streams:
    """Follows the events of jobs."""

    def __init__(self, redis: Redis, hub: Hub, retries: Retries) -> None:
        self._redis = redis
        self._hub = hub
        self._retries = retries
        self._attendances = Attendances(redis, retries)
        self._reads = RoundTrips[_Read, _Log](self._read_logs)

    async def follow(
        self, job_id: str, after: int = -1, unknown_s: float = 10.0
    ) -> AsyncGenerator[tuple[bytes, Event]]:
        """Yield each event after `after` as the worker wrote it, and parsed; between them, `waiting` while no worker
        lives, and `loading` while the model is loaded. A job that no worker has ends here when its deadline passes.
        Raises as `Client.stream` does."""
        keys.check_job_id(job_id)
        check_after(after)
        next_seq, known_at = after + 1, time.monotonic()
        heard_at, is_deserted = time.monotonic(), False
        loaded: tuple[int, int] | None = None
        async with self._hub.listen(keys.channel(job_id)) as subscription:
            while True:
                events = _parse_publications(await subscription.take(SILENCE_S))
                if not events and time.monotonic() - heard_at >= SILENCE_S:  # not after a gap alone
                    heard_at = time.monotonic()
                    found = await self._attendances.check(job_id)
                    if found and found.workers is not None and is_deserted != (found.workers == 0):
                        is_deserted = found.workers == 0
                        yield _progress(job_id, next_seq - 1, found.attempt, found.workers)
                    if found and found.loaded and found.loaded != loaded:
                        loaded = found.loaded
                        yield _progress(job_id, next_seq - 1, found.attempt, found.workers, loaded)
                new_seqs = {event.seq for _, event in events if event.seq >= next_seq}
                is_known = True
                if not events or (new_seqs and max(new_seqs) - next_seq >= len(new_seqs)):
                    # From one event earlier, since `after` may be the final event.
                    events, is_known = await self._read_log(job_id, max(next_seq - 1, 0))
                for raw, event in events:
                    if event.seq == next_seq:
                        heard_at, is_deserted = time.monotonic(), False
                        yield raw, event
                        next_seq += 1
                    if event.final and event.seq < next_seq:
                        return
                if is_known:
                    known_at = time.monotonic()
                elif time.monotonic() - known_at >= unknown_s:
                    raise UnknownJob(f"no trace of job {job_id!r}: never submitted, or its events have expired")

    async def _read_log(self, job_id: str, first: int) -> tuple[list[tuple[bytes, Event]], bool]:
        """Return the events from index `first` on; if there are none, the last one: the job may have ended before. And
        True if there is a trace of the job. Raises `UnreadableLog` if an item is no event or its `seq` is not its
        index: a stream would wait for a missing `seq` for ever."""
        log = await self._reads.call(_Read(job_id, first))
        if log.items:
            return _parse_log(job_id, log.items, first), True
        if not log.last:
            return [], log.has_body
        seq = _parse_item(job_id, log.last[0]).seq
        found = await self._read_range(job_id, seq) if 0 <= seq <= LAST_SEQ else []
        if not found:  # lists only grow
            raise _unreadable(job_id, f"its last item has seq {seq}, which is beyond its end")
        return _parse_log(job_id, found, seq), True

    async def _read_range(self, job_id: str, first: int) -> list[bytes]:
        log = keys.log(job_id)
        found: list[bytes] = await self._retries.run_until_answered(lambda: self._redis.lrange(log, first, -1))
        return found

    async def _read_logs(self, reads: Sequence[_Read]) -> list[_Log | Exception]:
        answers = iter(await self._retries.run_until_answered(partial(self._send, reads)))
        return [_log_of(list(islice(answers, len(_commands(read))))) for read in reads]

    async def _send(self, reads: Sequence[_Read]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for read in reads:
                for command in _commands(read):
                    pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute(raise_on_error=False)  # else redis-py changes the text of an error
        raise_outage(answers)
        return answers


def _commands(read: _Read) -> list[tuple[str | int, ...]]:
    """Return the commands of a read. All items of a log include its last one."""
    log = keys.log(read.job_id)
    last = [("LRANGE", log, -1, -1)] if read.first else []
    return [("LRANGE", log, read.first, -1), ("EXISTS", keys.body(read.job_id)), *last]


def _log_of(answers: Sequence[Any]) -> _Log | Exception:
    for answer in answers:
        if isinstance(answer, Exception):
            return answer
    items, bodies, *last = answers
    return _Log(items, last[0] if last else items[-1:], bool(bodies))


def _progress(
    job_id: str, last_seq: int, attempt: int, workers: int | None, loaded: tuple[int, int] | None = None
) -> tuple[bytes, Event]:
    """Make the event that tells how many workers live, and of a load the bytes that are loaded, and all. Its `seq` is
    that of the last event yielded, so that a reader which resumes after it misses none, and one which drops what it has
    drops this one."""
    fields = {"type": "progress", "id": job_id, "seq": last_seq, "attempt": attempt, "ts": round(time.time(), 3)}
    phase: ProgressPhase = "waiting" if loaded is None else "loading"
    done, total = loaded or (0, 0)
    raw = json.dumps({**fields, "phase": phase, "done": done, "total": total, "workers": workers}).encode()
    return raw, parse_event(raw)


def _parse_log(job_id: str, found: list[bytes], first: int) -> list[tuple[bytes, Event]]:
    """Parse the items of a log from index `first` on. Raises `UnreadableLog`."""
    events = [(raw, _parse_item(job_id, raw)) for raw in found]
    for index, (_, event) in enumerate(events, first):
        if event.seq != index:
            raise _unreadable(job_id, f"item {index} has seq {event.seq}")
    return events


def _parse_item(job_id: str, raw: bytes) -> Event:
    try:
        return parse_event(raw)
    except ValueError as error:
        raise _unreadable(job_id, str(error)) from None


def _unreadable(job_id: str, reason: str) -> UnreadableLog:
    return UnreadableLog(f"{keys.log(job_id)} holds an item that no worker wrote: {reason}")


def _parse_publications(published: list[bytes]) -> list[tuple[bytes, Event]]:
    """Parse events. Any client may publish, so invalid messages are skipped: the list is authoritative."""
    events = []
    for raw in published:
        try:
            events.append((raw, parse_event(raw)))
        except ValueError:
            continue
    return events


class BackgroundReader(Generic[T]):
    """Reads an asynchronous generator in a task, so that a consumer can wait with a time limit and receive batches.

    The task starts with the first `take` and lives until the source ends or `close` is called.
    """

    def __init__(self, source: AsyncGenerator[T]) -> None:
        self._source, self._items = source, list[T]()
        self._ready, self._has_room = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take(self) -> list[T]:
        """Wait for items and return all of them; none at the end. Raises the errors of the source. Cancellation loses
        no item."""
        self._task = self._task or asyncio.create_task(self._read())
        await self._ready.wait()
        items, self._items = self._items, []
        self._has_room.set()
        if not items:
            self._task.result()
        elif not self._task.done():
            self._ready.clear()
        return items

    @property
    def is_ready(self) -> bool:
        """True if `take` returns, or raises, without waiting."""
        return self._ready.is_set()

    async def close(self) -> None:
        """Close the source and wait until it is closed."""
        if self._task is None:
            return await self._source.aclose()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async with aclosing(self._source):
                async for item in self._source:
                    self._items.append(item)
                    self._ready.set()
                    if len(self._items) >= 256:  # for a slow consumer, in addition to the channel's buffer
                        self._has_room.clear()
                        await self._has_room.wait()
        finally:
            self._ready.set()
