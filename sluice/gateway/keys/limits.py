"""The limits of keys in requests and tokens a minute, counted in Redis, so that all fronts agree.

Each limit is a bucket that holds the requests or tokens of one minute and refills evenly: in any t seconds at most
limit * (1 + t / 60) are granted. Tokens are reserved by an estimate when a job is queued, and corrected by its usage at
its end; the excess of a job over its estimate is subtracted from what comes after it.
"""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from importlib.resources import files

from redis.asyncio import Redis

from sluice.errors import ServerUnreachable
from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key
from sluice.transport.retries import Retries
from sluice.wire import JOB_LIFE_S, RESULT_TTL_S, Cancelled, Event, Failed, Finished


@dataclass(frozen=True, slots=True)
class Balance:
    """What a key has left. The limits are None if there is none."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    requests_left: int
    tokens_left: int

    @property
    def requests_reset_s(self) -> float:
        """Seconds until the bucket of requests is full."""
        return _reset_s(self.requests_per_minute, self.requests_left)

    @property
    def tokens_reset_s(self) -> float:
        """Seconds until the bucket of tokens is full."""
        return _reset_s(self.tokens_per_minute, self.tokens_left)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A request that was not granted. `limit` is "requests" or "tokens"."""

    balance: Balance
    limit: str
    retry_after_s: float


class Limits:
    """Counts requests and tokens. Every call may be repeated: a job is counted once, and settled once."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._script = redis.register_script((files(__package__) / "lua" / "limit.lua").read_text())

    async def take(self, key: Key, job_id: str, tokens: int) -> Balance | Exceeded:
        """Count one request and reserve tokens for a job. An estimate above the limit itself is cut to the limit."""
        granted, balance, wait_s, short = await self._take(key, job_id, tokens)
        return balance if granted else Exceeded(balance, short, wait_s)

    async def read(self, key: Key) -> Balance:
        """Return what is left, and count nothing."""
        return (await self._take(key, "", 0))[1]

    async def settle(self, job_id: str, tokens: int) -> None:
        """Replace the job's reservation, if it has one, by the tokens that it used."""
        await self._settle(job_id, tokens, RESULT_TTL_S * 1000)

    async def release(self, job_id: str) -> None:
        """Return the reserved tokens of a job that was not queued. If it is tried again, it is counted again."""
        await self._settle(job_id, 0, 0)

    async def settled(self, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """Yield a job's events; settles it before its final event. Closes `events`."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Finished | Failed | Cancelled):
                    await self.settle(event.id, event.usage.prompt_tokens + event.usage.completion_tokens)
                yield event

    async def _settle(self, job_id: str, tokens: int, life_ms: int) -> None:
        args: list[str | int] = ["settle", tokens, life_ms]
        try:
            await self._retries.run(lambda: self._script(keys=[reservation_key(job_id)], args=args))
        except ServerUnreachable:
            pass  # the estimate stands; the answer itself is complete

    async def _take(self, key: Key, job_id: str, tokens: int) -> tuple[bool, Balance, float, str]:
        requests, budget = key.requests_per_minute, key.tokens_per_minute
        args: list[str | int] = ["take", int(bool(job_id)), requests or 0, budget or 0, tokens, JOB_LIFE_S * 1000]
        keys = [limit_key(key.id), reservation_key(job_id)]
        granted, *left, wait_ms, short = await self._retries.run(lambda: self._script(keys=keys, args=args))
        return bool(granted), Balance(requests, budget, *left), wait_ms / 1000, short.decode()


def limit_key(key_id: str) -> str:
    """Hash: the buckets of a key, and when each was last brought up to date."""
    return f"sluice:serve:limit:{key_id}"


def reservation_key(job_id: str) -> str:
    """String: the tokens that a job reserved, the limit, and the buckets; or `settled`."""
    return f"sluice:serve:reserved:{job_id}"


def refusal(exceeded: Exceeded) -> ApiError:
    """Return the HTTP error for a request beyond a limit."""
    wait_s = max(1, math.ceil(exceeded.retry_after_s))
    limit = getattr(exceeded.balance, f"{exceeded.limit}_per_minute")
    return ApiError(
        429,
        f"This key may use {limit:,} {exceeded.limit} per minute, and they are used up; try again in {wait_s} s.",
        exceeded.limit,
        code="rate_limit_exceeded",
        retry_after_s=exceeded.retry_after_s,
    )


def _reset_s(limit: int | None, left: int) -> float:
    return 0.0 if limit is None else max(0.0, (limit - left) * 60 / limit)
