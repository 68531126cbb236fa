"""The connection to Redis: clients from URLs, commands that are sent again, and many calls in one round trip."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import redis.sentinel
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.contract.redis_url import (
    BAD_OPTION,
    UNREADABLE,
    Sentinels,
    credentials_error,
    redacted,
    sentinels_of,
    url_error,
)
from sluice.contract.refusals import is_full, is_temporary, reason_of
from sluice.errors import ServerFull, ServerUnreachable


def connect(url: str) -> Redis:
    """Return a client that connects with its first command. Raises ValueError if the URL is invalid."""
    if reason := url_error(url):
        raise _bad(url, reason)
    # Without redis-py's time limits and retries, which differ by release: `Retries` has them.
    options: dict[str, Any] = {"socket_connect_timeout": 5, "socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    try:
        pool = pool_of(url, **options)
    except ValueError:
        raise _bad(url, UNREADABLE) from None
    if not options_fit(pool):
        raise _bad(url, BAD_OPTION)
    return Redis.from_pool(pool)


def pool_of(url: str, kind: type[ConnectionPool] = ConnectionPool, **options: Any) -> ConnectionPool:
    """Return a pool of connections to the server of a URL; if the URL names sentinels, to the primary that they name. A
    pool of the latter waits for a free connection whatever its `kind`. Options of the URL override those given. Raises
    ValueError."""
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    if (sentinels := sentinels_of(url)) is None:
        return kind.from_url(url, **options)
    to_server, to_sentinel = _sentinel_options(sentinels)
    once = {**to_sentinel, "retry": Retry(NoBackoff(), 0)}
    manager = Sentinel(sentinels.addresses, sentinel_kwargs=once)  # type: ignore[no-untyped-call]
    unlimited = {"max_connections": 2**31, "timeout": None}
    return _PrimaryPool(sentinels.service, manager, **{**unlimited, **options, **to_server})  # type: ignore[no-untyped-call]


def blocking_client(url: str, **options: Any) -> redis.Redis:
    """Return a client without an event loop, for the server of a URL as `pool_of` finds it. Raises ValueError."""
    if (sentinels := sentinels_of(url)) is None:
        return redis.Redis.from_url(url, **options)
    to_server, to_sentinel = _sentinel_options(sentinels)
    manager = redis.sentinel.Sentinel(sentinels.addresses, sentinel_kwargs=to_sentinel)  # type: ignore[no-untyped-call]
    primary: redis.Redis = manager.master_for(sentinels.service, **{**options, **to_server})  # type: ignore[no-untyped-call]
    return primary


def follow_primary(client: redis.Redis) -> None:
    """Have the next command of a client of `blocking_client` go to the primary that the sentinels name now. Does
    nothing without sentinels, or if none of them answers."""
    pool = client.connection_pool
    if isinstance(pool, redis.sentinel.SentinelConnectionPool):
        with suppress(redis.sentinel.MasterNotFoundError):
            pool.get_master_address()  # type: ignore[no-untyped-call]


def _sentinel_options(sentinels: Sentinels) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of connections to the servers, and of those to the sentinels. Raises ValueError."""
    given: dict[str, Any] = dict(parse_url(sentinels.server))
    for name in ("host", "port"):
        given.pop(name, None)
    # Two dead sentinels leave half of the time for an answer: hosts that are gone are asked until another answers.
    to_sentinel = {"socket_connect_timeout": ANSWER_S / 4, "socket_timeout": ANSWER_S / 4}
    for name in ("username", "password"):
        if value := given.pop(f"sentinel_{name}", None):
            to_sentinel[name] = value
    if given.pop("connection_class", None):
        tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
        to_sentinel |= {"ssl": True, **tls}
        given["ssl"] = True
    return given, to_sentinel


