"""Sends commands to the server with a time limit, and again if the connection was lost."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice.contract.refusals import is_full, is_temporary, reason_of
from sluice.errors import ServerFull, ServerUnreachable

Command = Callable[[], Any]  # sends one command; redis-py's type hints are unreliable

# A dead connection costs the first limit only, since the next try opens a new one: less than 5 s in total.
ANSWER_S = 2.0
_PING_S = 3.0  # further tries begin with a PING, on a new connection
_LONG_ANSWER_S = 30.0  # for the answer after a PING: it may be megabytes over a slow connection
_BACKOFF_S = (0.0, 0.1, 0.2, 0.5)  # between tries; the first is for connections that died while they were idle
_CALL_S = 5.0


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
        return await self.run_for(command, _CALL_S if self._outage_s is None else min(_CALL_S, self._outage_s))

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
        async with time_limit(_PING_S):
            await self._ping()
        async with time_limit(_LONG_ANSWER_S):
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
        # The pool's own `disconnect` would hand out a connection while it waits for the socket.
        for connection in list(self._redis.connection_pool._available_connections):
            await connection.disconnect(nowait=True)


def _outage_error(error: Exception, seconds: float) -> Exception:
    if not is_transient(error):
        return error
    if reason := reason_of(error):
        tried = f" for {seconds:.0f} s" if seconds >= 1 else ""
        return ServerUnreachable(f"the server could not be used{tried}: {reason}")
    return ServerUnreachable(f"no answer for {seconds:.0f} s: {error}" if seconds >= 1 else str(error))
