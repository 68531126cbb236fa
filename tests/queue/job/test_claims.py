import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys
from sluice.contract.keys import Lane
from tests.keyspace import check_all_ended, check_job_keys
from tests.line import Line
from tests.queue.held import cancel_waiting
from tests.queue.helpers import BATCH, QUEUE, envelope, field, lapse, put, renew, settings
from tests.selection import examples
from worker.bounded_json.strict import loads
from worker.queue.job.claims import Claim, Claims, lease_key
from worker.queue.job.resume_state import ResumeState, SpecPrefillReport
from worker.queue.redis_server import redis_from_settings

BODY = envelope({"n": 1})
Claimer = Callable[..., Claims]


def claims_of(redis: Redis, **changed: Any) -> Claims:
    """Leases may be shorter than a setting allows."""
    return Claims(redis, settings("redis://unused", max_request_bytes=1000).model_copy(update=changed))


@pytest.fixture
async def claimer(redis_url: str) -> AsyncIterator[Claimer]:
    async with redis_from_settings(settings(redis_url)) as redis:

        def make(worker: str = "ada", *, lease_s: float = 5.0, **changed: Any) -> Claims:
            return claims_of(redis, worker_name=worker, lease_s=lease_s, **changed)

        yield make


@pytest.fixture
def claims(claimer: Claimer) -> Claims:
    return claimer()


def ids(taken: list[Claim]) -> list[str]:
    return [claim.job_id for claim in taken]


def first_claim(job_id: str, *, at_ms: int = 1, lane: Lane = "interactive", **changed: Any) -> Claim:
    known = {"attempt": 1, "crashes": 0, "cancelled": False, "events": 0, "body": BODY, "body_bytes": len(BODY)}
    return Claim(job_id=job_id, lane=lane, queued_at=at_ms / 1000, **{**known, **changed})


async def end(db: Redis, job_id: str, state: str = "finished") -> None:
    await db.hset(keys.job(job_id), "state", state)
    await db.delete(lease_key(job_id))


async def test_the_oldest_jobs_are_claimed_first_and_whole(db: Redis, claims: Claims) -> None:
    for job_id, at_ms in (("young", 30), ("old", 10), ("middle", 20)):
        await put(db, job_id, BODY, at_ms=at_ms)
    assert await claims.take("interactive", 2) == [first_claim("old", at_ms=10), first_claim("middle", at_ms=20)]
    assert await claims.take("interactive", 2) == [first_claim("young", at_ms=30)]
    assert await claims.take("interactive", 2) == []


async def test_a_claim_marks_the_job(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY, lane="batch")
    await claims.take("batch", 1)
    hash = {name.decode(): value.decode() for name, value in (await db.hgetall(keys.job("a"))).items()}
    assert float(hash.pop("started_at")) == pytest.approx((await db.time())[0], abs=5)
    assert hash == {
        "state": "running", "attempt": "1", "indexed_attempt": "1", "crashes": "0", "worker": "ada", "lane": "batch",
    }  # fmt: skip
    assert await db.get(lease_key("a")) == b"ada:1"
    assert 1_000 < await db.pttl(lease_key("a")) <= 5_000
    assert await db.zscore(BATCH, "a") is not None, "a running job stays in its queue, to be claimed again"


