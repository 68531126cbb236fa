"""The Redis server of a worker: the client, its clock, its outages, and the check when a worker first connects, with
problems that end the worker, and warnings."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import AuthenticationError, ExecAbortError, NoPermissionError, RedisError, ResponseError

from sluice.contract.redis_url import BAD_OPTION, UNREADABLE
from sluice.contract.refusals import is_full, is_temporary, reason_of
from sluice.transport import options_fit, pool_of, wrong_credentials
from worker.errors import CannotStart
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

KEYS = ("sluice:*", "arq:*")
CHANNELS = ("sluice:*",)


@dataclass(frozen=True, slots=True)
class Need:
    """A command that a worker needs, with valid arguments."""

    command: str  # SCRIPT LOAD is two words
    arguments: tuple[str, ...] = ()

    name: str = ""  # the key or channel, if that is its first argument

    @property
    def rule(self) -> str:
        """Rule of ACL SETUSER that allows the command."""
        return "+" + self.command.lower().replace(" ", "|")


def _on(name: str, **commands: str) -> list[Need]:
    """Return the needs on one key or channel; the values are the other arguments."""
    return [Need(command, (name, *arguments.split()), name) for command, arguments in commands.items()]


MULTI, EXEC = Need("MULTI"), Need("EXEC")
# Commands inside scripts are included: the server checks each as if the user had sent it.
NEEDED: tuple[Need, ...] = (
    MULTI,
    EXEC,
    Need("PING"),
    Need("TIME"),
    Need("EVALSHA", ("0" * 40, "0")),
    Need("SCRIPT LOAD", ("return 1",)),
    *_on(
        "sluice:job:x", DEL="", EXISTS="", HDEL="f", HGET="f", HGETALL="", HINCRBY="f 1", HLEN="", HMGET="f",
        HSET="f v", HVALS="", PEXPIRE="1", PTTL="", TYPE="", UNLINK="",
    ),
    *_on("sluice:log:x", LINDEX="0", LLEN="", LRANGE="0 -1", RPUSH="v"),
    *_on("sluice:result:x", GET="", MGET="", SET="v"),
    *_on(
        "sluice:queue:x", ZADD="1 m", ZCARD="", ZCOUNT="0 1", ZLEXCOUNT="- +", ZRANGE="0 1", ZRANGEBYLEX="- +",
        ZRANGEBYSCORE="0 1", ZRANK="m", ZREM="m", ZSCORE="m",
    ),
    *_on("arq:job:x", DEL="", EXISTS="", GET="", PEXPIRE="1", SET="v", STRLEN=""),
    *_on("sluice:ch:x", PUBLISH="m", SUBSCRIBE=""),
)  # fmt: skip


async def forbidden(redis: Redis, needs: Sequence[Need]) -> list[Need]:
    """Return the needs that the user is denied. If MULTI is denied, only MULTI and EXEC are tested.

    Nothing is executed: the server checks a command when a transaction queues it, and drops the transaction when the
    connection closes. ACL DRYRUN would also work, but users without administrator rights may seldom call it. Raises
    RedisError, OSError.
    """
    try:
        async with redis.client() as client:  # with a connection of its own
            connection = client.connection
            assert connection is not None
            try:
                return await _denied_of(connection, needs)
            finally:
                await connection.disconnect()
    except NoPermissionError:
        return [Need("SELECT")]  # sent for a database other than 0; no other command of connecting can be denied


async def _denied_of(connection: AbstractConnection, needs: Sequence[Need]) -> list[Need]:
    # No transaction is open yet, so EXEC executes nothing.
    frame = [need for need in (EXEC, MULTI) if await _denied(connection, need)]
    if MULTI in frame:
        return frame  # without MULTI the commands would be executed
    return [*frame, *[need for need in needs if need not in (EXEC, MULTI) and await _denied(connection, need)]]


async def _denied(connection: AbstractConnection, need: Need) -> bool:
    await connection.send_command(*need.command.split(), *need.arguments)
    try:
        await connection.read_response()
    except (NoPermissionError, ExecAbortError):
        return True
    except ResponseError:
        return False  # no transaction to execute, or no memory
    return False


async def missing(redis: Redis, needs: Sequence[Need]) -> list[str]:
    """Return the commands that the server does not have, because its redis.conf renames them or because it is another
    kind of server; none if the user may not ask. Raises RedisError, OSError."""
    names = list(dict.fromkeys(need.command.split()[0] for need in needs))
    try:
        # In one word: redis-py cannot parse an unknown command in the answer to two.
        found = await redis.execute_command("COMMAND INFO", *names)  # type: ignore[no-untyped-call]
    except NoPermissionError:
        return []
    return [name for name, info in zip(names, found, strict=True) if info is None]


def names_of(denied: Sequence[Need]) -> str:
    """Return the names of the commands, and the key or channel on which each was tested."""
    by_name: dict[str, list[str]] = {}
    for need in denied:
        by_name.setdefault(need.name, []).append(need.command)
    return "; ".join(", ".join(commands) + (f" on {name}" if name else "") for name, commands in by_name.items())


def acl_command(user: str, denied: Sequence[Need]) -> str:
    """Return the ACL command that allows these needs; if MULTI is denied, all needs."""
    commands = dict.fromkeys(need.rule for need in (NEEDED if MULTI in denied else denied))
    names = [*(f"~{pattern}" for pattern in KEYS), *(f"&{pattern}" for pattern in CHANNELS)]
    return " ".join(["ACL SETUSER", user, *names, *commands])


def redis_from_settings(settings: Settings) -> Redis:
    """Return a client, which connects at its first command. Its key encoding preserves job ids of any bytes. Raises
    `CannotStart` if the URL is not valid."""
    pool = _pool(settings)
    if not options_fit(pool) or pool.get_encoder().decode_responses:  # type: ignore[no-untyped-call]
        raise _bad_url(settings, BAD_OPTION)
    return Redis(connection_pool=pool)


def _pool(settings: Settings) -> ConnectionPool:
    try:
        return pool_of(
            settings.redis_url,
            BlockingConnectionPool,
            max_connections=32,
            timeout=None,
            socket_connect_timeout=2,
            socket_timeout=10,
            encoding_errors="surrogateescape",
        )
    except ValueError:
        raise _bad_url(settings, UNREADABLE) from None


def _bad_url(settings: Settings, why: str) -> CannotStart:
    return CannotStart(f"{settings.server}: {why}")


class ServerClock:
    """Estimates the server's time, so that events of different workers have timestamps of one clock."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    async def sync(self, redis: Redis) -> None:
        """Correct the estimate if the server's clock contradicts it. An answer that took long tells little, so it
        hardly moves the estimate. Raises RedisError, OSError."""
        before = time.time()
        seconds, microseconds = await redis.time()
        at = seconds + microseconds / 1e6
        self._ahead_s = min(max(self._ahead_s, at - time.time()), at - before)

    def now(self) -> float:
        """Unix seconds by the server's clock."""
        return time.time() + self._ahead_s

    def utc(self) -> datetime:
        """UTC by the server's clock."""
        return datetime.fromtimestamp(self.now(), UTC)


