"""Limits in requests and tokens, counted by one script on the server: real ones, so that two fronts can share them."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key, digest
from sluice.gateway.keys.limits import Balance, Exceeded, Limits, limit_key, refusal, reservation_key
from sluice.transport.retries import Retries

Db = redis.asyncio.Redis


def key(requests: int | None = None, tokens: int | None = None, id: str = "k-1") -> Key:
    hashed = digest(id)
    return Key(id=id, sha256=hashed, tenant="acme", requests_per_minute=requests, tokens_per_minute=tokens)


@pytest.fixture
async def limits(db: Db) -> Limits:
    return Limits(db, Retries(db, None))


@pytest.fixture
async def another_front(redis_url: str) -> AsyncIterator[Limits]:
    async with redis.asyncio.Redis.from_url(redis_url) as own:
        yield Limits(own, Retries(own, None))


async def pass_time(db: Db, seconds: float, id: str = "k-1") -> None:
    """Age the buckets, as if the time had passed."""
    for name in ("requests_at", "tokens_at"):
        if await db.hexists(limit_key(id), name):  # type: ignore[misc]
            await db.hincrby(limit_key(id), name, -round(seconds * 1000))  # type: ignore[misc]


async def test_requests_are_granted_up_to_the_limit_and_again_as_time_passes(db: Db, limits: Limits) -> None:
    granted = [await limits.take(key(requests=3), f"j{i}", 0) for i in range(4)]
    assert [type(each) for each in granted] == [Balance, Balance, Balance, Exceeded]
    assert [each.requests_left for each in granted if isinstance(each, Balance)] == [2, 1, 0]
    assert isinstance(granted[3], Exceeded)
    assert (granted[3].limit, 19 < granted[3].retry_after_s <= 20) == ("requests", True)
    await pass_time(db, 20)
    assert isinstance(await limits.take(key(requests=3), "j5", 0), Balance)
    assert isinstance(await limits.take(key(requests=3), "j6", 0), Exceeded)


async def test_two_fronts_share_a_limit(limits: Limits, another_front: Limits) -> None:
    fronts = [limits, another_front] * 10
    taken = await asyncio.gather(*(front.take(key(requests=5), f"j{i}", 0) for i, front in enumerate(fronts)))
    assert sum(isinstance(each, Balance) for each in taken) == 5


async def test_a_job_is_counted_once_however_often_it_is_taken(limits: Limits, another_front: Limits) -> None:
    for front in (limits, another_front, limits):
        assert await front.take(key(requests=2, tokens=100), "j", 30) == Balance(2, 100, 1, 70)
    await limits.settle("j", 30)
    assert await limits.take(key(requests=2, tokens=100), "j", 30) == Balance(2, 100, 1, 70)


async def test_a_reservation_is_replaced_by_the_usage_once(limits: Limits, another_front: Limits) -> None:
    budget = key(tokens=6_000)
    await limits.take(budget, "j", 5_000)
    for front in (limits, another_front):
        await front.settle("j", 500)
    left = (await limits.read(budget)).tokens_left
    assert 5_500 <= left < 5_600


async def test_usage_above_the_estimate_is_owed_by_what_comes_after_it(db: Db, limits: Limits) -> None:
    budget = key(tokens=600)
    await limits.take(budget, "j", 100)
    await limits.settle("j", 1_100)  # 500 above the limit
    refused = await limits.take(budget, "j2", 100)
    assert isinstance(refused, Exceeded)
    assert 59 < refused.retry_after_s <= 60
    await pass_time(db, 60)
    assert isinstance(await limits.take(budget, "j3", 100), Balance)


async def test_an_estimate_above_the_limit_is_cut_to_it(limits: Limits) -> None:
    assert await limits.take(key(tokens=100), "j", 10**9) == Balance(None, 100, 0, 0)


async def test_a_released_job_costs_no_tokens_and_is_counted_when_it_is_tried_again(limits: Limits) -> None:
    budget = key(requests=3, tokens=100)
    await limits.take(budget, "j", 100)
    await limits.release("j")
    assert await limits.take(budget, "j", 100) == Balance(3, 100, 1, 0)


async def test_reading_counts_nothing(limits: Limits) -> None:
    for _ in range(3):
        assert await limits.read(key(requests=1, tokens=10)) == Balance(1, 10, 1, 10)


async def test_a_lower_limit_holds_at_once(limits: Limits) -> None:
    await limits.take(key(requests=1_000), "j", 0)
    assert (await limits.read(key(requests=10))).requests_left == 10


async def test_keys_expire_when_they_are_as_good_as_new(db: Db, limits: Limits) -> None:
    await limits.take(key(requests=60, tokens=600), "j", 600)
    assert 60_000 < await db.pttl(limit_key("k-1")) <= 61_000
    assert await db.pttl(reservation_key("j")) > 80_000_000
    await limits.settle("j", 0)
    assert await db.pttl(reservation_key("j")) <= 3_600_000


def test_a_refusal_says_when_to_come_back() -> None:
    error = refusal(Exceeded(Balance(60, 1000, 5, 0), "tokens", 12.4))
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.kind) == (429, "rate_limit_exceeded", "tokens")
    assert error.headers == {"retry-after": "13", "x-should-retry": "true"}


Step = tuple[str, int, int]  # front, tokens reserved, tokens used
STEPS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "wait"]), st.integers(0, 400), st.integers(0, 600)), min_size=5, max_size=40
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, per_minute=st.integers(1, 10), tokens=st.integers(50, 1_000))
async def test_two_fronts_never_grant_more_than_is_documented(
    db: Db, limits: Limits, another_front: Limits, steps: list[Step], per_minute: int, tokens: int
) -> None:
    """In t seconds at most limit * (1 + t / 60), and of tokens in addition what jobs used above their estimates."""
    await db.flushdb()
    fronts, budget = {"a": limits, "b": another_front}, key(per_minute, tokens)
    waited_s, started, jobs = 0.0, time.monotonic(), 0
    reserved, used, above = 0, 0, 0
    for number, (who, estimate, usage) in enumerate(steps):
        if who == "wait":
            waited_s += estimate / 20
            await pass_time(db, estimate / 20)
            continue
        taken: Any = await fronts[who].take(budget, f"j{number}", estimate)
        if isinstance(taken, Balance):
            await fronts["b" if who == "a" else "a"].settle(f"j{number}", usage)
            jobs, used, reserved = jobs + 1, used + usage, min(estimate, tokens)
            above += max(0, usage - reserved)
        share = 1 + (waited_s + time.monotonic() - started + 0.1) / 60
        assert jobs <= per_minute * share
        assert used <= tokens * share + above
