"""Stored responses on the server, with a time to live."""

import json
import logging
from collections.abc import Sequence
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.errors import SluiceError
from sluice.gateway.responses.events.head import Response
from sluice.gateway.responses.threads import in_thread_if_long
from sluice.transport.retries import Retries
from sluice.wire import log_key

logger = logging.getLogger("sluice.serve")


def record_key(response_id: str) -> str:
    """String: the record of a response, as JSON."""
    return f"sluice:serve:response:{response_id}"


def final_key(response_id: str) -> str:
    """String: a response that has ended, as JSON."""
    return f"sluice:serve:response:{response_id}:final"


class Store:
    """Reads and writes records, and responses that have ended. Every use of a response renews its time to live.

    Raises `ServerUnreachable`, or redis-py's error if the server refuses.
    """

    def __init__(self, redis: Redis, retries: Retries, ttl_s: int) -> None:
        self._redis = redis
        self._retries = retries
        self._ttl_s = ttl_s

    async def create(self, response_id: str, record: bytes) -> bytes:
        """Store a record as JSON unless the response has one, and return the stored one."""
        key = record_key(response_id)
        send = partial(self._redis.set, key, record, nx=True, get=True, ex=self._ttl_s)
        earlier: bytes | None = await self._retries.run(send)
        return earlier or record

    async def read(self, response_id: str) -> bytes | None:
        """Return a record as JSON, and renew its time to live."""
        key = record_key(response_id)
        found: bytes | None = await self._retries.run(lambda: self._redis.getex(key, ex=self._ttl_s))
        return found

    async def read_all(self, response_ids: Sequence[str]) -> list[tuple[bytes | None, bytes | None]]:
        """Return the record and the ended response of each id, as JSON, and renew their times to live."""
        keys = [key for each in response_ids for key in (record_key(each), final_key(each))]
        found: list[bytes | None] = await self._retries.run(lambda: self._redis.mget(keys)) if keys else []
        await self._retries.run(lambda: self._renew(keys))
        return list(zip(found[::2], found[1::2], strict=True))

    async def final(self, response_id: str) -> Response | None:
        """Return a response that has ended, and renew its time to live."""
        key = final_key(response_id)
        found: bytes | None = await self._retries.run(lambda: self._redis.getex(key, ex=self._ttl_s))
        return None if found is None else await in_thread_if_long(len(found), json.loads, found)

    async def keep_final(self, response: Response) -> None:
        """Store a response that has ended. A failure is logged: the response can be made again from its job, until that
        has expired."""
        written = json.dumps(response, separators=(",", ":")).encode()
        key = final_key(response["id"])
        try:
            await self._retries.run(lambda: self._redis.set(key, written, ex=self._ttl_s))
        except (SluiceError, RedisError):
            logger.warning("response %s: its end was not stored", response["id"], exc_info=True)

    async def has_log(self, response_id: str) -> bool:
        """Return True if the job of a response has events."""
        return bool(await self._retries.run(lambda: self._redis.exists(log_key(response_id))))

    async def delete(self, response_id: str) -> None:
        """Delete a record and the ended response."""
        await self._retries.run(lambda: self._redis.delete(record_key(response_id), final_key(response_id)))

    async def _renew(self, keys: Sequence[str]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.expire(key, self._ttl_s)
            await pipe.execute()