async def test_a_running_job_is_looked_at_again_when_its_lease_ends(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    await claims.take("interactive", 1)
    (leases,) = await db.keys("sluice:index:*:leases")
    seconds, _ = await db.time()
    assert 3_000 < await db.zscore(leases, "a") - 1_000 * seconds <= 6_000, "a lease is 5 seconds"


async def test_each_lane_has_its_own_queue(db: Redis, claims: Claims) -> None:
    await put(db, "chat", BODY)
    await put(db, "file", BODY, lane="batch")
    assert await claims.take("batch", 9) == [first_claim("file", lane="batch")]
    assert await claims.take("interactive", 9) == [first_claim("chat")]


async def test_never_two_owners_however_many_claim_at_once(db: Redis, claimer: Claimer) -> None:
    for k in range(150):
        await put(db, f"job-{k}", BODY, at_ms=k)
    dice, taken = random.Random(7), list[str]()

    async def claim_all(worker: Claims) -> None:
        while batch := await worker.take("interactive", want := dice.randint(1, 7)):
            assert len(batch) <= want
            taken.extend(ids(batch))

    await asyncio.gather(*(claim_all(claimer(f"worker-{k}")) for k in range(12)))
    assert sorted(taken) == sorted(f"job-{k}" for k in range(150))


async def test_a_worker_claims_no_more_than_it_wants(db: Redis, claims: Claims) -> None:
    for k in range(5):
        await put(db, f"job-{k}", BODY)
    assert [len(await claims.take("interactive", want)) for want in (0, 1, 3, 3)] == [0, 1, 3, 1]


async def claimed(claims: Claims) -> list[Claim]:
    """Wait until something can be claimed."""
    async with asyncio.timeout(60):
        while not (taken := await claims.take("interactive", 9)):
            await asyncio.sleep(0.01)
    return taken


async def test_a_job_whose_lease_ran_out_is_claimed_again_as_a_suspect(db: Redis, claimer: Claimer) -> None:
    for at_ms, (job_id, lease_s) in enumerate((("long", 60), ("short", 0.05))):
        await put(db, job_id, BODY, at_ms=at_ms)
        assert ids(await claimer("ada", lease_s=lease_s).take("interactive", 1)) == [job_id]
    expected = first_claim("short", at_ms=1, attempt=2, lease_expirations=1)
    assert await claimed(claimer("ben", lease_s=60)) == [expected]
    assert await field(db, "short", "worker") == "ben"


async def test_only_crashes_on_probation_count(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    taken = []
    for attempt in range(5):
        taken += await claims.take("interactive", 1)
        if attempt == 1:
            await db.hset(keys.job("a"), "probation", 0)  # as a job does that gets past what killed the last worker
        await lapse(db, "a")
    assert [(claim.lease_expirations, claim.crashes) for claim in taken] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)]


async def test_a_worker_has_one_suspect_at_a_time(db: Redis, claims: Claims) -> None:
    for k in range(4):
        await put(db, f"job-{k}", BODY, at_ms=k)
    await claims.take("interactive", 3)
    await lapse(db, *(f"job-{k}" for k in range(3)))
    first = await claims.take("interactive", 9)
    assert [(claim.job_id, claim.lease_expirations) for claim in first] == [("job-0", 1), ("job-3", 0)]
    assert await claims.take("interactive", 9, running=first, suspects=1) == []
    assert ids(await claims.take("interactive", 9)) == ["job-1"], "one that runs none"