class _PrimaryPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the server that sentinels name as the primary."""

    async def get_master_address(self) -> tuple[str, int]:
        """Ask the sentinels for the primary's address, and drop idle connections to another. Raises redis-py's
        MasterNotFoundError."""
        try:
            address: tuple[str, int] = await self.sentinel_manager.discover_master(self.service_name)
        except MasterNotFoundError:  # its text lists Python objects
            raise MasterNotFoundError(
                f"no sentinel names a primary of {self.service_name!r} that is up; check that the sentinels answer, and"
                " the service's name in the URL"
            ) from None
        if address != self.master_address:
            self.master_address = address
            await _drop_idle(self)
        return address

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Disconnect the connections; with those in use also the ones to the sentinels."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                await sentinel.aclose()


async def refuse_demoted(pubsub: PubSub) -> None:
    """Raise redis-py's ConnectionError if the sentinels name another primary than the server of this subscription,
    which a failover can leave connected. Does nothing without sentinels, or if none of them answers."""
    pool: ConnectionPool = pubsub.connection_pool
    connection = getattr(pubsub, "connection", None)  # declared as None in redis-py
    if not isinstance(pool, _PrimaryPool) or connection is None:
        return
    try:
        primary = await pool.get_master_address()
    except MasterNotFoundError:
        return
    if (connection.host, connection.port) != primary:
        raise ConnectionError("the server is the primary no more")


async def _drop_idle(pool: ConnectionPool) -> None:
    # The pool's own `disconnect` would hand out a connection while it waits for the socket.
    for connection in list(pool._available_connections):
        await connection.disconnect(nowait=True)


async def wrong_credentials(redis: Redis) -> str:
    """Return what is wrong with the credentials of a client whose server has refused them. Connects to the server."""
    given = redis.connection_pool.connection_kwargs
    has_user, has_password = bool(given.get("username")), bool(given.get("password"))
    return credentials_error(has_user=has_user, has_password=has_password, is_open=await _is_open(redis))


async def _is_open(redis: Redis) -> bool:
    """Return True if the client's server answers without a password."""
    pool = redis.connection_pool
    given = {name: value for name, value in pool.connection_kwargs.items() if name not in ("username", "password")}
    try:
        async with (
            Redis.from_pool(ConnectionPool(pool.connection_class, **given)) as anonymous,
            asyncio.timeout(ANSWER_S),
        ):
            await anonymous.ping()
    except (RedisError, OSError, TimeoutError):
        return False
    return True


def options_fit(pool: ConnectionPool) -> bool:
    """Return True if redis-py accepts the options of the pool's URL. It would check them with the first command."""
    try:
        pool.connection_class(**pool.connection_kwargs)
        pool.get_encoder().encode("")  # type: ignore[no-untyped-call]
    except (RedisError, ValueError, TypeError, LookupError, AttributeError, NameError):
        return False
    return True


def _bad(url: str, reason: str) -> ValueError:
    return ValueError(
        f"{redacted(url)!r} is not the URL of a server: {reason}. One looks like redis://localhost:6379/0"
    )


class Interruption:
    """A block that can be interrupted. It needs no task of its own:

    with Interruption() as block:
        timer = loop.call_later(5, block.interrupt, TooLate())
        await work()
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: Exception | None = None
        self._cancelling = 0
        self._interruptions = 0

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "only a task can be interrupted"
        self._cancelling = self._task.cancelling()
        return self

    def interrupt(self, error: Exception) -> None:
        """Cancel what the block awaits; the block raises `error` instead of the cancellation. Without effect before and
        after the block. To be called from outside of its task; again, if what the block awaits can lose a
        cancellation."""
        if self._task is not None:
            self._error = error
            self._interruptions += 1
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        for _ in range(self._interruptions):
            task.uncancel()
        # The task may have been cancelled by others, too: then it remains cancelled.
        if task.cancelling() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error from None


Command = Callable[[], Any]  # sends one command; redis-py's type hints are unreliable

# A dead connection costs this limit only, since the next try begins with a PING on a new one.
ANSWER_S = 2.0
_BACKOFF_S = (0.0, 0.1, 0.2, 0.5)  # between tries; the first is for connections that died while they were idle


def is_transient(error: Exception) -> bool:
    """Return True for an outage, which ends by itself; False for a refusal, such as a wrong password or a key of the
    wrong type."""
    match error:
        case AuthenticationError() | AuthorizationError():  # redis-py counts them as lost connections
            return False
        case ResponseError():
            return is_temporary(error)
    return isinstance(error, ConnectionError | RedisTimeoutError | OSError)


def server_full(error: BaseException) -> ServerFull:
    """Return the client's error for an error reply of a full server: see `is_full`."""
    full = ServerFull(f"the server refuses writes: {reason_of(error)}")
    full.__cause__ = error
    return full


