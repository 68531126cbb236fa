"""Creates the worker's Redis client. Errors about its URL never contain a part of a password."""

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.exceptions import RedisError

from sluice.contract.redis_url import BAD_OPTION, UNREADABLE, redacted
from worker.errors import CannotStart
from worker.settings import Settings


def connect(settings: Settings) -> Redis:
    """Return a client, which connects at its first command. Its key encoding preserves job ids of any bytes. Raises
    `CannotStart` if the URL is not valid."""
    pool = _pool(settings)
    if not _options_fit(pool):
        raise _bad_url(settings, BAD_OPTION)
    return Redis(connection_pool=pool)


def _pool(settings: Settings) -> BlockingConnectionPool:
    tcp = {} if settings.redis_url.startswith("unix:") else {"socket_keepalive": True}
    try:
        return BlockingConnectionPool.from_url(
            settings.redis_url,
            max_connections=32,
            timeout=None,
            socket_connect_timeout=2,
            socket_timeout=10,
            encoding_errors="surrogateescape",
            **tcp,
        )
    except ValueError:
        raise _bad_url(settings, UNREADABLE) from None


def _options_fit(pool: ConnectionPool) -> bool:
    """True if redis-py accepts the options of the URL. Otherwise it would check them at the first command."""
    try:
        pool.connection_class(**pool.connection_kwargs)
        encoder = pool.get_encoder()  # type: ignore[no-untyped-call]
        encoder.encode("")
    except (RedisError, ValueError, TypeError, LookupError, AttributeError, NameError):
        return False
    return not encoder.decode_responses


def _bad_url(settings: Settings, why: str) -> CannotStart:
    return CannotStart(f"SLUICE_REDIS_URL={redacted(settings.redis_url)}: {why}")
