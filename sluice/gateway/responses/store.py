"""Stored responses on the server, with a time to live."""

import json
import logging
from collections.abc import Sequence
from importlib.resources import files

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys
from sluice.errors import SluiceError
from sluice.gateway.responses.head import Response
from sluice.gateway.threads import in_thread_if_long, to_json
from sluice.submission import ExtraKey
from sluice.transport.retries import Retries

logger = logging.getLogger("sluice.gateway")


def record_key(response_id: str) -> str:
    """String: the record of a response, as JSON."""
    return f"sluice:serve:response:{response_id}"


def final_key(response_id: str) -> str:
    """String: a response that has ended, as JSON."""
    return f"sluice:serve:response:{response_id}:final"


def _keys(response_ids: Sequence[str]) -> list[str]:
    return [key for each in response_ids for key in (record_key(each), final_key(each))]


def _source(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")


class Store:
    """Reads and writes records, and responses that have ended. Every use of a response renews its time to live.

    Raises `ServerUnreachable`, or redis-py's error if the server refuses.
    """

    def __init__(self, redis: Redis, retries: Retries, ttl_s: int) -> None:
        self._redis = redis
        self._retries = retries
        self._ttl_s = ttl_s
        self._store_final = redis.register_script(_source("store_final"))
        self._delete_content = redis.register_script(_source("delete_content"))

    def record(self, response_id: str, record: bytes) -> ExtraKey:
        """Return the key of a record as JSON, to be set when the job of the response is queued."""
        return ExtraKey(record_key(response_id), record, self._ttl_s)

    async def read(self, response_id: str) -> bytes | None:
        """Return a record as JSON, and renew its time to live."""
        key = record_key(response_id)
        found: bytes | None = await self._retries.run(lambda: self._redis.getex(key, ex=self._ttl_s))
        return found

    async def read_all(self, response_ids: Sequence[str]) -> list[tuple[bytes | None, bytes | None]]:
        """Return the record and the ended response of each id, as JSON, and renew their times to live."""

        async def read() -> list[bytes | None]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in _keys(response_ids):
                    pipe.getex(key, ex=self._ttl_s)
                return await pipe.execute()

        found = await self._retries.run(read) if response_ids else []
        return list(zip(found[::2], found[1::2], strict=True))

    async def final(self, response_id: str) -> Response | None:
        """Return a response that has ended, and renew its time to live."""
        found = await self.final_json(response_id)
        return None if found is None else await in_thread_if_long(len(found), json.loads, found)

    async def final_json(self, response_id: str) -> bytes | None:
        """Return a response that has ended as JSON, and renew its time to live."""
        key = final_key(response_id)
        found: bytes | None = await self._retries.run(lambda: self._redis.getex(key, ex=self._ttl_s))
        return found

    async def length(self, response_id: str) -> int:
        """Return the bytes of a record and the ended response together."""
        return sum(await self.lengths([response_id]))

    async def lengths(self, response_ids: Sequence[str]) -> list[int]:
        """Return the bytes of the record and the ended response of each id together."""

        async def read() -> list[int]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in _keys(response_ids):
                    pipe.strlen(key)
                return await pipe.execute()

        found = await self._retries.run(read) if response_ids else []
        return [record + final for record, final in zip(found[::2], found[1::2], strict=True)]

    async def store_final(self, response: Response) -> None:
        """Store a response that has ended, unless it was deleted. A failure is logged: the response can be made again
        from its job, until that has expired."""
        written = await to_json(response)
        held = [record_key(response["id"]), final_key(response["id"])]
        try:
            await self._retries.run(lambda: self._store_final(keys=held, args=[written, self._ttl_s]))
        except (SluiceError, RedisError):
            logger.warning("response %s: its end was not stored", response["id"], exc_info=True)

    async def has_log(self, response_id: str) -> bool:
        """Return True if the job of a response has events."""
        return bool(await self._retries.run(lambda: self._redis.exists(keys.log(response_id))))

    async def delete(self, response_id: str) -> None:
        """Delete a record and the ended response."""
        await self._retries.run(lambda: self._redis.delete(record_key(response_id), final_key(response_id)))

    async def delete_content(self, response_id: str) -> bool:
        """Delete the content that the job of a response has. Returns False if the job has not ended."""
        held = [keys.job(response_id), keys.log(response_id), keys.result(response_id), keys.DEAD]
        return bool(await self._retries.run(lambda: self._delete_content(keys=held, args=[response_id])))