_CLUSTER = "it runs in cluster mode, where the worker's scripts cannot reach their keys; use a server without it."
_EVICTS = (
    "maxmemory-policy is %s: when the server is full, it evicts queued jobs. Run CONFIG SET maxmemory-policy "
    "noeviction and put `maxmemory-policy noeviction` into redis.conf."
)
_FORGETS = (
    "the server writes nothing to disk: when it restarts, all queued jobs are lost. Run CONFIG SET appendonly yes and "
    "put `appendonly yes` into redis.conf."
)


def server_problem(info: Mapping[str, Any] | None) -> str | None:
    """Return the reason why no worker can use this server, or None. `info`: its reply to INFO; None if it denies the
    command."""
    info = info or {}
    if info.get("cluster_enabled") or "cluster" in (info.get("redis_mode"), info.get("server_mode")):
        return _CLUSTER
    version = str(info.get("redis_version", ""))
    major = re.match(r"\d+", version)
    if "valkey_version" not in info and major and int(major[0]) < 7:  # with which SET with NX and GET came
        return f"it is version {version}, and the worker needs Redis 7.0 or Valkey; install one of these."
    return None


def warnings(info: Mapping[str, Any] | None, config: Mapping[str, str] | None, *, keyspace_events: bool) -> list[str]:
    """Return warnings for the operator, without those of `server_problem`. `config`: the reply to CONFIG GET."""
    known, configured = info or {}, config or {}
    policy = known.get("maxmemory_policy") or configured.get("maxmemory-policy") or "noeviction"
    found = [] if policy == "noeviction" else [_EVICTS % policy]
    if configured.get("save") == "" and configured.get("appendonly") == "no":
        found.append(_FORGETS)
    denied = {}
    if info is None:
        denied["INFO"] = "version and cluster mode are not checked"
    if config is None:
        denied["CONFIG"] = "eviction and persistence are not checked"
    if denied:
        found.append(_denied_sentence(denied, keyspace_events))
    return found


