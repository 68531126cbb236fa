"""The limits of keys in requests and tokens a minute, counted in Redis, so that all gateways agree.

Each limit is a bucket that holds the requests or tokens of one minute and refills evenly: in any t seconds at most
limit * (1 + t / 60) are granted. Tokens are reserved by an estimate when a job is queued, and corrected by its usage at
its end; the excess of a job over its estimate is subtracted from what comes after it.
"""

import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis

from sluice.contract.events import Cancelled, Event, Failed, Finished
from sluice.contract.keys import JOB_LIFE_S, RESULT_TTL_S
from sluice.errors import ServerUnreachable
from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key
from sluice.http_errors import ErrorForm
from sluice.transport.retries import Retries

_REFUSED = {"invalid_request", "unsupported", "too_large"}  # errors of jobs that were never computed


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


def used_tokens(final: Event) -> int:
    """Return the tokens that a job costs, by its final event: none if its worker refused it."""
    match final:
        case Failed(error=error) if error.type in _REFUSED:
            return 0
        case Finished(usage=usage) | Failed(usage=usage) | Cancelled(usage=usage):
            return usage.prompt_tokens + usage.completion_tokens
    raise AssertionError(final)


class Limits:
    """Counts requests and tokens. Every call may be repeated: a job is counted once, and settled once."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._script = redis.register_script((files(__package__) / "lua" / "limit.lua").read_text("utf-8"))

    async def reserve(self, key: Key, job_ids: Sequence[str], tokens: int, mark: str) -> Balance | Exceeded:
        """Count a request and reserve `tokens` for each job, all of them or none. Estimates above the limit itself are
        cut to the limit. `mark` names the HTTP request for `release`."""
        return await self._reserve(key, job_ids, tokens=tokens, mark=mark)

    async def count(self, key: Key) -> Balance | Exceeded:
        """Count a request that queues no job. It is counted twice if the server's reply is lost."""
        return await self._reserve(key, requests=1)

    async def read(self, key: Key) -> Balance:
        """Return what is left, and count nothing."""
        left = await self._reserve(key)
        assert isinstance(left, Balance), "nothing was asked for"
        return left

    async def settle(self, job_id: str, tokens: int) -> None:
        """Replace the job's reservation, if it has one, by the tokens that it used."""
        await self._settle([job_id], tokens, RESULT_TTL_S * 1000)

    async def release(self, job_ids: Sequence[str], mark: str) -> None:
        """Return the tokens that the HTTP request with this mark has reserved for jobs that were not queued. A job that
        is tried again is counted again."""
        await self._settle(job_ids, 0, 0, mark)

    async def settled(self, events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
        """Yield a job's events; settles it before its final event. Closes `events`."""
        async with aclosing(events):
            async for event in events:
                if event.final:
                    await self.settle(event.id, used_tokens(event))
                yield event

    async def _settle(self, job_ids: Sequence[str], tokens: int, life_ms: int, mark: str = "") -> None:
        keys = [reservation_key(job_id) for job_id in job_ids]
        args: list[str | int] = ["settle", tokens, life_ms, mark]
        try:
            await self._retries.run(lambda: self._script(keys=keys, args=args))
        except ServerUnreachable:
            pass  # the estimate stands; the answer itself is complete

    async def _reserve(
        self, key: Key, job_ids: Sequence[str] = (), *, tokens: int = 0, requests: int = 0, mark: str = "-"
    ) -> Balance | Exceeded:
        limits = key.requests_per_minute, key.tokens_per_minute
        keys = [limit_key(key.id), *map(reservation_key, job_ids)]
        rates = [limit or 0 for limit in limits]
        args: list[str | int] = ["reserve", *rates, tokens, requests, JOB_LIFE_S * 1000, mark]
        granted, *left, wait_ms, short = await self._retries.run(lambda: self._script(keys=keys, args=args))
        balance = Balance(*limits, *left)
        return balance if granted else Exceeded(balance, short.decode(), wait_ms / 1000)


def limit_key(key_id: str) -> str:
    """Hash: the buckets of a key, when each was last brought up to date, and the highest levels of that of tokens."""
    return f"sluice:serve:limit:{key_id}"


def reservation_key(job_id: str) -> str:
    """String: the tokens that a job reserved, the limit, the number of the change of the buckets, the mark of the HTTP
    request, and the buckets; or `settled`."""
    return f"sluice:serve:reserved:{job_id}"


def refusal(exceeded: Exceeded) -> ApiError:
    """Return the HTTP error for a request beyond a limit."""
    wait_s = max(1, math.ceil(exceeded.retry_after_s))
    limit = getattr(exceeded.balance, f"{exceeded.limit}_per_minute")
    return ApiError(
        ErrorForm.REQUESTS_EXCEEDED if exceeded.limit == "requests" else ErrorForm.TOKENS_EXCEEDED,
        f"This key may use {limit:,} {exceeded.limit} per minute, and they are used up; try again in {wait_s} s.",
        retry_after_s=exceeded.retry_after_s,
    )


def _reset_s(limit: int | None, left: int) -> float:
    return 0.0 if limit is None else max(0.0, (limit - left) * 60 / limit)


def openai_headers(balance: Balance) -> dict[str, str]:
    """Return OpenAI's `x-ratelimit-*` headers for the limits that the key has."""
    headers = dict[str, str]()
    for name, limit, left, reset_s in _limits(balance):
        headers[f"x-ratelimit-limit-{name}"] = str(limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(left)
        headers[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
    return headers


def anthropic_headers(balance: Balance, now: datetime) -> dict[str, str]:
    """Return Anthropic's `anthropic-ratelimit-*` headers for the limits that the key has."""
    headers = dict[str, str]()
    for name, limit, left, reset_s in _limits(balance):
        reset_at = (now + timedelta(seconds=reset_s)).astimezone(UTC)
        headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{name}-remaining"] = str(left)
        headers[f"anthropic-ratelimit-{name}-reset"] = reset_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def _limits(balance: Balance) -> list[tuple[str, int, int, float]]:
    each = [
        ("requests", balance.requests_per_minute, balance.requests_left, balance.requests_reset_s),
        ("tokens", balance.tokens_per_minute, balance.tokens_left, balance.tokens_reset_s),
    ]
    return [(name, limit, left, reset_s) for name, limit, left, reset_s in each if limit is not None]


def _duration(seconds: float) -> str:
    """Return a duration in OpenAI's form: `120ms`, `7.66s`, `1m0s`."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.2f}".rstrip("0").rstrip(".") + "s"


_CHARACTERS_PER_TOKEN = 4  # English; the usage corrects it for others
_TOKENS_PER_MESSAGE = 4  # role and marks of a chat template
_TOKENS_PER_IMAGE = 1_000  # a photo of a megapixel in most vision models
_ANSWER_TOKENS = 1_024  # without a limit: what a worker reserves at first; the usage corrects it
_IMAGES = {"image_url", "input_image", "image"}
_TEXTS = {"messages", "tools", "functions", "response_format", "prediction"}


def estimate(body: Mapping[str, Any]) -> int:
    """Return the estimated tokens of a request of the contract, prompt and answer. Takes any JSON."""
    prompt = sum(_tokens(value) for value in _values([body.get(name) for name in _TEXTS]))
    messages = body.get("messages")
    return prompt + _answer(body) + (_TOKENS_PER_MESSAGE * len(messages) if isinstance(messages, list) else 0)


def _answer(body: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit
    return _ANSWER_TOKENS


def _values(root: Any) -> Iterator[Any]:
    """Yield the strings of a JSON value, and its images whole."""
    pending = [root]
    while pending:
        match pending.pop():
            case {"type": str(kind)} as part if kind in _IMAGES:
                yield part
            case dict(members):
                pending.extend(members.values())
            case list(items):
                pending.extend(items)
            case str(text):
                yield text


def _tokens(value: Any) -> int:
    return -(-len(value) // _CHARACTERS_PER_TOKEN) if isinstance(value, str) else _TOKENS_PER_IMAGE