def raise_outage(answers: Iterable[object]) -> None:
    """Raise the first answer of a pipeline that is an error of an outage, so that the pipeline is sent again."""
    for answer in answers:
        if isinstance(answer, ResponseError) and is_transient(answer):
            raise answer


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Limit the time of a block. Raises redis-py's TimeoutError after `seconds`, and the interrupted command loses its
    connection."""
    try:
        async with asyncio.timeout(seconds):  # until Python 3.12 wait_for loses cancellations
            yield
    except TimeoutError:
        raise RedisTimeoutError(f"no answer within {seconds:g} s") from None


class Retries:
    """Sends commands to one server until they are answered. Only commands that are safe to send twice may be passed."""

    def __init__(
        self,
        redis: Redis,
        outage_s: float | None,
        *,
        waits_for: tuple[type[RedisError], ...] = (),
        log: logging.Logger | None = None,
    ) -> None:
        """`outage_s`: the longest outage in seconds; None waits for ever. `waits_for`: additional errors to retry as if
        they were outages. `log`: receives the beginning and end of an outage."""
        self._redis = redis
        self._outage_s = outage_s
        self._waits_for = waits_for
        self._log = log
        self._dropped_at = 0.0  # by the monotonic clock

    async def run(self, command: Command) -> Any:
        """Send a command whose caller waits only for its answer; gives up after about five seconds. Raises as
        `run_for`."""
        longest_s = 2.5 * ANSWER_S  # for the first try, and the PING of the second
        return await self.run_for(command, longest_s if self._outage_s is None else min(longest_s, self._outage_s))

    async def run_until_answered(self, command: Command) -> Any:
        """Send a command for a caller that waits anyway, for a job or a run: up to the outage limit. Raises as
        `run_for`."""
        return await self.run_for(command, self._outage_s)

    async def run_for(self, command: Command, outage_s: float | None) -> Any:
        """Send a command and return its answer. Raises redis-py's error of a refusal at once, and `ServerUnreachable`
        after an outage of `outage_s` seconds, but not before a second try."""
        started, failures = time.monotonic(), 0
        explained: Exception | None = None
        while True:
            sent_at = time.monotonic()
            try:
                answer = await self._try(command, is_first=not failures)
            except (RedisError, OSError) as refused:
                failures += 1
                error = server_full(refused) if is_full(refused) else refused
                if not self._is_retryable(error):
                    raise error from error.__cause__
                # A server without free connections often closes one before its reply is read.
                explained = error if reason_of(error) else explained
                tried_s = time.monotonic() - started
                if failures > 1 and outage_s is not None and tried_s >= outage_s:
                    raise _outage_error(explained or error, tried_s) from explained or error
                self._report_outage(failures, error)
            else:
                self._report_recovery(failures, time.monotonic() - started)
                return answer
            await self._drop_idle_connections(sent_at)
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1])

    async def scan(self, pattern: str, *, waits_out_outages: bool = False) -> list[bytes]:
        """Return all matching keys, in commands of about a thousand keys: no time limit suits a whole keyspace."""
        found = set[bytes]()
        cursor = 0
        send = self.run_until_answered if waits_out_outages else self.run
        while True:
            cursor, keys = await send(partial(self._redis.scan, cursor, match=pattern, count=1000))
            found.update(keys)
            if not cursor:
                return list(found)

    async def _try(self, command: Command, *, is_first: bool) -> Any:
        if is_first:
            async with time_limit(ANSWER_S):
                return await command()
        async with time_limit(1.5 * ANSWER_S):
            await self._ping()
        async with time_limit(30.0):  # the server is alive, but megabytes may come over a slow connection
            return await command()

    async def _ping(self) -> None:
        try:
            await self._redis.ping()
        except ResponseError as error:  # an error reply shows that the server is alive
            if is_transient(error):
                raise

    def _is_retryable(self, error: Exception) -> bool:
        return is_transient(error) or isinstance(error, self._waits_for)

    def _report_outage(self, failures: int, error: Exception) -> None:
        if self._log and failures == 1:
            self._log.warning("the server does not answer (%s); retrying until it does", reason_of(error) or error)

    def _report_recovery(self, failures: int, seconds: float) -> None:
        if self._log and failures:
            self._log.warning("the server answers again, after %.1f s", seconds)

    async def _drop_idle_connections(self, sent_at: float) -> None:
        """Disconnect the pool's idle connections, which are probably lost too, unless another command has done so since
        `sent_at`."""
        if self._dropped_at > sent_at:
            return
        self._dropped_at = time.monotonic()
        await _drop_idle(self._redis.connection_pool)


def _outage_error(error: Exception, seconds: float) -> Exception:
    if not is_transient(error):
        return error
    if reason := reason_of(error):
        tried = f" for {seconds:.0f} s" if seconds >= 1 else ""
        return ServerUnreachable(f"the server could not be used{tried}: {reason}")
    return ServerUnreachable(f"no answer for {seconds:.0f} s: {error}" if seconds >= 1 else str(error))


MAX_CALLS = 100  # in one round trip: others wait for it, and an answer may be a long list of events

C = TypeVar("C")
A = TypeVar("A")


@dataclass(slots=True)
class _Trip(Generic[C, A]):
    calls: list[C] = field(default_factory=list)
    task: "asyncio.Task[Sequence[A | Exception]] | None" = None


class RoundTrips(Generic[C, A]):
    """Joins calls: those that come while a round trip is under way share the next one.

    A command costs redis-py some 0.2 ms of CPU time, and one of a pipeline a fifth of that, so this decides how long
    many requests that arrive together wait. A single call is sent at once.
    """

    def __init__(self, send: Callable[[Sequence[C]], Awaitable[Sequence[A | Exception]]]) -> None:
        """`send`: sends calls in one round trip. It returns an answer for each, or the error to raise for it."""
        self._send = send
        self._filling: _Trip[C, A] | None = None  # takes further calls
        self._last: asyncio.Task[Sequence[A | Exception]] | None = None

    async def call(self, call: C) -> A:
        """Send a call, and return its answer. Raises its error, and what `send` raises. The call of a caller that is
        cancelled is sent all the same."""
        trip = self._trip()
        index = len(trip.calls)
        trip.calls.append(call)
        assert trip.task is not None
        answer = (await asyncio.shield(trip.task))[index]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _trip(self) -> "_Trip[C, A]":
        if self._filling is None or len(self._filling.calls) >= MAX_CALLS:
            self._filling = _Trip()
            self._filling.task = self._last = asyncio.create_task(self._run(self._filling, self._last))
            self._last.add_done_callback(_retrieve)
        return self._filling

    async def _run(
        self, trip: "_Trip[C, A]", before: "asyncio.Task[Sequence[A | Exception]] | None"
    ) -> Sequence[A | Exception]:
        if before is not None and not before.done():
            await asyncio.wait({before}, timeout=0.05)  # a longer one is an outage, or has a long answer
        if self._filling is trip:
            self._filling = None
        return await self._send(trip.calls)


def _retrieve(task: "asyncio.Task[object]") -> None:
    """Retrieve the error of a round trip whose callers have all been cancelled, or asyncio logs it."""
    if not task.cancelled():
        task.exception()