async def test_a_lapsed_lease_is_left_alone_where_no_takeover_is_allowed(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    await claims.take("interactive", 1)
    await lapse(db, "a")
    assert await claims.take("interactive", 1, takeover=False) == []
    assert ids(await claims.take("interactive", 1)) == ["a"]


async def test_a_claim_whose_answer_was_lost_is_made_again_whatever_the_other_lane_answered(redis_url: str) -> None:
    known = settings(redis_url)
    async with Line(redis_url) as line, redis_from_settings(known.model_copy(update={"redis_url": line.url})) as redis:
        claims = claims_of(redis)
        await put(redis, "a", BODY, lane="batch")
        await claims.take("interactive", 1)  # the server has the script by now
        line.loses = lambda: True
        with pytest.raises((RedisError, OSError)):
            await claims.take("batch", 1)
        line.loses = lambda: False
        assert await claims.take("interactive", 1) == []
        assert await claims.take("batch", 1) == [first_claim("a", lane="batch", attempt=2)]


async def test_a_job_handed_back_is_claimed_again_without_a_crash(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    (claim,) = await claims.take("interactive", 1)
    await claims.release(claim)
    names = ("state", "attempt", "crashes", "worker")
    assert [await field(db, "a", name) for name in names] == ["queued", "1", "0", ""]
    assert await claims.take("interactive", 1) == [first_claim("a", attempt=2, crashes=0)]


async def test_only_its_owner_hands_a_job_back(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    (first,) = await claims.take("interactive", 1)
    await lapse(db, "a")
    (second,) = await claims.take("interactive", 1)
    await claims.release(first)
    assert await field(db, "a", "state") == "running"
    assert await db.get(lease_key("a")) == b"ada:2"
    await claims.release(second)
    assert await field(db, "a", "state") == "queued"


async def test_a_hand_back_wakes_the_others(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    (claim,) = await claims.take("interactive", 1)
    async with db.pubsub() as pubsub:
        await pubsub.subscribe(keys.wake("default"))
        await pubsub.get_message(timeout=1)
        await claims.release(claim)
        message = await pubsub.get_message(timeout=1)
    assert message is not None


async def test_a_deferred_job_waits_for_its_time(db: Redis, claims: Claims) -> None:
    soon = await now_ms(db) + 60
    await put(db, "soon", BODY, at_ms=soon)
    await put(db, "later", BODY, at_ms=soon + 3_600_000)
    assert await claimed(claims) == [first_claim("soon", at_ms=soon)]
    assert await now_ms(db) >= soon
    assert await claims.take("interactive", 9) == []


async def now_ms(db: Redis) -> int:
    seconds, microseconds = await db.time()
    return int(seconds * 1000 + microseconds // 1000)


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled"])
async def test_an_id_that_has_ended_is_dropped_from_the_queue_with_its_body(
    db: Redis, claims: Claims, state: str
) -> None:
    await end(db, "a", state)
    await put(db, "a", BODY)
    await put(db, "b", BODY, at_ms=2)
    assert await claims.take("interactive", 1) == [first_claim("b", at_ms=2)]
    assert await db.zrange(QUEUE, 0, -1) == [b"b"]
    assert await db.exists("arq:job:a") == 0
    assert await field(db, "a", "state") == state


async def test_thousands_of_running_jobs_at_the_head_do_not_starve_the_next(db: Redis, claims: Claims) -> None:
    async with db.pipeline() as pipe:
        for k in range(3000):
            pipe.zadd(QUEUE, {f"running-{k}": k})
            pipe.set(lease_key(f"running-{k}"), "ben:1", px=60_000)
        await pipe.execute()
    await put(db, "next", BODY, at_ms=5000)
    taken = await claims.take("interactive", 3)
    while claims.needs_reconcile("interactive"):
        taken += await claims.take("interactive", 3)
    assert taken == [first_claim("next", at_ms=5000)]


async def test_no_job_is_skipped_where_ended_and_running_ones_lie_between(db: Redis, claims: Claims) -> None:
    """The pages of the queue move while ended jobs are dropped from them."""
    dice, kinds = random.Random(3), dict[str, str]()
    async with db.pipeline() as pipe:
        for k in range(900):
            job_id = f"job-{k:03}"
            kinds[job_id] = dice.choice(["waiting", "ended", "running"])
            pipe.zadd(QUEUE, {job_id: k})
            if kinds[job_id] == "running":
                pipe.set(lease_key(job_id), "ben:1", px=60_000)
            elif kinds[job_id] == "ended":
                pipe.hset(keys.job(job_id), "state", "failed")
        await pipe.execute()
    expected = [job_id for job_id, kind in kinds.items() if kind == "waiting"]
    taken = ids(await claims.take("interactive", 100)) + ids(await claims.take("interactive", 900))
    assert taken == expected
    assert await db.zcard(QUEUE) == len([kind for kind in kinds.values() if kind != "ended"])


async def test_tenants_take_turns_beginning_with_the_one_that_has_the_fewest_rows(db: Redis, claims: Claims) -> None:
    for k, tenant in enumerate("aaaabbc"):
        await put(db, f"{tenant}{k}", BODY, at_ms=k)
        await db.hset(keys.job(f"{tenant}{k}"), mapping={"state": "queued", "tenant": tenant})
    assert ids(first := await claims.take("interactive", 2)) == ["a0", "b4"]
    assert ids(await claims.take("interactive", 3, running=first)) == ["c6", "a1", "b5"]


async def test_a_job_past_its_deadline_is_claimed_beyond_what_is_wanted(db: Redis, claims: Claims) -> None:
    now, _ = await db.time()
    for k, deadline in enumerate((now + 60, now - 60, now - 60)):
        await put(db, f"job-{k}", BODY, at_ms=k)
        await db.hset(keys.job(f"job-{k}"), mapping={"state": "queued", "deadline": deadline})
    taken = await claims.take("interactive", 0)
    assert [(claim.job_id, claim.expired) for claim in taken] == [("job-1", True), ("job-2", True)]
    assert [claim.body for claim in taken] == [b"", b""], "which nobody would read"
    assert [(claim.job_id, claim.expired) for claim in await claims.take("interactive", 1)] == [("job-0", False)]


async def test_a_deadline_that_is_no_number_holds_up_nobody(db: Redis, claims: Claims) -> None:
    for k, deadline in enumerate(("soon", "")):
        await put(db, f"job-{k}", BODY, at_ms=k)
        await db.hset(keys.job(f"job-{k}"), mapping={"state": "queued", "deadline": deadline})
    assert ids(await claims.take("interactive", 2)) == ["job-0", "job-1"]


@pytest.mark.parametrize("score", ["-inf", -1])
async def test_no_job_was_queued_before_time_began(db: Redis, claims: Claims, score: Any) -> None:
    await put(db, "a", BODY, at_ms=score)
    assert await claims.take("interactive", 1) == [first_claim("a", at_ms=0)]


async def test_an_infinite_score_is_a_time_that_can_be_counted_with(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY, at_ms="+inf")  # type: ignore[arg-type]
    await db.hset(keys.job("a"), mapping={"state": "queued", "deadline": "1"})
    (claim,) = await claims.take("interactive", 1)
    assert int(claim.queued_at * 1000) == 10**15


async def test_a_body_that_has_expired_comes_back_empty(db: Redis, claims: Claims) -> None:
    await put(db, "a", None)
    assert await claims.take("interactive", 1) == [first_claim("a", body=b"", body_bytes=0)]


async def test_a_body_larger_than_we_take_stays_where_it_is(db: Redis, claims: Claims) -> None:
    for job_id, size in (("fits", 1000), ("huge", 1001)):
        await put(db, job_id, b"x" * size)
    assert await claims.take("interactive", 2) == [
        first_claim("fits", body=b"x" * 1000, body_bytes=1000),
        first_claim("huge", body=b"", body_bytes=1001),
    ]


async def test_a_large_body_does_not_come_with_its_claim_and_is_got_by_itself(db: Redis, claimer: Claimer) -> None:
    claims = claimer(max_request_bytes=100_000)
    for at_ms, (job_id, size) in enumerate((("small", 65_536), ("large", 65_537), ("too-large", 100_001))):
        await put(db, job_id, b"x" * size, at_ms=at_ms)
    small, large, too_large = await claims.take("interactive", 3)
    assert (len(small.body), large.body, too_large.body) == (65_536, b"", b"")
    assert await claims.body(small) == b"x" * 65_536
    assert await claims.body(large) == b"x" * 65_537
    assert await claims.body(too_large) == b""


@pytest.mark.parametrize("spoil", ["DEL", "LPUSH"])
async def test_a_large_body_that_has_gone_meanwhile_is_empty(db: Redis, claims: Claims, spoil: str) -> None:
    await put(db, "a", b"x" * 70_000)
    claim = replace((await claims.take("interactive", 1))[0], body_bytes=500)
    await db.delete("arq:job:a")
    if spoil == "LPUSH":
        await db.lpush("arq:job:a", "a list")
    assert await claims.body(claim) == b""


async def test_only_a_job_that_waits_is_cancelled_in_its_queue(db: Redis, claims: Claims) -> None:
    seconds, _ = await db.time()
    await put(db, "runs", BODY)
    assert ids(await claims.take("interactive", 1)) == ["runs"]
    await put(db, "deferred", BODY, at_ms=(seconds + 3600) * 1000)
    assert not await cancel_waiting(db, "runs")
    assert not await cancel_waiting(db, "nobody")
    assert await cancel_waiting(db, "deferred")
    assert not await cancel_waiting(db, "deferred"), "it has ended"
    await check_job_keys(db, "deferred")
    (event,) = [loads(raw) for raw in await db.lrange("sluice:log:deferred", 0, -1)]
    assert (event["type"], event["seq"], event["attempt"]) == ("cancelled", 0, 1)
    assert await db.get("sluice:result:deferred") == await db.lindex("sluice:log:deferred", 0)
    assert await db.hget("sluice:job:deferred", "state") == b"cancelled"


@pytest.mark.parametrize("lane", keys.LANES)
async def test_a_job_is_cancelled_in_whichever_lane_it_waits(db: Redis, claims: Claims, lane: Lane) -> None:
    await put(db, "a", BODY, lane=lane)
    assert await cancel_waiting(db, "a")
    await check_all_ended(db)


async def test_a_job_that_has_ended_is_not_cancelled_because_it_was_queued_again(db: Redis, claims: Claims) -> None:
    await end(db, "a")
    await put(db, "a", BODY)
    assert not await cancel_waiting(db, "a")
    assert await field(db, "a", "state") == "finished"


async def test_jobs_whose_claim_was_never_heard_are_claimed_anew_and_those_that_run_are_not(
    redis_url: str, db: Redis
) -> None:
    async with Line(redis_url) as line, redis_from_settings(settings(line.url)) as redis:
        claims = claims_of(redis)
        for k in range(4):
            await put(db, f"job-{k}", BODY, at_ms=k)
        running = await claims.take("interactive", 1)
        line.loses = lambda: True
        with pytest.raises(RedisError):
            await claims.take("interactive", 2, running=running)
        line.loses = lambda: False
        assert await claims.take("interactive", 9, running=running) == [
            first_claim("job-1", at_ms=1, attempt=2),
            first_claim("job-2", at_ms=2, attempt=2),
            first_claim("job-3", at_ms=3),
        ]
        assert await claims.take("interactive", 9) == [], "nothing was lost this time"


async def test_the_worker_that_ran_a_cancelled_job_before_is_fenced(db: Redis, claims: Claims) -> None:
    await put(db, "job", BODY)
    (claim,) = await claims.take("interactive", 1)
    await claims.release(claim)
    assert await cancel_waiting(db, "job")
    assert int(await db.hget("sluice:job:job", "attempt") or 0) > claim.attempt
    await claims.release(claim)
    assert await db.hget("sluice:job:job", "state") == b"cancelled"


@pytest.mark.parametrize(
    "spoil",
    [
        ("SET", "sluice:job:bad", "x"),
        ("HSET", "sluice:job:bad", "attempt", "x"),
        ("HSET", "sluice:job:bad", "crashes", "-1.5", "lapses", "many", "deadline", "nan"),
        ("SET", "sluice:log:bad", "x"),
        ("HSET", "arq:job:bad", "a", "b"),
    ],
)
async def test_foreign_values_at_a_job_s_keys_hold_up_nobody(db: Redis, claims: Claims, spoil: tuple[str, ...]) -> None:
    await db.execute_command(*spoil)
    if spoil[1] != "arq:job:bad":
        await db.set("arq:job:bad", BODY)
    await db.zadd(QUEUE, {"bad": 1})
    await put(db, "good", BODY, at_ms=2)
    assert ids(await claims.take("interactive", 2)) == ["bad", "good"]


async def test_a_claim_says_whether_somebody_wants_the_end(db: Redis, claims: Claims) -> None:
    for job_id in ("a", "b"):
        await put(db, job_id, BODY)
    await db.set(keys.cancel("a"), "1")
    assert [claim.cancelled for claim in await claims.take("interactive", 2)] == [True, False]


async def test_a_claim_says_how_many_events_there_are_already(db: Redis, claims: Claims) -> None:
    await put(db, "a", BODY)
    await db.rpush(keys.log("a"), "one", "two")
    assert await claims.take("interactive", 1) == [first_claim("a", events=2)]
    assert await db.pttl(keys.log("a")) > 86_000_000


async def test_a_claim_has_the_state_that_an_earlier_attempt_left(db: Redis, claims: Claims) -> None:
    state = ResumeState(
        fingerprint="fp", seed=7, images="digest", specprefill=SpecPrefillReport(kept=((0, 9),), fingerprint="fp")
    )
    await put(db, "a", BODY)
    await db.hset(keys.job("a"), mapping=state.as_fields())
    assert await claims.take("interactive", 1) == [first_claim("a", resume_state=state)]


@pytest.mark.parametrize("field", ["seed", "fingerprint", "images", "specprefill"])
async def test_a_claim_of_a_job_with_a_foreign_state_has_none(db: Redis, claims: Claims, field: str) -> None:
    await put(db, "a", BODY)
    await db.hset(keys.job("a"), field, b"\xff")
    assert await claims.take("interactive", 1) == [first_claim("a", resume_state=None)]


@pytest.mark.parametrize("name", [b"\xff\xfe", b"", "né 🙂".encode(), b"a:b c*[x]\n", b"x" * 8192])
async def test_an_id_may_be_any_bytes(db: Redis, claims: Claims, name: bytes) -> None:
    await put(db, name, BODY)
    (claim,) = await claims.take("interactive", 1)
    assert claim == first_claim(name.decode("utf-8", "surrogateescape"))
    assert await db.get(b"arq:in-progress:" + name) == b"ada:1"
    await claims.release(claim)
    assert await db.hget(b"sluice:job:" + name, "state") == b"queued"


async def test_an_id_of_many_kilobytes_is_deleted_and_leaves_no_key(
    db: Redis, claims: Claims, caplog: pytest.LogCaptureFixture
) -> None:
    long = b"x" * 100_000
    await put(db, long, BODY)
    await put(db, "a", BODY)
    assert [claim.job_id for claim in await claims.take("interactive", 2)] == ["a"]
    assert await db.zrange(QUEUE, 0, -1) == [b"a"]
    assert [key async for key in db.scan_iter(b"*" + b"x" * 100 + b"*")] == []
    assert "an id of 100000 bytes" in caplog.text
    assert len(caplog.text) < 1000


class ClaimsMachine(RuleBasedStateMachine):
    """Any order of queueing, claiming, handing back, renewing and crashing, against a model in Python."""

    url: str
    JOBS = st.sampled_from("abcde")
    ATTEMPTS = st.integers(1, 4)

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = redis_from_settings(settings(self.url))
        self.claims = claims_of(self.redis, lease_s=60)
        self.db("FLUSHDB")
        self.queued_at: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.owner: dict[str, Claim] = {}  # of the running ones; one that is waiting too has lost its lease
        self.last: dict[str, Claim] = {}

    def teardown(self) -> None:
        self.runner.run(self.redis.aclose())
        self.runner.close()

    def db(self, *command: Any) -> Any:
        return self.runner.run(self.redis.execute_command(*command))

    @rule(job=JOBS)
    def queue(self, job: str) -> None:
        if job not in self.queued_at:
            self.queued_at[job] = len(self.queued_at) + 1
            self.runner.run(put(self.redis, job, BODY, at_ms=self.queued_at[job]))
            self.waiting.add(job)

    @rule(want=st.integers(0, 4))
    def take(self, want: int) -> None:
        in_line = [self._next(job) for job in sorted(self.waiting, key=self.queued_at.__getitem__)]
        suspects = sorted((claim for claim in in_line if claim.lease_expirations), key=lambda claim: claim.crashes)
        expected = [*suspects[:1], *(claim for claim in in_line if not claim.lease_expirations)][:want]
        assert self.runner.run(self.claims.take("interactive", want)) == expected
        self.waiting -= set(ids(expected))
        self.owner |= {claim.job_id: claim for claim in expected}
        self.last |= self.owner

    def _next(self, job: str) -> Claim:
        """Predict the next claim of a job: a crash makes it a suspect, and a suspect's crashes count."""
        if (last := self.last.get(job)) is None:
            return first_claim(job, at_ms=self.queued_at[job])
        crashed = job in self.owner
        return replace(
            last,
            attempt=last.attempt + 1,
            lease_expirations=last.lease_expirations + crashed,
            crashes=last.crashes + (crashed and last.lease_expirations > 0),
        )

    @rule(job=JOBS, attempt=ATTEMPTS)
    def hand_back(self, job: str, attempt: int) -> None:
        self.runner.run(self.claims.release(first_claim(job, attempt=attempt)))
        if self._owns(job, attempt):
            del self.owner[job]
            self.waiting.add(job)

    @rule(job=JOBS)
    def lease_runs_out(self, job: str) -> None:
        if self.db("EXISTS", lease_key(job)):
            self.runner.run(lapse(self.redis, job))
            self.waiting.add(job)

    @rule(job=JOBS, attempt=ATTEMPTS)
    def renew(self, job: str, attempt: int) -> None:
        lost = self.runner.run(renew(self.redis, first_claim(job, attempt=attempt)))
        assert lost is not self._owns(job, attempt)
        if not lost:
            self.waiting.discard(job)

    def _owns(self, job: str, attempt: int) -> bool:
        return job in self.owner and self.owner[job].attempt == attempt

    @invariant()
    def those_that_run_and_no_others_have_a_lease(self) -> None:
        assert set(self.db("KEYS", "arq:in-progress:*")) == {
            lease_key(job).encode() for job in set(self.owner) - self.waiting
        }


def test_claims_follow_the_model(redis_url: str) -> None:
    ClaimsMachine.url = redis_url
    run_state_machine_as_test(
        ClaimsMachine,
        settings=hypothesis_settings(
            max_examples=examples(40), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# A full server


async def test_a_full_server_lends_jobs_of_which_it_has_no_index(db: Redis, claims: Claims) -> None:
    for k in range(3):
        await put(db, f"job-{k}", BODY, at_ms=k + 1)
    await db.config_set("maxmemory", 1)
    try:
        taken = await claims.take("interactive", 2)
        for claim in taken:
            await claims.release(claim)
    finally:
        await db.config_set("maxmemory", 0)
    assert ids(taken) == ["job-0", "job-1"]
    assert await db.hget(keys.job("job-0"), "state") == b"queued"
    assert await db.exists(lease_key("job-0")) == 0