def _denied_sentence(denied: Mapping[str, str], keyspace_events: bool) -> str:
    """Return what follows from denied commands. `denied`: what follows from each."""
    names, follows = " and ".join(denied), "; ".join(denied.values())
    if "CONFIG" in denied and keyspace_events:
        follows += ", and jobs of plain arq producers wait for the next poll unless notify-keyspace-events has Kz"
    return f"the server denies {names}: {follows}."


class RedisServer:
    """A client of the server, an estimate of the server's clock, and the check that workers can use the server. Once it
    has passed, later checks cannot end the worker, so jobs survive a new password."""

    def __init__(self, client: Redis, settings: Settings, clock: ServerClock | None = None) -> None:
        self.client = client
        self.clock = clock or ServerClock()
        self._settings = settings
        self._passed = False

    async def connect(self) -> float:
        """Check the server unless it has passed, and measure its clock. Returns its uptime in seconds; 0 if it does not
        report it, since it may just have started. Raises `CannotStart` for problems that waiting does not solve, and
        RedisError or OSError for others."""
        await self._check()
        await self.clock.sync(self.client)
        try:
            return float((await self.client.info("server"))["uptime_in_seconds"])
        except (ResponseError, KeyError):
            return 0.0

    async def check_early(self) -> None:
        """Check the server before the model is loaded, which takes long, for at most three seconds. A server that
        does not answer is checked later. Raises `CannotStart`."""
        try:
            async with asyncio.timeout(3.0):
                await self._check()
        except (RedisError, OSError):
            pass

    async def _check(self) -> None:
        """Check the server and log warnings, unless it has passed. Raises what `check` raises."""
        if not self._passed:
            for warning in await self.check():
                logger.warning("redis: %s", warning)
            self._passed = True

    async def check(self) -> list[str]:
        """Return warnings for the operator. Raises `CannotStart` for problems that waiting does not solve; for others
        RedisError or OSError."""
        try:
            info, config = await _read_server_info(self.client)
            if why := server_problem(info):
                raise self._error(why)
            if absent := await missing(self.client, NEEDED):
                raise self._error(f"it has no {', '.join(absent)}; remove the rename-command lines from redis.conf.")
            if denied := await forbidden(self.client, NEEDED):
                raise self._error(f"its user may not use {names_of(denied)}. Run {acl_command(self._user(), denied)}")
        except AuthenticationError:
            raise self._error(f"{await wrong_credentials(self.client)}.") from None
        except ResponseError as error:
            if is_temporary(error) or is_full(error):
                raise
            if why := reason_of(error):
                raise self._error(f"{why}.") from None
            raise self._error(
                f"it refuses the connection: {error}. The number behind the last / must be that of a database that it "
                "has, and the options behind the ? must be right for it."
            ) from None
        return warnings(info, config, keyspace_events=self._settings.keyspace_events)

    def _error(self, why: str) -> CannotStart:
        return CannotStart(f"{self._settings.server}: {why}")

    def _user(self) -> str:
        return str(self.client.connection_pool.connection_kwargs.get("username") or "default")


async def _read_server_info(redis: Redis) -> tuple[Mapping[str, Any] | None, Mapping[str, str] | None]:
    try:
        info: Mapping[str, Any] | None = await redis.info()
    except AuthenticationError:
        raise
    except ResponseError:
        info = None
    try:
        config: Mapping[str, str] | None = await redis.config_get("maxmemory-policy", "save", "appendonly")  # type: ignore[arg-type]
    except ResponseError:
        config = None
    return info, config


