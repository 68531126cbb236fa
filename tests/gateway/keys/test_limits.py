"""Limits in requests and tokens, counted by one script on the server: real ones, so that two gateways share them."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.gateway.caller import Balance, Exceeded, Limits, limit_key, limit_refusal, reservation_key
from sluice.gateway.key_file import Key, key_digest
from sluice.interfaces.errors import ApiError
from sluice.transport import Retries

Db = redis.asyncio.Redis


def key(requests: int | None = None, tokens: int | None = None, id: str = "k-1") -> Key:
    hashed = key_digest(id)
    return Key(id=id, sha256=hashed, tenant="acme", requests_per_minute=requests, tokens_per_minute=tokens)


@pytest.fixture
async def limits(db: Db) -> Limits:
    return Limits(db, Retries(db, None))


@pytest.fixture
async def another_gateway(redis_url: str) -> AsyncIterator[Limits]:
    async with redis.asyncio.Redis.from_url(redis_url) as own:
        yield Limits(own, Retries(own, None))


async def take(gateway: Limits, budget: Key, job_id: str, tokens: int) -> Balance | Exceeded:
    return await gateway.reserve(budget, [job_id], tokens, "m")


async def pass_time(db: Db, seconds: float, id: str = "k-1") -> None:
    """Age the buckets, as if the time had passed."""
    for name in ("requests_at", "tokens_at"):
        if await db.hexists(limit_key(id), name):  # type: ignore[misc]
            await db.hincrby(limit_key(id), name, -round(seconds * 1000))  # type: ignore[misc]


async def test_requests_are_granted_up_to_the_limit_and_again_as_time_passes(db: Db, limits: Limits) -> None:
    granted = [await take(limits, key(requests=3), f"j{i}", 0) for i in range(4)]
    assert [type(each) for each in granted] == [Balance, Balance, Balance, Exceeded]
    assert [each.requests_left for each in granted if isinstance(each, Balance)] == [2, 1, 0]
    assert isinstance(granted[3], Exceeded)
    assert (granted[3].limit, 19 < granted[3].retry_after_s <= 20) == ("requests", True)
    await pass_time(db, 20)
    assert isinstance(await take(limits, key(requests=3), "j5", 0), Balance)
    assert isinstance(await take(limits, key(requests=3), "j6", 0), Exceeded)


async def test_two_gateways_share_a_limit(limits: Limits, another_gateway: Limits) -> None:
    gateways = [limits, another_gateway] * 10
    taken = await asyncio.gather(*(take(gateway, key(requests=5), f"j{i}", 0) for i, gateway in enumerate(gateways)))
    assert sum(isinstance(each, Balance) for each in taken) == 5


async def test_a_job_is_counted_once_however_often_it_is_taken(limits: Limits, another_gateway: Limits) -> None:
    for gateway in (limits, another_gateway, limits):
        assert await take(gateway, key(requests=2, tokens=100), "j", 30) == Balance(2, 100, 1, 70)
    await limits.settle("j", 30)
    assert await take(limits, key(requests=2, tokens=100), "j", 30) == Balance(2, 100, 1, 70)


async def test_a_reservation_is_replaced_by_the_usage_once(limits: Limits, another_gateway: Limits) -> None:
    budget = key(tokens=6_000)
    await take(limits, budget, "j", 5_000)
    for gateway in (limits, another_gateway):
        await gateway.settle("j", 500)
    left = (await limits.read(budget)).tokens_left
    assert 5_500 <= left < 5_600


async def test_usage_above_the_estimate_is_owed_by_what_comes_after_it(db: Db, limits: Limits) -> None:
    budget = key(tokens=600)
    await take(limits, budget, "j", 100)
    await limits.settle("j", 1_100)  # 500 above the limit
    refused = await take(limits, budget, "j2", 100)
    assert isinstance(refused, Exceeded)
    assert 59 < refused.retry_after_s <= 60
    await pass_time(db, 60)
    assert isinstance(await take(limits, budget, "j3", 100), Balance)


async def test_an_estimate_above_the_limit_is_cut_to_it(limits: Limits) -> None:
    assert await take(limits, key(tokens=100), "j", 10**9) == Balance(None, 100, 0, 0)


async def test_a_released_job_costs_no_tokens_and_is_counted_when_it_is_tried_again(limits: Limits) -> None:
    budget = key(requests=3, tokens=100)
    await take(limits, budget, "j", 100)
    await limits.release(["j"], "m")
    assert await take(limits, budget, "j", 100) == Balance(3, 100, 1, 0)


async def test_reading_counts_nothing(limits: Limits) -> None:
    for _ in range(3):
        assert await limits.read(key(requests=1, tokens=10)) == Balance(1, 10, 1, 10)


async def test_a_lower_limit_holds_at_once(limits: Limits) -> None:
    await take(limits, key(requests=1_000), "j", 0)
    assert (await limits.read(key(requests=10))).requests_left == 10


async def test_keys_expire_when_they_are_as_good_as_new(db: Db, limits: Limits) -> None:
    await take(limits, key(requests=60, tokens=600), "j", 600)
    assert 60_000 < await db.pttl(limit_key("k-1")) <= 61_000
    assert await db.pttl(reservation_key("j")) > 80_000_000
    await limits.settle("j", 0)
    assert await db.pttl(reservation_key("j")) <= 3_600_000


def test_a_refusal_says_when_to_come_back() -> None:
    error = limit_refusal(Exceeded(Balance(60, 1000, 5, 0), "tokens", 12.4))
    assert isinstance(error, ApiError)
    assert (error.form.status, error.form.code, error.form.type) == (429, "rate_limit_exceeded", "tokens")
    assert error.headers == {"retry-after": "13", "x-should-retry": "true"}


async def test_jobs_of_one_request_are_granted_together_or_not_at_all(limits: Limits) -> None:
    budget = key(requests=3, tokens=1_000)
    assert await limits.reserve(budget, ["a", "b"], 100, "m") == Balance(3, 1_000, 1, 800)
    assert isinstance(await limits.reserve(budget, ["c", "d"], 100, "m"), Exceeded)
    assert await limits.reserve(budget, ["a", "b", "c"], 100, "m") == Balance(3, 1_000, 0, 700)


async def test_estimates_of_several_jobs_above_the_limit_are_cut_to_it_together(limits: Limits) -> None:
    budget = key(tokens=100)
    assert await limits.reserve(budget, ["a", "b"], 10**9, "m") == Balance(None, 100, 0, 0)
    await limits.settle("a", 0)
    assert 50 <= (await limits.read(budget)).tokens_left < 60


async def test_a_request_releases_its_own_reservations_alone(limits: Limits) -> None:
    budget = key(tokens=100)
    await limits.reserve(budget, ["j"], 60, "first")
    await limits.reserve(budget, ["j"], 60, "second")  # the same job, by a retry that is refused later
    await limits.release(["j"], "second")
    assert (await limits.read(budget)).tokens_left < 60
    await limits.release(["j"], "first")
    assert (await limits.read(budget)).tokens_left == 100


async def test_a_request_without_a_job_counts_and_waits_for_no_tokens(limits: Limits) -> None:
    budget = key(requests=2, tokens=100)
    await take(limits, budget, "j", 100)
    await limits.settle("j", 1_000)
    assert isinstance(await limits.count(budget), Balance)
    assert isinstance(await limits.count(budget), Exceeded)


async def test_tokens_that_the_bucket_has_regained_do_not_come_back_a_second_time(db: Db, limits: Limits) -> None:
    budget = key(tokens=6_000)
    await take(limits, budget, "late", 5_000)
    await pass_time(db, 60)
    await take(limits, budget, "j", 6_000)
    await limits.settle("late", 500)
    assert (await limits.read(budget)).tokens_left < 100


async def test_of_tokens_that_come_back_late_those_are_kept_that_fit_all_the_time(db: Db, limits: Limits) -> None:
    budget = key(tokens=6_000)
    await take(limits, budget, "late", 3_000)
    await pass_time(db, 20)  # 5,000 left: 1,000 fewer than the bucket holds
    await take(limits, budget, "j", 5_000)
    await limits.settle("late", 0)
    assert 1_000 <= (await limits.read(budget)).tokens_left < 1_200


async def test_a_reservation_whose_buckets_have_expired_returns_nothing(db: Db, limits: Limits) -> None:
    budget = key(tokens=6_000)
    await take(limits, budget, "late", 5_000)
    await asyncio.sleep(0.01)  # buckets expire a second after they are full at the earliest
    await db.delete(limit_key("k-1"))
    await take(limits, budget, "j", 6_000)
    await limits.settle("late", 0)
    assert (await limits.read(budget)).tokens_left < 100


async def test_highest_levels_are_kept_in_bounded_space(db: Db, limits: Limits) -> None:
    budget = key(tokens=1_000_000)
    for number in range(100):  # each level lower than the one before
        await take(limits, budget, f"j{number}", 1_000)
    assert (await db.hget(limit_key("k-1"), "peaks")).count(b":") <= 32  # type: ignore[misc]


Step = tuple[str, int, int]  # gateway, tokens reserved, tokens used
STEPS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "wait", "settle"]), st.integers(0, 400), st.integers(0, 600)),
    min_size=5,
    max_size=40,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, per_minute=st.integers(1, 10), tokens=st.integers(50, 1_000))
async def test_two_gateways_never_grant_more_than_is_documented(
    db: Db, limits: Limits, another_gateway: Limits, steps: list[Step], per_minute: int, tokens: int
) -> None:
    """In any t seconds at most limit * (1 + t / 60), and of tokens in addition what jobs used above their estimates. A
    job counts when it was taken, with its estimate until it is settled and with its usage from then on."""
    await db.flushdb()
    gateways, budget = {"a": limits, "b": another_gateway}, key(per_minute, tokens)
    waited_s, started = 0.0, time.monotonic()
    taken_at, cost, usages = dict[str, float](), dict[str, int](), dict[str, int]()
    for number, (step, estimate, usage) in enumerate(steps):
        if step == "wait":
            waited_s += estimate / 20
            await pass_time(db, estimate / 20)
        elif step == "settle":
            for job in [job for job in usages if job not in cost or cost[job] != usages[job]][: 1 + estimate % 3]:
                await gateways["ab"[usage % 2]].settle(job, usages[job])
                cost[job] = min(cost[job], usages[job])
        elif isinstance(await take(gateways[step], budget, f"j{number}", estimate), Balance):
            taken_at[f"j{number}"] = waited_s + time.monotonic() - started
            cost[f"j{number}"], usages[f"j{number}"] = min(estimate, tokens), usage
        now = waited_s + time.monotonic() - started
        for since in taken_at.values():
            share = 1 + (now - since + 0.1) / 60
            within = [job for job, at in taken_at.items() if at >= since]
            assert len(within) <= per_minute * share
            assert sum(cost[job] for job in within) <= tokens * share
