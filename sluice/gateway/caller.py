"""The caller of a request, by its key: its tenant, the models and lanes that the key allows, and the key's limits."""

import math
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.requests import Request

from sluice.contract.events import Cancelled, Event, Failed, Finished
from sluice.contract.keys import JOB_LIFE_S, LANES, RESULT_TTL_S
from sluice.errors import ServerUnreachable, SluiceError
from sluice.gateway.errors import RETRY_S
from sluice.gateway.key_file import Key, KeyStore
from sluice.gateway.protection import HeldBytes, Memory, at_end
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.transport import Retries

_REFUSED = {"invalid_request", "unsupported", "too_large"}  # errors of jobs that were never computed

# The limits of keys in requests and tokens a minute, counted in Redis, so that all gateways agree.
#
# Each limit is a bucket that holds the requests or tokens of one minute and refills evenly: in any t seconds at most
# limit * (1 + t / 60) are granted. Tokens are reserved by an estimate when a job is queued, and corrected by its usage
# at its end; the excess of a job over its estimate is subtracted from what comes after it.


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
        self._exempt = dict[str, None]()  # ids, the oldest first

    def exempt(self, job_ids: Sequence[str]) -> None:
        """Note jobs of a key without limits: they end without this server, which may be down while theirs answers."""
        self._exempt |= dict.fromkeys(job_ids)
        while len(self._exempt) > 10_000:  # about 1 MB
            del self._exempt[next(iter(self._exempt))]

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
        if job_id not in self._exempt:
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


def limit_refusal(exceeded: Exceeded) -> ApiError:
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


async def limit_headers(state: Mapping[str, Any], path: str) -> dict[str, str]:
    """Return the headers about the limits of a request's caller, by the request's state and path; none without limits,
    and if the server does not answer."""
    meter: _Meter | None = state.get("meter")
    if meter is None:
        return {}
    try:
        balance = await meter.balance()
    except (SluiceError, RedisError):
        return {}
    if path.startswith("/v1/messages"):
        return {**openai_headers(balance), **anthropic_headers(balance, datetime.now(UTC))}
    return openai_headers(balance)


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


_IMAGES = {"image_url", "input_image", "image"}
_TEXTS = {"messages", "tools", "functions", "response_format", "prediction", "input"}


def estimate(body: Mapping[str, Any], *, answers: bool = True) -> int:
    """Return the estimated tokens of a request of the contract, prompt and answer. Takes any JSON. `answers`: False for
    embeddings."""
    prompt = sum(_tokens(value) for value in _values([body.get(name) for name in _TEXTS]))
    messages = body.get("messages")
    marks = 4 * len(messages) if isinstance(messages, list) else 0  # role and marks of a chat template
    return prompt + marks + (_answer(body) if answers else 0)


