"""Redis clients from URLs. Errors about a URL never quote any part of its password."""

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from sluice.contract.redis_url import BAD_OPTION, UNREADABLE, credentials_error, redacted, url_error

_ANSWER_S = 2.0


def connect(url: str) -> Redis:
    """Return a client that connects with its first command. Raises ValueError if the URL is invalid."""
    if reason := url_error(url):
        raise _bad(url, reason)
    try:
        redis: Redis = Redis.from_url(url, **_options(url))
    except ValueError:
        raise _bad(url, UNREADABLE) from None
    if not _options_fit(redis):
        raise _bad(url, BAD_OPTION)
    return redis


async def wrong_credentials(url: str) -> str:
    """Return what is wrong with the credentials of a URL whose server has refused them. Connects to the server."""
    options = connect(url).connection_pool.connection_kwargs
    has_user, has_password = bool(options.get("username")), bool(options.get("password"))
    return credentials_error(has_user=has_user, has_password=has_password, is_open=await _is_open(url))


async def _is_open(url: str) -> bool:
    """Return True if the server answers without a password."""
    redis = connect(url)
    for name in ("username", "password"):
        redis.connection_pool.connection_kwargs.pop(name, None)
    try:
        async with redis, asyncio.timeout(_ANSWER_S):
            await redis.ping()
    except (RedisError, OSError, TimeoutError):
        return False
    return True


def _options(url: str) -> dict[str, Any]:
    """Return connection options without redis-py's time limits and retries, which differ by release: `Retries` has
    them."""
    options: dict[str, Any] = {"socket_connect_timeout": 5, "socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    return options if url.startswith("unix:") else {**options, "socket_keepalive": True}


def _options_fit(redis: Redis) -> bool:
    """Return True if redis-py accepts the options of the URL; redis-py itself checks them with the first command."""
    pool = redis.connection_pool
    try:
        pool.connection_class(**pool.connection_kwargs)
        redis.get_encoder().encode("")  # type: ignore[no-untyped-call]
    except (RedisError, ValueError, TypeError, LookupError, AttributeError, NameError):
        return False
    return True


def _bad(url: str, reason: str) -> ValueError:
    return ValueError(
        f"{redacted(url)!r} is not the URL of a server: {reason}. One looks like redis://localhost:6379/0"
    )
