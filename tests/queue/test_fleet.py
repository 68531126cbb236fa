"""The record by which the claims of other workers leave jobs to this one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys
from tests.fakes import Clock, FakeChat
from tests.queue.helpers import ask, envelope, put, settings, working
from tests.waiting import until
from worker.monitoring.metrics import Metrics
from worker.queue import fleet
from worker.queue.fleet import FleetRecord, JobPrompt
from worker.queue.job.job import JobResult
from worker.queue.redis_server import ServerClock

FLEET, READY = keys.fleet("default"), keys.ready("default")
MARKS = "0123456789ab 1024 ba9876543210 4096"


@dataclass
class Prompts:
    """Costs and losses of an engine."""

    cost: tuple[float, float] = (0.001, 0.0)
    lost: list[str] = field(default_factory=list)
    is_empty: bool = False

    def prompt_cost(self) -> tuple[float, float]:
        return self.cost

    def take_lost(self) -> tuple[list[str], bool]:
        found, self.lost = (self.lost, self.is_empty), []
        self.is_empty = False
        return found

    def marks(self) -> int:
        return 7


def record(db: Redis, engine: Prompts | None = None, metrics: Metrics | None = None, **given: Any) -> FleetRecord:
    worker = settings(
        "", max_rows=4, **{key: given.pop(key) for key in [*given] if key.startswith(("prefix", "affinity"))}
    )
    return FleetRecord(db, worker, ServerClock(), metrics or Metrics("default"), engine or Prompts(), **given)


def numbers(said: tuple[str, str, int]) -> list[float]:
    return [float(word) for word in said[1].split(" ")]


async def has_ended(db: Redis, job_id: str) -> bool:
    return bool(await db.zscore(keys.queue("default", "interactive"), job_id) is None)


async def until_dead(db: Redis, wid: str) -> None:
    """Let the record of a worker be older than its lease."""
    await db.zadd(READY, {wid: await db.zscore(READY, wid) - 20_000})


async def test_prompts_are_counted_by_the_time_that_is_left_of_them(db: Redis) -> None:
    its = record(db)  # a millisecond a token; and four bytes a token, until a prompt was read
    for job_id, kib, expected in [("a", 0.5, 0), ("b", 2, 0), ("c", 4, 256), ("d", 8, 0), ("e", 40, 2_000)]:
        its.claimed(job_id, "", int(kib * 1024), expected)
    until, at, free, rows, gap, token, before, per_kib, *lefts = numbers(said := its.said(3))
    assert (until - at, free, rows, gap, token, before, per_kib) == (10_000, 3, 4, 1_000, 1_000, 0, 0)
    assert lefts == [128, 1, 512 + 768, 2, 2_048, 1, 8_240, 1]
    assert said[2] == at + sum(lefts[::2]) + 150 * 1


async def test_a_token_costs_more_the_more_come_before_it(db: Redis) -> None:
    its = record(db, Prompts((1e-5, 1e-6)))
    its.claimed("a", "", 4096, 512)
    _, _, _, _, _, token, before, _, *lefts = numbers(its.said(4))
    assert (token, before) == (10, 1_000)
    assert lefts[:4] == [0, 0, round(512 * 0.01 + (1024**2 - 512**2) / 2 * 1e-3), 1]


async def test_a_worker_that_has_computed_no_prompt_says_so_and_guesses(db: Redis) -> None:
    its = record(db, Prompts((0.0, 0.0)))
    its.claimed("a", "", 4096, 512)
    _, _, _, _, _, token, _, per_kib, *lefts = numbers(its.said(4))
    assert (token, per_kib, lefts[2:4]) == (0, 0, [256, 1])  # half a millisecond a token


async def test_progress_of_the_prefill_replaces_what_the_claim_expected(db: Redis) -> None:
    its = record(db)
    its.claimed("a", "", 4096, 1_000)
    prompt = its.prompt("a")
    prompt.tokenized(2_000, is_text=True)
    assert numbers(its.said(4))[8:] == [0, 0, 0, 0, 1_000, 1, 0, 0]
    prompt.advanced(200, 200)
    assert numbers(its.said(4))[8:] == [0, 0, 0, 0, 1_800, 1, 0, 0]
    prompt.advanced(1_900, 200)
    assert numbers(its.said(4))[8:] == [100, 1, 0, 0, 0, 0, 0, 0]
    prompt.computed()
    prompt.advanced(0, 0)  # the row is computed again after a failure
    assert numbers(its.said(4))[8:] == [0] * 8


async def test_a_job_that_has_ended_or_is_not_begun_is_no_work(db: Redis) -> None:
    its = record(db)
    its.claimed("a", MARKS, 40_960, 0)
    its.claimed("b", MARKS, 40_960, 0)
    its.ended("a", had_row=True)
    its.ended("b", had_row=False)
    its.ended("unknown", had_row=True)
    assert numbers(its.said(4))[8:] == [0] * 8


async def test_tokens_of_a_text_are_measured_and_images_are_not(db: Redis) -> None:
    its = record(db)
    for number in range(60):
        its.claimed(f"{number}", "", 8_192, 0)
        its.prompt(f"{number}").tokenized(8_192, is_text=number % 2 == 0)
        its.ended(f"{number}", had_row=True)
    assert numbers(its.said(4))[7] > 990


async def test_the_gap_between_free_rows_is_measured(db: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(fleet, "time", clock)
    its = record(db)
    for _ in range(60):
        clock.now += 4.0
        its.ended("a", had_row=True)
    assert 3_990 <= numbers(its.said(0))[4] <= 4_000
    clock.now += 86_400.0
    its.ended("a", had_row=True)
    assert numbers(its.said(0))[4] <= 7_000


async def test_a_full_worker_is_ready_when_a_row_comes_free(db: Redis) -> None:
    its = record(db)
    assert [said[2] - numbers(said)[1] for said in (its.said(4), its.said(1), its.said(0))] == [0, 450, 1_600]


async def test_marks_end_where_their_share_of_the_tokens_does(db: Redis) -> None:
    its = record(db)
    its.claimed("a", f"{MARKS} zz 5 0123456789ac 9999", 4096, 0)
    prompt = its.prompt("a")
    prompt.tokenized(1_000, is_text=True)
    assert prompt.token_marks() == (("0123456789ab", 250), ("ba9876543210", 999))
    prompt.tokenized(1, is_text=True)
    assert prompt.token_marks() == ()


async def test_marks_have_the_name_of_the_tenant_if_prefixes_are_its_own(db: Redis) -> None:
    its = record(db, prefix_cache_per_tenant=True)
    its.claimed("a", MARKS, 4096, 0)
    prompt = its.prompt("a", "acme")
    prompt.tokenized(1_000, is_text=True)
    assert prompt.token_marks() == (("acme:0123456789ab", 250), ("acme:ba9876543210", 999))


async def test_what_a_producer_writes_as_marks_is_bounded(db: Redis) -> None:
    its = record(db)
    its.claimed("a", MARKS * 10_000, 1 << 40, 0)
    assert len(its.prompt("a").marks) <= 31
    for number in range(1_000):
        its.claimed(f"{number}", MARKS, 4096, 0)
    assert numbers(its.said(4))[11] <= 72  # twice its rows, and some


async def test_the_record_is_published_for_a_lease(db: Redis) -> None:
    its = record(db)
    wid, text, _ = its.said(2)
    await its.publish()
    assert (await db.hgetall(FLEET)).keys() == {wid.encode()}
    published = (await db.hget(FLEET, wid)).decode().split(" ")
    assert published[2:] == text.split(" ")[2:]
    assert await db.zscore(READY, wid) >= int(published[1])
    assert 9_000 < await db.pttl(FLEET) <= 10_000
    assert 9_000 < await db.pttl(READY) <= 10_000


async def test_the_record_of_a_dead_worker_is_deleted_by_another(db: Redis) -> None:
    dead, alive = record(db), record(db)
    await dead.publish()
    await alive.publish()
    await until_dead(db, dead.said(4)[0])
    await alive.publish()
    assert await db.hkeys(FLEET) == await db.zrange(READY, 0, -1) == [alive.said(4)[0].encode()]


async def test_values_of_other_programs_are_replaced(db: Redis) -> None:
    await db.set(FLEET, "x")
    await db.rpush(READY, "x")
    await record(db).publish()
    assert (await db.hlen(FLEET), await db.zcard(READY)) == (1, 1)


async def test_a_worker_that_leaves_deletes_its_record(db: Redis) -> None:
    its, other = record(db), record(db)
    await its.publish()
    await other.publish()
    await its.remove()
    assert await db.hkeys(FLEET) == await db.zrange(READY, 0, -1) == [other.said(4)[0].encode()]


async def test_a_worker_that_stops_has_no_row_for_others_to_leave_jobs_to(db: Redis) -> None:
    stopping = asyncio.Event()
    its = record(db, stopping=stopping)
    its.said(4)
    stopping.set()
    await its.publish()
    (text,) = await db.hvals(FLEET)
    assert text.split(b" ")[2] == b"0"


async def test_a_process_that_starts_again_has_a_new_id(db: Redis) -> None:
    assert record(db).said(4)[0] != record(db).said(4)[0]


@pytest.mark.parametrize("given", [{"affinity": False}, {"prefix_cache_gb": 0}], ids=lambda given: next(iter(given)))
async def test_without_affinity_or_a_cache_nothing_is_published(db: Redis, given: dict[str, Any]) -> None:
    its = record(db, **given)
    assert its.said(4) == ("", "", 0)
    await its.publish()
    await its.remove()
    assert await db.exists(FLEET, READY) == 0


async def test_marks_whose_tokens_are_lost_are_forgotten_and_no_others(db: Redis) -> None:
    engine = Prompts()
    its = record(db, engine)
    wid = its.said(4)[0]
    for mark, held in [("a", f" {wid} "), ("b", f" other1 {wid} other2 "), ("c", " other1 "), ("d", f" {wid} ")]:
        await db.set(keys.prefix_mark("default", mark), held, ex=1_000)
    await db.rpush(keys.prefix_mark("default", "list"), "x")
    engine.lost = ["a", "b", "c", "list", "missing"]
    await its.publish()
    held = await db.mget([keys.prefix_mark("default", mark) for mark in "abcd"])
    assert held == [None, b" other1 other2 ", b" other1 ", f" {wid} ".encode()]
    assert 990 < await db.ttl(keys.prefix_mark("default", "b")) <= 1_000


async def test_a_call_forgets_at_most_2000_marks_and_the_next_call_the_others(db: Redis) -> None:
    engine = Prompts(lost=[f"{number}" for number in range(2_100)])
    its = record(db, engine)
    names = [keys.prefix_mark("default", mark) for mark in engine.lost]
    await db.mset(dict.fromkeys(names, f" {its._wid} "))
    await its.publish()
    assert await db.exists(*names) == 100
    await its.publish()
    assert await db.exists(*names) == 0


@pytest.mark.parametrize("tenant", ["", "acme:"])
async def test_a_mark_that_is_computed_again_is_not_forgotten(db: Redis, tenant: str) -> None:
    engine = Prompts(lost=[f"{tenant}0123456789ab", f"{tenant}other"])
    its = record(db, engine, prefix_cache_per_tenant=bool(tenant))
    names = [keys.prefix_mark("default", mark) for mark in engine.lost]
    its.said(4)
    its.claimed("a", MARKS, 4096, 0)
    its.prompt("a", "acme")
    await db.mset(dict.fromkeys(names, f" {its.wid} "))
    await its.publish()
    assert await db.mget(names) == [f" {its.wid} ".encode(), None]


async def test_marks_to_forget_are_bounded_and_the_oldest_expire_by_themselves(db: Redis) -> None:
    engine = Prompts(lost=[f"{number}" for number in range(30_000)])
    its = record(db, engine)
    its.said(4)
    assert [*its._forgotten] == [f"{number}" for number in range(10_000, 30_000)]


async def test_a_full_server_forgets_marks_and_refuses_the_record(db: Redis) -> None:
    engine = Prompts(lost=["shared", "own"])
    its, names = record(db, engine), [keys.prefix_mark("default", mark) for mark in ("own", "shared")]
    await db.mset({names[0]: f" {its.wid} ", names[1]: f" {its.wid} other1 "})
    await db.config_set("maxmemory", 1)
    try:
        await its.publish()
        assert await db.mget(names) == [None, f" {its.wid} other1 ".encode()]  # as a set key takes memory
        await db.delete(FLEET, READY)
        await its.publish()  # nothing is to be forgotten
        assert await db.exists(FLEET, READY) == 0
    finally:
        await db.config_set("maxmemory", 0)
    await its.publish()
    assert await db.exists(FLEET, READY) == 2


async def test_in_an_outage_marks_to_forget_are_kept() -> None:
    engine = Prompts(lost=["a"])
    nobody = Redis(port=1)
    its = record(nobody, engine)
    with pytest.raises(RedisError):
        await its.publish()
    assert list(its._forgotten) == ["a"]
    await nobody.aclose()


async def test_a_worker_whose_cache_is_empty_has_a_new_id_and_no_old_record(db: Redis) -> None:
    engine = Prompts()
    its = record(db, engine)
    await its.publish()
    before, *claimed = its.said(4)
    engine.lost, engine.is_empty = ["a"], True
    assert its.said(4)[0] == its.wid == before  # whose record is still published
    await its.publish()
    assert its.said(4)[0] == its.wid != before
    assert await db.hkeys(FLEET) == await db.zrange(READY, 0, -1) == [its.wid.encode()]
    await db.hset(FLEET, before, claimed[0])  # by a claim that was under way
    await db.zadd(READY, {before: claimed[1]})
    await its.publish()
    assert await db.hkeys(FLEET) == await db.zrange(READY, 0, -1) == [its.wid.encode()]
    assert its._gone == {}


async def test_a_worker_is_woken_by_its_present_id(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, lease_s=100, poll_s=5.0, keyspace_events=False), chat.chat) as worker:
        await ask(db, "a", {})
        await until(lambda: len(chat.began) == 1 and not worker.jobs)
        before, worker._fleet._engine = worker._fleet.wid, Prompts(is_empty=True)
        await worker._fleet.publish()
        assert worker._fleet.wid != before
        await asyncio.sleep(0.2)  # it has claimed after the end of the job
        await put(db, "b", envelope({}))
        await db.publish(keys.wake("default"), worker._fleet.wid)
        await until(lambda: len(chat.began) == 2, within_s=4.0)


async def test_claims_and_hints_are_counted(db: Redis) -> None:
    metrics = Metrics("default")
    metrics.measured()
    its = record(db, metrics=metrics)
    its.counted(cache=2, load=1, overruled_s=[7.0, 9.0], left_s=[0.5, 1.5], scanned=16, seconds=0.002)
    its.counted()  # nobody waits
    for job_id, expected, cached in [("a", 300, 200), ("b", 100, 600), ("c", 0, 50)]:
        its.claimed(job_id, MARKS, 4096, expected)
        prompt = its.prompt(job_id)
        prompt.tokenized(700, is_text=True)
        prompt.advanced(700, cached)
        prompt.computed()
        its.ended(job_id, had_row=True)
    its.said(0)

    def read(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "default", **labels})

    assert (read("sluice:claims_left_total", why="cache"), read("sluice:claims_left_total", why="load")) == (2, 1)
    assert (read("sluice:claims_overruled_total"), read("sluice:left_seconds_sum")) == (2, 2.0)
    assert (read("sluice:claim_scanned_jobs_sum"), read("sluice:claim_seconds_sum")) == (16, 0.002)
    assert (read("sluice:claim_scanned_jobs_count"), read("sluice:claim_seconds_count")) == (1, 2)
    assert (read("sluice:prefix_hint_tokens_total"), read("sluice:prefix_marks")) == (400, 7)
    assert read("sluice:ready_ms") == 600 + round(its._rates.gap_s * 1_000)
    assert metrics.measured()["prefix_hint_rate"] == 0.75


@pytest.mark.timing
async def test_a_running_worker_publishes_its_record_until_it_has_drained(redis_url: str, db: Redis) -> None:
    chat = FakeChat()

    async def free() -> list[bytes]:
        return [text.split(b" ")[2] for text in await db.hvals(FLEET)]

    async def has(rows: bytes) -> bool:
        return await free() == [rows]

    async with working(settings(redis_url, lease_s=1, grace_s=30, max_rows=4), chat.chat) as worker:
        await until(lambda: has(b"4"))
        await ask(db, "a", {"then": "hang"})
        await until(lambda: len(chat.began) == 1)
        worker.stop()
        await until(lambda: has(b"0"), within_s=0.3)  # at once, not at the next turn
    assert await db.exists(FLEET, READY) == 0


async def test_the_prompts_of_running_jobs_are_those_of_the_record(redis_url: str, db: Redis) -> None:
    seen: list[JobPrompt] = []

    async def chat(ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        seen.append(ctx["job"].prompt)
        ctx["job"].prompt.tokenized(1_000, is_text=True)
        return await FakeChat().chat(ctx, request)

    async with working(settings(redis_url), chat) as worker:
        await ask(db, "a", {"then": "hang"})
        await until(lambda: len(seen) == 1)
        assert worker._fleet._prompts == {"a": seen[0]}
        assert numbers(worker._fleet.said(4))[10:12] == [500, 1]  # of what its engine is thought to take
        await db.set(keys.cancel("a"), "1")
        await db.publish(keys.CONTROL, "a")
        await until(lambda: worker._fleet._prompts == {})


async def test_jobs_that_expire_together_are_no_work_and_free_no_row(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=4), chat.chat) as worker:
        await ask(db, "a", {"then": "hang"})
        await until(lambda: len(chat.began) == 1)
        late = [f"late-{number}" for number in range(100)]
        async with db.pipeline() as pipe:
            for job_id in late:
                pipe.hset(keys.job(job_id), mapping={"state": "queued", "deadline": "1.5"})
            pipe.zadd(keys.queue("default", "interactive"), dict.fromkeys(late, 1))
            await pipe.execute()
        await db.publish(keys.wake("default"), "")
        await until(lambda: has_ended(db, late[-1]))
        await until(lambda: len(worker.jobs) == 1)
        assert worker._fleet._prompts.keys() == {"a"}
        assert worker._fleet._rates.gap_s == 1.0
        await db.set(keys.cancel("a"), "1")
        await db.publish(keys.CONTROL, "a")
        await until(lambda: not worker.jobs)
        assert worker._fleet._rates.gap_s != 1.0