def _answer(body: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        limit = body.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return limit
    return 1_024  # what a worker reserves at first; the usage corrects it


def _values(root: Any) -> Iterator[Any]:
    """Yield the strings of a JSON value, its images whole, and its token ids."""
    pending = [root]
    while pending:
        match pending.pop():
            case {"type": str(kind)} as part if kind in _IMAGES:
                yield part
            case dict(members):
                pending.extend(members.values())
            case list(items):
                pending.extend(items)
            case str(value) | int(value):
                yield value


def _tokens(value: Any) -> int:
    if isinstance(value, str):
        return -(-len(value) // 4)  # characters of a token in English; the usage corrects it for others
    if isinstance(value, int):
        return 1
    return 1_000  # a photo of a megapixel in most vision models


class _Connections:
    """Counts the answers that this gateway gives to each key: one for a request, and one for each further choice."""

    def __init__(self, limit: int) -> None:
        self._limit, self._open = limit, Counter[str]()

    def enter(self, key_id: str, count: int = 1) -> None:
        """Count answers. Raises `ApiError` 429 beyond the limit."""
        if self._open[key_id] + count > self._limit:
            message = f"This key may have {self._limit:,} requests and choices open here; end some first."
            raise ApiError(ErrorForm.TOO_MANY_CONNECTIONS, message, retry_after_s=RETRY_S)
        self._open[key_id] += count

    def leave(self, key_id: str, count: int = 1) -> None:
        """Count answers as ended."""
        self._open[key_id] -= count
        if not self._open[key_id]:
            del self._open[key_id]


class _Meter:
    """Counts one HTTP request. It counts as a connection from its creation until `leave`."""

    def __init__(self, key: Key, limits: Limits, connections: _Connections) -> None:
        """Raises `ApiError` 429 if the key has too many connections."""
        connections.enter(key.id)
        self._key = key
        self._limits, self._connections = limits, connections
        self._answers = 1
        self._mark = uuid.uuid4().hex  # of this request's reservations
        self._balance: Balance | None = None

    def count_choices(self, choices: int) -> None:
        """Count each choice of the answer as a connection. Raises `ApiError` 429."""
        self._connections.enter(self._key.id, choices - self._answers)
        self._answers = choices

    async def reserve(self, job_ids: Sequence[str], tokens: int) -> None:
        """Count a request and reserve tokens for each job. Raises `ApiError`: 429, or 400 for more jobs than the limit
        can ever hold; and `SluiceError`."""
        limit = self._key.requests_per_minute
        if limit is not None and len(job_ids) > limit:
            message = f"n: this key may make {limit:,} requests per minute, and each choice is one; ask for fewer."
            raise ApiError(ErrorForm.INVALID_VALUE, message, param="n")
        if self._key.is_limited:
            self._grant(await self._limits.reserve(self._key, job_ids, tokens, self._mark))
        else:
            self._limits.exempt(job_ids)

    async def count(self) -> None:
        """Count a request that queues no job. Raises `ApiError` 429, and `SluiceError`."""
        if self._key.requests_per_minute is not None:
            self._grant(await self._limits.count(self._key))

    async def release(self, job_ids: Sequence[str]) -> None:
        """Return the tokens that this request has reserved for jobs that were not queued."""
        if self._key.is_limited:
            await self._limits.release(job_ids, self._mark)

    def _grant(self, taken: Balance | Exceeded) -> None:
        if isinstance(taken, Exceeded):
            self._balance = taken.balance
            raise limit_refusal(taken)
        self._balance = taken

    async def balance(self) -> Balance:
        """Return what the key has left. Raises `SluiceError`."""
        if not self._key.is_limited:
            return Balance(None, None, 0, 0)
        return self._balance or await self._limits.read(self._key)

    def leave(self) -> None:
        """Count the connections as ended."""
        self._connections.leave(self._key.id, self._answers)


def _unlimited() -> HeldBytes:
    return Memory(2**63, 2**63).hold(None)


@dataclass(frozen=True)
class Caller:
    """The holder of a key. None as `models` allows all of them, and None as `tenant` is the operator: all jobs."""

    tenant: str | None = None
    key_id: str | None = None
    models: frozenset[str] | None = None  # names as requests give them
    lanes: frozenset[str] = frozenset(LANES)
    batch_bytes: int | None = None  # the most bytes of files that the tenant may have; None: no limit
    batch_runs: int | None = None  # the most runs of the tenant that may wait or run; None: no limit
    meter: _Meter | None = field(default=None, compare=False, repr=False)  # of this HTTP request
    held: HeldBytes = field(default_factory=_unlimited, compare=False, repr=False)  # by this HTTP request

    def count_choices(self, choices: int) -> None:
        """Count each choice of the answer as a connection of the key. Raises `ApiError` 429."""
        if self.meter is not None:
            self.meter.count_choices(choices)

    async def count_request(self) -> None:
        """Count a request that queues no job for the limit of the key. Raises `ApiError` 429, and `SluiceError`."""
        if self.meter is not None:
            await self.meter.count()

    async def reserve(self, job_ids: Sequence[str], tokens: int) -> None:
        """Count a request and reserve tokens for each job. Raises `ApiError`: 429, or 400
        for more jobs than the limit can ever hold; and `SluiceError`."""
        if self.meter is not None:
            await self.meter.reserve(job_ids, tokens)

    async def release(self, job_ids: Sequence[str]) -> None:
        """Return the tokens that this request has reserved for jobs that were not queued."""
        if self.meter is not None:
            await self.meter.release(job_ids)


LOCAL = Caller()  # every request, if no keys are configured


class Authentication:
    """Checks the keys of requests."""

    def __init__(self, store: KeyStore, limits: Limits, max_connections: int) -> None:
        self._store, self._limits = store, limits
        self._connections = _Connections(max_connections)

    async def caller(self, request: Request) -> Caller:
        """Return the caller, and count its connection. Raises `ApiError`: 401, and 429 for too many connections."""
        key = await self._store.find(secret_of(request))
        if key is None:
            message = "it is missing, wrong or expired; send `Authorization: Bearer KEY`."
            raise ApiError(ErrorForm.INVALID_API_KEY, message)
        state = request.scope.setdefault("state", {})
        if "meter" not in state:  # a request may be authenticated more than once
            state["meter"] = _Meter(key, self._limits, self._connections)
            at_end(request).callback(state["meter"].leave)
        return caller_of(key, state["meter"])


def secret_of(request: Request) -> str:
    """Return the key that a request carries, in OpenAI's header or in Anthropic's; empty if it has none."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return request.headers.get("x-api-key", "").strip()


def caller_of(key: Key, meter: _Meter) -> Caller:
    """Return what the holder of the key may do."""
    models = None if key.models is None else frozenset(key.models)
    return Caller(key.tenant, key.id, models, frozenset(key.lanes), key.batch_bytes, key.batch_runs, meter)
