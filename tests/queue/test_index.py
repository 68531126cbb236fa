"""The index of a queue: fair at any length, and mended whatever happens to it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from sluice import Client
from sluice.cancellation import Cancellation
from sluice.contract import keys
from sluice.submission import NewJob, Submission
from sluice.transport import Retries
from tests.queue.held import cancel_waiting
from tests.queue.helpers import QUEUE, envelope, lapse, put, settings
from tests.selection import examples
from worker.queue.job.claims import Claim, Claims, lease_key
from worker.queue.redis_server import redis_from_settings

BODY = envelope({"n": 1})
INDEX = keys.index("default", "interactive")
INDEX_KEYS = [INDEX, *(f"{INDEX}:{part}" for part in keys.INDEX)]


@pytest.fixture
async def claims(redis_url: str) -> AsyncIterator[Claims]:
    given = settings(redis_url)
    async with redis_from_settings(given) as redis:
        yield Claims(redis, given)


async def mended(claims: Claims) -> None:
    """Claim nothing until the index agrees with the queue."""
    assert await claims.take("interactive", 0) == []
    while claims.needs_reconcile("interactive"):
        assert await claims.take("interactive", 0) == []


async def submit(db: Redis, *job_ids: str, tenant: str, **request: Any) -> None:
    jobs = [NewJob(id, {"messages": [], "tenant": tenant, **request}, "default", "interactive") for id in job_ids]
    await Submission(db, Retries(db, 60)).submit_all(jobs)


def of(tenant: str, rows: int = 1, user: str = "") -> list[Claim]:
    """Return claims of this tenant and user that run on this worker."""
    return [
        Claim(f"{tenant}-{user}-row-{k}", "interactive", 1, 0, False, 0.0, 0, b"", 0, tenant, user) for k in range(rows)
    ]


def ids(taken: list[Claim]) -> list[str]:
    return [claim.job_id for claim in taken]


async def test_a_small_tenant_is_next_behind_thousands_of_another(db: Redis, claims: Claims) -> None:
    await submit(db, "first", tenant="big")
    assert ids(await claims.take("interactive", 1)) == ["first"]
    await submit(db, *(f"big-{k:04}" for k in range(3000)), tenant="big")
    await submit(db, "small", tenant="small")
    assert ids(await claims.take("interactive", 1, running=of("big"))) == ["small"]


async def test_a_user_is_next_behind_sixty_jobs_of_another_with_the_same_tenant(db: Redis, claims: Claims) -> None:
    await submit(db, *(f"ann-{k:02}" for k in range(60)), tenant="key", user="ann")
    await submit(db, "bob", tenant="key", user="bob")
    first = await claims.take("interactive", 4)
    assert sorted(ids(first)) == ["ann-00", "ann-01", "ann-02", "bob"]
    await submit(db, "bob-2", tenant="key", safety_identifier="bob")
    assert ids(await claims.take("interactive", 1, running=first[:1])) == ["bob-2"]


async def test_many_users_of_a_tenant_take_no_more_turns_than_one(db: Redis, claims: Claims) -> None:
    for k in range(300):
        await submit(db, f"many-{k:03}", tenant="many", user=f"user-{k:03}")  # by name within a millisecond
    await submit(db, "few-0", "few-1", tenant="few")
    taken = ids(await claims.take("interactive", 4))
    assert sorted(taken) == ["few-0", "few-1", "many-000", "many-001"]
    assert ids(await claims.take("interactive", 1, running=of("few", 2))) == ["many-002"]


async def test_users_of_one_name_in_two_tenants_are_two(db: Redis, claims: Claims) -> None:
    await submit(db, "a-1", "a-2", tenant="a", user="sam")
    await submit(db, "b-1", tenant="b", user="sam")
    await submit(db, "forged", tenant="a", user="\1b\0sam")
    assert ids(await claims.take("interactive", 1, running=[*of("a", 2, "sam"), *of("b", 1, "sam")])) == ["b-1"]
    assert ids(await claims.take("interactive", 1, running=of("a", 1, "sam"))) == ["forged"]


@pytest.mark.parametrize("name", ["user", "safety_identifier"])
@pytest.mark.parametrize("is_indexed", [True, False])
async def test_users_that_bodies_of_plain_producers_name_take_turns(
    db: Redis, claims: Claims, name: str, is_indexed: bool
) -> None:
    await put(db, "first", BODY, at_ms=0)
    if is_indexed:
        assert ids(await claims.take("interactive", 1)) == ["first"]
    for k in range(60):
        await put(db, f"ann-{k:02}", envelope({"messages": [], name: "ann"}), at_ms=k + 1)
    await put(db, "bob", envelope({"messages": [], name: "bob"}), at_ms=100)
    await mended(claims)
    taken = await claims.take("interactive", 4)
    assert "bob" in ids(taken)
    assert {claim.user for claim in taken} >= {"ann", "bob"}
    assert {claim.tenant for claim in taken} == {""}, "a body must not name the tenant"


async def test_a_plain_producer_may_set_tenant_and_user_of_a_job_of_any_length(db: Redis, claims: Claims) -> None:
    long = envelope({"messages": [{"role": "user", "content": "x" * 40_000}], "user": "of the body"})
    for k, (tenant, user) in enumerate([("t", "ann"), ("t", "ann"), ("t", "bob"), ("", "")]):
        if user:
            await db.hset(keys.job(f"job-{k}"), mapping={"tenant": tenant, "user": user})
        await put(db, f"job-{k}", long, at_ms=k)
    taken = await claims.take("interactive", 3)
    assert [(claim.job_id, claim.tenant, claim.user) for claim in taken] == [
        ("job-0", "t", "ann"),
        ("job-3", "", ""),
        ("job-2", "t", "bob"),
    ]


@pytest.mark.parametrize(
    "body",
    [b"no JSON", b"\x80\x04pickle", b"[]", b"5", b'{"a":5}', b'{"a":[]}', b'{"a":["x"]}', b'{"a":[{"user":5}]}',
     b'{"a":[{"user":null}]}', b'{"a":[{"user":""}]}', b'{"a":[{"user":"' + b"x" * 600 + b'"}]}', b"[" * 20_000],
)  # fmt: skip
async def test_a_body_that_names_no_user_is_claimed_without_one(db: Redis, claims: Claims, body: bytes) -> None:
    await put(db, "a", body)
    assert [(claim.job_id, claim.user) for claim in await claims.take("interactive", 1)] == [("a", "")]


async def test_a_user_is_read_of_a_job_that_a_worker_without_an_index_has_handed_back(
    db: Redis, claims: Claims
) -> None:
    await put(db, "a", envelope({"messages": [], "user": "ann"}))
    await db.hset(keys.job("a"), "state", "running")
    await db.set(lease_key("a"), "old:1", px=60_000)
    await mended(claims)
    await db.delete(lease_key("a"))
    await db.hset(keys.job("a"), "state", "queued")
    await db.zadd(f"{INDEX}:leases", {"a": 0})
    assert [claim.user for claim in await claims.take("interactive", 1)] == ["ann"]


async def test_long_bodies_of_plain_producers_are_read_a_part_in_each_claim(db: Redis, claims: Claims) -> None:
    for k in range(20):
        await put(db, f"job-{k:02}", envelope({"pad": "x" * 30_000, "user": f"user-{k}"}), at_ms=k)
    assert await claims.take("interactive", 0) == []
    assert 0 < await db.zcard(INDEX) < 10
    assert claims.needs_reconcile("interactive")
    await mended(claims)
    assert await db.zcard(INDEX) == 20


async def test_a_queue_that_has_no_index_gets_one_page_by_page(db: Redis, claims: Claims) -> None:
    await submit(db, *(f"big-{k:04}" for k in range(1200)), tenant="big")
    await submit(db, "small", tenant="small")
    assert await db.exists(*INDEX_KEYS) == 0, "nobody claims here, so nobody would keep it"
    calls = 1
    assert await claims.take("interactive", 0) == []
    while claims.needs_reconcile("interactive"):
        assert await claims.take("interactive", 0) == []
        calls += 1
    assert calls == 3
    assert ids(await claims.take("interactive", 1, running=of("big"))) == ["small"]


async def test_plain_producers_are_one_tenant(db: Redis, claims: Claims) -> None:
    for k in range(3):
        await put(db, f"plain-{k}", BODY, at_ms=k)
    await submit(db, "named", tenant="acme")
    assert ids(await claims.take("interactive", 3)) == ["plain-0", "named", "plain-1"]


async def test_what_others_remove_from_the_queue_leaves_the_index(db: Redis, claims: Claims) -> None:
    await submit(db, "a", "b", "c", tenant="acme")
    await mended(claims)
    await db.zrem(QUEUE, "a", "b")
    assert ids(await claims.take("interactive", 9)) == ["c"]
    assert await db.zrange(INDEX, 0, -1) == [b"c"]


async def test_one_that_came_and_one_that_went_are_both_noticed(db: Redis, claims: Claims) -> None:
    for k in range(100):
        await put(db, f"job-{k:02}", BODY, at_ms=k)
    await mended(claims)
    await db.zrem(QUEUE, "job-50")
    await put(db, "late", BODY, at_ms=200)
    await mended(claims)
    assert await db.zrange(INDEX, 0, -1) == await db.zrange(QUEUE, 0, -1)


@pytest.mark.parametrize(
    ("removed", "added_at_ms"), [(["job-07"], 7), (["job-20", "job-50"], 10)], ids=["one place", "several places"]
)
async def test_a_short_queue_that_was_changed_within_is_mended_at_once(
    db: Redis, claims: Claims, removed: list[str], added_at_ms: int
) -> None:
    for k in range(60):
        await put(db, f"job-{k:02}", BODY, at_ms=k)
    await mended(claims)
    await db.zrem(QUEUE, *removed)
    await put(db, "other", BODY, at_ms=added_at_ms)
    await mended(claims)
    assert await db.zrange(INDEX, 0, -1) == await db.zrange(QUEUE, 0, -1)


async def test_jobs_that_another_version_runs_are_passed_over_in_the_same_claim(db: Redis, claims: Claims) -> None:
    for k in range(5):
        await submit(db, f"job-{k}", tenant=f"tenant-{k}")
    await mended(claims)
    for k in range(4):
        await db.hset(keys.job(f"job-{k}"), "state", "running")
        await db.set(lease_key(f"job-{k}"), "old:1", px=60_000)
    assert ids(await claims.take("interactive", 1)) == ["job-4"]


async def test_of_two_tenants_the_one_that_waits_longer_is_next_behind_a_job_that_another_version_runs(
    db: Redis, claims: Claims
) -> None:
    await submit(db, "a-1", tenant="acme")
    await put(db, "plain", BODY, at_ms=int(float((await db.zscore(QUEUE, "a-1")) or 0)) + 1)
    await asyncio.sleep(0.01)
    await submit(db, "a-2", tenant="acme")
    await mended(claims)
    await db.hset(keys.job("a-1"), "state", "running")
    await db.set(lease_key("a-1"), "old:1", px=60_000)
    assert ids(await claims.take("interactive", 1)) == ["plain"]


async def test_a_job_whose_time_was_changed_is_taken_at_the_new_one(db: Redis, claims: Claims) -> None:
    seconds, _ = await db.time()
    await put(db, "a", BODY, at_ms=1)
    await put(db, "b", BODY, at_ms=2)
    await mended(claims)
    await db.zadd(QUEUE, {"a": (seconds + 3600) * 1000})
    assert ids(await claims.take("interactive", 2)) == ["b"]
    await db.zadd(QUEUE, {"a": 3})
    assert ids(await claims.take("interactive", 2)) == ["a"]


@pytest.mark.timing
async def test_jobs_of_a_worker_that_knows_no_index_are_not_claimed_and_come_back_within_a_second(
    db: Redis, claims: Claims
) -> None:
    for k in range(3):
        await put(db, f"job-{k}", BODY, at_ms=k)
    await mended(claims)
    await db.hset(keys.job("job-0"), mapping={"state": "running", "attempt": 1})  # as such a worker claims it
    await db.set(lease_key("job-0"), "old:1", px=60_000)
    assert ids(await claims.take("interactive", 1)) == ["job-1"]
    await db.hset(keys.job("job-0"), "state", "queued")  # and hands it back
    await db.delete(lease_key("job-0"))
    await asyncio.sleep(0.6)
    assert [(claim.job_id, claim.lease_expirations) for claim in await claims.take("interactive", 1)] == [("job-0", 0)]


async def test_an_index_that_nobody_keeps_expires(db: Redis, claims: Claims) -> None:
    await submit(db, "a", "b", tenant="acme", deadline_s=60)
    assert ids(await claims.take("interactive", 1)) == ["a"]
    await submit(db, "c", tenant="acme", deadline_s=60)
    found = [key for key in INDEX_KEYS if await db.exists(key)]
    assert found == [INDEX, f"{INDEX}:lines", f"{INDEX}:leases", f"{INDEX}:deadlines"]
    for key in found:
        assert 0 < await db.pttl(key) <= 60_000


async def test_an_empty_queue_has_no_index(db: Redis, client: Client, claims: Claims) -> None:
    await submit(db, "a", "b", tenant="acme", deadline_s=60)
    await mended(claims)
    assert await cancel_waiting(db, "a")
    assert await cancel_waiting(db, "b")
    assert await db.exists(QUEUE, *INDEX_KEYS) == 0


async def test_many_deadlines_that_pass_in_the_queue_are_ended_a_page_at_a_time(db: Redis, claims: Claims) -> None:
    await submit(db, *(f"job-{k:03}" for k in range(700)), tenant="acme", deadline_s=0.01)
    await asyncio.sleep(0.02)
    taken: list[Claim] = []
    while len(taken) < 700:
        taken += (page := await claims.take("interactive", 0))
        assert 0 < len(page) <= 500
    assert all(claim.expired and claim.body == b"" for claim in taken)
    assert sorted(ids(taken)) == [f"job-{k:03}" for k in range(700)]


@pytest.mark.parametrize("lost", INDEX_KEYS)
async def test_no_job_is_lost_with_a_key_of_the_index(db: Redis, claims: Claims, lost: str) -> None:
    await submit(db, *(f"job-{k}" for k in range(6)), tenant="acme", deadline_s=3600)
    assert ids(await claims.take("interactive", 3)) == ["job-0", "job-1", "job-2"]
    await lapse(db, "job-0", "job-1")
    await mended(claims)
    await db.delete(lost)
    taken = await claims.take("interactive", 9)
    assert ids(taken) == ["job-0", "job-3", "job-4", "job-5"], "one suspect, and all that had not run"
    assert ids(await claims.take("interactive", 9)) == ["job-1"]


async def let_deadlines_pass(db: Redis, *job_ids: str) -> None:
    """As time would: the deadlines in the index are lost, and those of the jobs lie in the past."""
    await db.delete(f"{INDEX}:deadlines")
    for job_id in job_ids:
        assert await db.hset(keys.job(job_id), "deadline", 1.0) == 0, "the job had a deadline"


async def test_lost_deadlines_are_found_again_in_the_jobs_a_page_in_each_claim(db: Redis, claims: Claims) -> None:
    late = [f"late-{k:03}" for k in range(600)]
    await submit(db, *late, tenant="acme", deadline_s=600)
    await submit(db, "later", tenant="acme", deadline_s=3600)
    await submit(db, "never", tenant="acme")
    await mended(claims)
    await let_deadlines_pass(db, *late)
    taken = await claims.take("interactive", 0)
    assert claims.needs_reconcile("interactive")
    assert 0 < len(taken) <= 500
    while claims.needs_reconcile("interactive"):
        taken += await claims.take("interactive", 0)
    assert sorted(ids(taken)) == late
    assert await db.zrange(f"{INDEX}:deadlines", 0, -1) == [b"later"]


async def test_a_submit_after_the_loss_of_the_deadlines_does_not_hide_it(db: Redis, claims: Claims) -> None:
    await submit(db, "late", tenant="acme", deadline_s=600)
    await mended(claims)
    await let_deadlines_pass(db, "late")
    await submit(db, "later", tenant="acme", deadline_s=3600)
    assert ids(await claims.take("interactive", 0)) == ["late"]


async def test_lost_deadlines_of_suspects_are_found_again(db: Redis, claims: Claims) -> None:
    await submit(db, "a", "b", tenant="acme", deadline_s=600)
    assert len(await claims.take("interactive", 2)) == 2
    await lapse(db, "a", "b")
    assert await claims.take("interactive", 0) == []
    await let_deadlines_pass(db, "a", "b")
    taken = [*await claims.take("interactive", 0), *await claims.take("interactive", 0)]
    assert sorted(ids(taken)) == ["a", "b"]


@pytest.mark.parametrize("key", INDEX_KEYS)
@pytest.mark.parametrize(
    "spoil",
    [("SET", "x"), ("HSET", "a", "b"), ("RPUSH", "x"), ("SADD", "x"), ("ZADD", 1, "x"), ("XADD", "*", "a", "b")],
)
async def test_a_foreign_value_at_a_key_of_the_index_stops_nobody(
    db: Redis, claims: Claims, key: str, spoil: tuple[Any, ...]
) -> None:
    await submit(db, "a", "b", tenant="acme", deadline_s=60)
    await mended(claims)
    await db.delete(key)
    command, *values = spoil
    await db.execute_command(command, key, *values)
    await submit(db, "c", tenant="acme", deadline_s=60)
    assert sorted(ids(await claims.take("interactive", 9))) == ["a", "b", "c"]
    assert await db.zrange(INDEX, 0, -1) == await db.zrange(QUEUE, 0, -1)


@pytest.mark.parametrize(
    "member", ["h", "hx", "h" + "x" * 20, "h000000000000001", "w", "wacme\0", "wacme\0x", "x", "\xff"]
)
async def test_foreign_members_of_the_lines_stop_nobody(db: Redis, claims: Claims, member: str) -> None:
    await submit(db, "a", "b", tenant="acme")
    await mended(claims)
    await db.zadd(f"{INDEX}:lines", {member: 0})
    taken = [*await claims.take("interactive", 9), *await claims.take("interactive", 9)]
    assert ids(taken) == ["a", "b"]


async def test_a_line_without_jobs_keeps_nobody_from_a_claim(db: Redis, claims: Claims) -> None:
    await submit(db, "a", tenant="acme")
    await mended(claims)
    await db.zadd(f"{INDEX}:lines", {f"h{k:015}nobody-{k}": 0 for k in range(3)})
    taken = [claim for _ in range(4) for claim in await claims.take("interactive", 1)]
    assert ids(taken) == ["a"]


@pytest.mark.parametrize("tenant", ["", "\0", "a\0b", "x" * 128, "né 🙂", "a b", "\n", "h", "w"])
async def test_a_tenant_may_have_any_name(db: Redis, claims: Claims, tenant: str) -> None:
    for name, asks in (("", tenant), ("other-", "acme")):
        await submit(db, f"{name}1", f"{name}2", tenant=asks)
    for k in (1, 2):
        assert sorted(ids(await claims.take("interactive", 2))) == [str(k), f"other-{k}"]


@dataclass(slots=True)
class Known:
    """A job as the model knows it."""

    tenant: str
    user: str
    score: float
    lapses: int = 0
    crashes: int = 0


class FairnessMachine(RuleBasedStateMachine):
    """Jobs of many producers, workers of two kinds, crashes and lost keys, against a model in Python."""

    url: str
    WORKERS = st.sampled_from(["ada", "ben"])
    TENANTS = st.sampled_from(["", "acme", "zoo", "m\0x"])
    USERS = st.sampled_from(["", "ann", "b\1b", "acme"])

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        given = settings(self.url)
        self.redis = redis_from_settings(given)
        self.workers = {
            name: Claims(self.redis, given.model_copy(update={"worker_name": name, "lease_s": 60}))
            for name in ("ada", "ben")
        }
        self.db("FLUSHDB")
        self.submission = Submission(self.redis, Retries(self.redis, 60))
        self.jobs: dict[str, Known] = {}
        self.waiting: set[str] = set()
        self.held: dict[str, tuple[str, Claim]] = {}  # by worker; one that waits too has lapsed
        self.elsewhere: set[str] = set()  # run by a worker that knows no index
        self.count = 0

    def teardown(self) -> None:
        try:
            self._nothing_is_lost()
        finally:
            self.runner.run(self.redis.aclose())
            self.runner.close()

    def db(self, *command: Any) -> Any:
        return self.runner.run(self.redis.execute_command(*command))

    def _new(self) -> str:
        self.count += 1
        return f"job-{self.count:04}"

    def _queued(self, job: str, tenant: str, user: str) -> None:
        # In a millisecond of its own: the order of jobs with equal scores is not promised.
        while self._now_ms() <= float(self.db("ZSCORE", QUEUE, job)):
            pass
        self.jobs[job] = Known(tenant.replace("\0", " "), user.replace("\1", " "), float(self.db("ZSCORE", QUEUE, job)))
        self.waiting.add(job)

    def _now_ms(self) -> int:
        seconds, microseconds = self.db("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    @rule(tenant=TENANTS, user=USERS)
    def submit(self, tenant: str, user: str) -> None:
        job = NewJob(self._new(), {"messages": [], "tenant": tenant, "user": user}, "default", "interactive")
        self.runner.run(self.submission.submit(job))
        self._queued(job.id, tenant or user, user)

    @rule(user=USERS)
    def queue_as_a_plain_producer(self, user: str) -> None:
        body = envelope({"n": 1, "user": user})
        self.runner.run(put(self.redis, job := self._new(), body, at_ms=self._now_ms()))
        self._queued(job, "", user)

    @rule(tenant=TENANTS)
    def submit_with_an_older_client(self, tenant: str) -> None:
        self.queue_as_a_plain_producer("")
        job = f"job-{self.count:04}"
        self.db("HSET", keys.job(job), "state", "queued", "tenant", tenant)
        self.jobs[job].tenant = tenant.replace("\0", " ")

    @rule(name=WORKERS, want=st.integers(0, 5))
    def take(self, name: str, want: int) -> None:
        self._settle()
        expected = self._expected(name, want)
        running = [claim for owner, claim in self.held.values() if owner == name]
        taken = self.runner.run(self.workers[name].take("interactive", want, running=running))
        assert ids(taken) == expected
        for claim in taken:
            job = self.jobs[claim.job_id]
            assert (claim.lease_expirations, claim.crashes) == self._blame(claim.job_id)
            job.lapses, job.crashes = claim.lease_expirations, claim.crashes
            self.held[claim.job_id] = name, claim
        self.waiting -= set(ids(taken))

    def _settle(self) -> None:
        """The time has come to look at every lease, and the index is mended."""
        for job in self.db("ZRANGE", f"{INDEX}:leases", 0, -1):
            self.db("ZADD", f"{INDEX}:leases", 0, job)
        self.runner.run(mended(self.workers["ada"]))

    def _expected(self, name: str, want: int) -> list[str]:
        load = Counter[tuple[str, ...]]()
        for owner, claim in self.held.values():
            if owner == name:
                load.update(self._lines(claim.job_id))
        suspects = sorted((job for job in self.waiting if self._blame(job)[0]), key=self._suspicion)
        expected = suspects[: min(1, want)]
        for job in expected:
            load.update(self._lines(job))
        left = self.waiting - set(suspects)
        while left and len(expected) < want:
            tenant = min(left, key=lambda job: (load[self._lines(job)[0]], *self._age(job)[:2]))
            of_tenant = [job for job in left if self._lines(job)[0] == self._lines(tenant)[0]]
            job = min(of_tenant, key=lambda job: (load[self._lines(job)[1]], self._age(job)))
            load.update(self._lines(job))
            left.remove(job)
            expected.append(job)
        return expected

    def _lines(self, job: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        known = self.jobs[job]
        return (known.tenant,), (known.tenant, known.user)

    def _age(self, job: str) -> tuple[float, str, str, str]:
        return self.jobs[job].score, self.jobs[job].tenant, self.jobs[job].user, job

    def _suspicion(self, job: str) -> tuple[int, float, str]:
        return self._blame(job)[1], self.jobs[job].score, job

    def _blame(self, job: str) -> tuple[int, int]:
        """Lapses and crashes, once it is claimed again."""
        known, lapsed = self.jobs[job], job in self.held
        return known.lapses + lapsed, known.crashes + (lapsed and known.lapses > 0)

    def _running(self) -> list[str]:
        return sorted(set(self.held) - self.waiting)

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        name, claim = self.held.pop(data.draw(st.sampled_from(self._running())))
        self.runner.run(self.workers[name].release(claim))
        self.waiting.add(claim.job_id)

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self._running()))
        self.db("DEL", lease_key(job))
        self.waiting.add(job)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.runner.run(cancel_waiting(self.redis, job))
        self._gone(job)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove_by_hand(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.waiting)))
        self.db("ZREM", QUEUE, job)
        self._gone(job)

    def _gone(self, job: str) -> None:
        self.waiting.remove(job)
        self.held.pop(job, None)

    @precondition(lambda self: self.waiting - set(self.held))
    @rule(data=st.data())
    def claim_as_an_older_worker(self, data: st.DataObject) -> None:
        fresh = sorted(job for job in self.waiting - set(self.held) if not self.jobs[job].lapses)
        if fresh:
            job = data.draw(st.sampled_from(fresh))
            self.db("HSET", keys.job(job), "state", "running")
            self.db("SET", lease_key(job), "old:1", "PX", 60_000)
            self.waiting.remove(job)
            self.elsewhere.add(job)

    @precondition(lambda self: self.elsewhere)
    @rule(data=st.data(), ends=st.booleans())
    def older_worker_ends_or_hands_back(self, data: st.DataObject, ends: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.elsewhere)))
        self.elsewhere.remove(job)
        self.db("DEL", lease_key(job))
        if ends:
            self.db("HSET", keys.job(job), "state", "finished")
            self.db("ZREM", QUEUE, job)
        else:
            self.db("HSET", keys.job(job), "state", "queued")
            self.waiting.add(job)

    @rule(lost=st.sampled_from(INDEX_KEYS))
    def lose_a_key_of_the_index(self, lost: str) -> None:
        self.db("DEL", lost)

    @invariant()
    def a_running_job_stays_in_the_queue(self) -> None:
        in_queue = {job.decode() for job in self.db("ZRANGE", QUEUE, 0, -1)}
        assert in_queue == self.waiting | set(self.held) | self.elsewhere

    def _nothing_is_lost(self) -> None:
        self._settle()
        assert self.db("ZRANGE", INDEX, 0, -1, "WITHSCORES") == self.db("ZRANGE", QUEUE, 0, -1, "WITHSCORES")
        for _ in range(len(self.waiting)):
            self.take("ada", 9)
        assert self.waiting == set()


def test_claims_are_fair_and_nothing_is_lost(redis_url: str) -> None:
    FairnessMachine.url = redis_url
    run_state_machine_as_test(
        FairnessMachine,
        settings=hypothesis_settings(
            max_examples=examples(40), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


async def submit_counts(db: Redis, *job_ids: str, tenant: str) -> None:
    body = {"messages": [], "tenant": tenant}
    jobs = [NewJob(id, body, "default", "interactive", "count") for id in job_ids]
    await Submission(db, Retries(db, 60)).submit_all(jobs)


@pytest.mark.parametrize("is_indexed", [True, False])
async def test_counts_are_claimed_without_a_row_four_of_a_tenant_at_once(
    db: Redis, claims: Claims, is_indexed: bool
) -> None:
    await put(db, "plain", BODY)
    if is_indexed:
        await mended(claims)
    await submit_counts(db, *(f"big-{number}" for number in range(6)), tenant="big")
    await submit_counts(db, "small", tenant="small")
    first = await claims.take("interactive", 0, counts=8)
    assert sorted(ids(first)) == ["big-0", "big-1", "big-2", "big-3", "small"]
    assert all(claim.is_count for claim in first)
    assert await claims.take("interactive", 0, counts=8, running=first) == []
    fifth = await claims.take("interactive", 0, counts=8, running=first[1:])
    assert ids(fifth) == ["big-4"]
    rest = await claims.take("interactive", 9, running=[*first, *fifth])
    assert {claim.job_id: claim.is_count for claim in rest} == {"plain": False, "big-5": True}


async def test_many_counts_of_one_tenant_hide_no_count_of_another(db: Redis, claims: Claims) -> None:
    await put(db, "plain", BODY)
    await mended(claims)
    await submit_counts(db, *(f"big-{number:03}" for number in range(200)), tenant="big")
    await submit_counts(db, "small", tenant="small")
    claimed = await claims.take("interactive", 0, counts=8)
    assert sorted(ids(claimed)) == ["big-000", "big-001", "big-002", "big-003", "small"]
    await submit_counts(db, "small-2", "small-3", tenant="small")
    assert ids(await claims.take("interactive", 0, counts=3, running=claimed)) == ["small-2", "small-3"]


async def test_a_count_that_was_cancelled_or_is_not_known_to_be_one_is_not_claimed_without_a_row(
    db: Redis, claims: Claims
) -> None:
    await put(db, "plain", envelope({"n": 1}, function="count"))
    await mended(claims)
    await submit_counts(db, "cancelled", "removed", tenant="a")
    assert await Cancellation(db, Retries(db, 60)).cancel("cancelled") == "cancelled"
    await db.zrem(QUEUE, "removed")
    assert await claims.take("interactive", 0, counts=8) == []
    assert await db.zcard(f"{INDEX}:count-lines") == 0


async def test_a_released_count_is_claimed_again_without_a_row(db: Redis, claims: Claims) -> None:
    await put(db, "plain", BODY)
    await submit_counts(db, "a", tenant="t")
    (claim,) = await claims.take("interactive", 0, counts=8)
    await claims.release(claim)
    (again,) = await claims.take("interactive", 0, counts=8)
    assert (again.job_id, again.attempt) == ("a", 2)