async def examine(settings: Settings) -> tuple[list[str], list[float], float]:
    """Return warnings about the server, the seconds of some round trips, and how far its clock is ahead, in seconds.
    Raises `CannotStart` for what keeps a worker from using it, also if it does not answer within five seconds."""
    clock, times = ServerClock(), list[float]()
    try:
        async with asyncio.timeout(5.0), redis_from_settings(settings) as redis:
            found = await RedisServer(redis, settings).check()
            for _ in range(20):
                began = time.perf_counter()
                await clock.sync(redis)
                times.append(time.perf_counter() - began)
    except (RedisError, OSError) as error:
        if reason := reason_of(await _first_reply(settings) or error):
            raise CannotStart(f"{settings.server}: {reason}.") from None
        reason = str(error).rstrip(".") or "no answer"
        raise CannotStart(f"{settings.server}: {reason}. Start a server, or set the URL of yours.") from None
    return found, times, clock.now() - time.time()


async def _first_reply(settings: Settings) -> ResponseError | None:
    """Return the error that a server sends before it closes a connection, as in protected mode. redis-py, which writes
    at once, finds the connection closed and does not read it."""
    async with redis_from_settings(settings) as redis:
        at = redis.connection_pool.connection_kwargs
    with suppress(OSError, TimeoutError, KeyError):
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(at["host"], at["port"])
            with closing(writer):
                reply = await reader.readline()
                return ResponseError(reply[1:].decode(errors="replace")) if reply[:1] == b"-" else None
    return None


async def until_redis_answers(
    call: Callable[[], Awaitable[None]], stopping: asyncio.Event, *, remind_s: float = 30.0
) -> bool:
    """Repeat the call until Redis answers it. Logs an outage when it begins and every `remind_s` seconds. Returns False
    if `stopping` is set before Redis answers."""
    outage: _Outage | None = None
    while not stopping.is_set():
        try:
            await call()
        except (RedisError, OSError) as error:
            outage = outage or _Outage(remind_s)
            outage.note(error)
            await asyncio.sleep(0.2)
        else:
            if outage:
                logger.warning("redis is back after %.0f s", outage.lasted_s)
            return True
    return False


class _Outage:
    def __init__(self, remind_s: float) -> None:
        self._began = time.monotonic()
        self._remind_s, self._next_s = remind_s, 0.0

    @property
    def lasted_s(self) -> float:
        return time.monotonic() - self._began

    def note(self, error: Exception) -> None:
        """Log the error if it is the first, or if `remind_s` seconds have passed since the last line."""
        if self.lasted_s < self._next_s:
            return
        since = f" for {self.lasted_s:.0f} s" if self._next_s else ""
        logger.warning("waiting for redis%s: %s", since, reason_of(error) or error)
        self._next_s = self.lasted_s + self._remind_s


class Readiness:
    """Readiness to claim jobs: Redis has answered, still answers regularly, and the worker is not stopping. Written on
    the event loop, and read on other threads."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: interval at which the worker polls Redis for jobs, in seconds."""
        self._late_s = 2 * every_s + 3.0
        self._answered_at: float | None = None
        self._refusal: str | None = None
        self._draining = False

    def record_answer(self) -> None:
        """Record an answer from Redis."""
        self._answered_at = time.monotonic()
        self._refusal = None

    async def watch(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call Redis, and remember why it refused. Raises what the call raises."""
        try:
            await call()
        except RedisError as error:
            self._refusal = reason_of(error)
            raise

    def drain(self) -> None:
        """Report from now on that the worker claims no more jobs."""
        self._draining = True

    def parts(self) -> Mapping[str, Callable[[], str | None]]:
        """Return the checks by name. Each returns the problem, or None."""
        return {"redis": self._redis, "claims": self._claims}

    def _redis(self) -> str | None:
        """Return the problem with Redis, or None. A draining worker does not poll, so silence is no problem then."""
        if self._answered_at is None:
            return self._refusal or "it has not answered yet"
        silent_s = time.monotonic() - self._answered_at
        problem = self._refusal or f"no answer for {silent_s:.0f} s"
        return problem if silent_s > self._late_s and not self._draining else None

    def _claims(self) -> str | None:
        return "the worker is stopping, and claims no more jobs" if self._draining else None
