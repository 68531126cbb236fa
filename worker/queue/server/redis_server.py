"""The Redis server of a worker: the client, an estimate of its clock, and the check when a worker first connects, with
problems that end the worker, and warnings."""

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from sluice.contract.redis_url import credentials_error, redacted
from sluice.contract.refusals import is_full, is_temporary
from worker.errors import CannotStart
from worker.queue.server.clock import ServerClock
from worker.queue.server.permissions import NEEDED, acl_command, describe, forbidden, missing
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

_EARLY_S = 3.0
_OLDEST = 7  # major version of Redis: SET with NX and GET came with it

_CLUSTER = "it runs in cluster mode, where the worker's scripts cannot reach their keys; use a server without it."
_EVICTS = (
    "maxmemory-policy is %s: when the server is full, it evicts queued jobs. Run CONFIG SET maxmemory-policy "
    "noeviction and put `maxmemory-policy noeviction` into redis.conf."
)
_FORGETS = (
    "the server writes nothing to disk: when it restarts, all queued jobs are lost. Run CONFIG SET appendonly yes and "
    "put `appendonly yes` into redis.conf."
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Replies of the server to INFO and CONFIG GET; None if it denies the command."""

    info: Mapping[str, Any] | None
    config: Mapping[str, str] | None


def refusal(facts: ServerInfo) -> str | None:
    """Return the reason why no worker can use this server, or None."""
    info = facts.info or {}
    if info.get("cluster_enabled") or "cluster" in (info.get("redis_mode"), info.get("server_mode")):
        return _CLUSTER
    version = str(info.get("redis_version", ""))
    major = re.match(r"\d+", version)
    if "valkey_version" not in info and major and int(major[0]) < _OLDEST:
        return f"it is version {version}, and the worker needs Redis {_OLDEST}.0 or Valkey; install one of these."
    return None


def warnings(facts: ServerInfo, *, keyspace_events: bool) -> list[str]:
    """Return warnings for the operator, without those of `refusal`."""
    info, config = facts.info or {}, facts.config or {}
    policy = info.get("maxmemory_policy") or config.get("maxmemory-policy") or "noeviction"
    found = [] if policy == "noeviction" else [_EVICTS % policy]
    if config.get("save") == "" and config.get("appendonly") == "no":
        found.append(_FORGETS)
    if None in (facts.info, facts.config):
        found.append(_denied(facts, keyspace_events))
    return found


def _denied(facts: ServerInfo, keyspace_events: bool) -> str:
    lost = {
        "INFO": (facts.info, "version and cluster mode are not checked"),
        "CONFIG": (facts.config, "eviction and persistence are not checked"),
    }
    names = " and ".join(name for name, (known, _) in lost.items() if known is None)
    follows = "; ".join(meaning for known, meaning in lost.values() if known is None)
    if facts.config is None and keyspace_events:
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
        """Check the server before the model is loaded, which takes long, for at most `_EARLY_S` seconds. A server that
        does not answer is checked later. Raises `CannotStart`."""
        try:
            async with asyncio.timeout(_EARLY_S):
                await self._check()
        except (RedisError, OSError):
            pass

    async def _check(self) -> None:
        """Check the server and log warnings. Raises `CannotStart` for problems that waiting does not solve, and
        RedisError or OSError for others."""
        if self._passed:
            return
        try:
            facts = await _read_server_info(self.client)
            if why := refusal(facts):
                raise self._error(why)
            if absent := await missing(self.client, NEEDED):
                raise self._error(f"it has no {', '.join(absent)}; remove the rename-command lines from redis.conf.")
            if denied := await forbidden(self.client, NEEDED):
                raise self._error(f"its user may not use {describe(denied)}. Run {acl_command(self._user(), denied)}")
        except AuthenticationError:
            raise self._error(f"{await self._wrong_credentials()}.") from None
        except ResponseError as error:
            if is_temporary(error) or is_full(error):
                raise
            raise self._error(
                f"it refuses the connection: {error}. The number behind the last / must be that of a database that it "
                "has, and the options behind the ? must be right for it."
            ) from None
        for warning in warnings(facts, keyspace_events=self._settings.keyspace_events):
            logger.warning("redis: %s", warning)
        self._passed = True

    def _error(self, why: str) -> CannotStart:
        return CannotStart(f"SLUICE_REDIS_URL={redacted(self._settings.redis_url)}: {why}")

    async def _wrong_credentials(self) -> str:
        given = self.client.connection_pool.connection_kwargs
        has_user, has_password = bool(given.get("username")), bool(given.get("password"))
        return credentials_error(has_user=has_user, has_password=has_password, is_open=await _is_open(self.client))

    def _user(self) -> str:
        return str(self.client.connection_pool.connection_kwargs.get("username") or "default")


async def _is_open(redis: Redis) -> bool:
    """True if the client's server answers without a password."""
    pool = redis.connection_pool
    given = {name: value for name, value in pool.connection_kwargs.items() if name not in ("username", "password")}
    try:
        async with Redis(connection_pool=ConnectionPool(pool.connection_class, **given)) as anonymous:
            async with asyncio.timeout(_EARLY_S):
                await anonymous.ping()
    except (RedisError, OSError, TimeoutError):
        return False
    return True


async def _read_server_info(redis: Redis) -> ServerInfo:
    try:
        info = await redis.info()
    except AuthenticationError:
        raise
    except ResponseError:
        info = None
    try:
        config = await redis.config_get("maxmemory-policy", "save", "appendonly")  # type: ignore[arg-type]
    except ResponseError:
        config = None
    return ServerInfo(info, config)
