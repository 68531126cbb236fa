"""A claim leaves a job to a worker that will be done with its prompt sooner, for no longer than that saves."""

import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.contract import keys
from sluice.contract.keys import Lane
from sluice.submission import marks_of
from tests.queue.helpers import QUEUE, envelope, field, lapse, put, settings, until
from worker.queue.job.claims import Claim, Claims, WorkerRows
from worker.queue.redis_server import redis_from_settings
from worker.queue.running import ControlListener

PROMPT = "word " * 8_000
MS_OF_A_BYTE = 220 / 1024 * 0.8  # to compute it, as `Said` tells


def body(text: str = PROMPT, **fields: Any) -> bytes:
    return envelope({**fields, "messages": [{"role": "user", "content": text}]})


class Said:
    """Tells of a worker what the test says, in place of `FleetRecord`."""

    def __init__(self, wid: str, *, rows: int = 4, token_us: int = 800) -> None:
        self.wid, self.rows, self.token_us = wid, rows, token_us
        self.per_kib = 220
        self.lefts = "0 0 0 0 0 0 0 0"
        self.held = list[tuple[str, str, int, int]]()
        self.counts = list[dict[str, Any]]()

    def said(self, free_rows: int) -> tuple[str, str, int]:
        return self.wid, f"2 1 {free_rows} {self.rows} 2000 {self.token_us} 0 {self.per_kib} {self.lefts}", 1

    def claimed(self, job_id: str, marks: str, bytes_: int, expected_tokens: int) -> None:
        self.held.append((job_id, marks, bytes_, expected_tokens))

    def counted(self, **counts: Any) -> None:
        self.counts.append(counts)


class Worker:
    """The claims of one worker, with its rows."""

    def __init__(self, redis: Redis, name: str, *, max_rows: int = 4, affinity: bool = True, **given: Any) -> None:
        self.said = Said(name, rows=max_rows)
        known = settings("redis://unused", worker_name=name, max_rows=max_rows, affinity=affinity, **given)
        self.claims, self.max_rows = Claims(redis, known, self.said), max_rows
        self.running = list[Claim]()

    async def take(self, free: int | None = None, lane: Lane = "interactive", **given: Any) -> list[str]:
        rows = self.max_rows - len(self.running) if free is None else free
        free_rows = WorkerRows(self.max_rows - rows, self.max_rows, {"interactive": rows, "batch": rows})
        claims = await self.claims.take(lane, rows, rows=free_rows, running=self.running, **given)
        self.running += claims
        return [claim.job_id for claim in claims]


Make = Callable[..., Worker]


@pytest.fixture
async def make(redis_url: str) -> AsyncIterator[Make]:
    async with redis_from_settings(settings(redis_url)) as redis:
        yield lambda name, **given: Worker(redis, name, **given)


@pytest.fixture
async def fleet(make: Make) -> dict[str, Worker]:
    """Two idle workers that know each other."""
    workers = {name: make(name) for name in ("ada", "bob")}
    for worker in workers.values():
        assert await worker.take() == []
    return workers


async def now_ms(db: Redis) -> int:
    seconds, micros = await db.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def ask(db: Redis, job_id: str, text: str = PROMPT, *, age_ms: int = 0, **fields: Any) -> None:
    await put(db, job_id, body(text), at_ms=await now_ms(db) - age_ms)
    if fields:
        await db.hset(keys.job(job_id), mapping=fields)


async def hold(db: Redis, worker: Worker, text: str = PROMPT) -> None:
    """Let a worker compute a prompt and end the job, so that it holds it."""
    await ask(db, "first", text)
    assert await worker.take() == ["first"]
    worker.running.clear()
    await db.zrem(QUEUE, "first")
    await db.delete("arq:job:first", "arq:in-progress:first", keys.job("first"))
    assert await worker.take() == []


def saved_ms(job: bytes) -> float:
    """What a worker saves that holds the body up to its last mark."""
    marks, _ = marks_of(job)
    return int(marks.split()[-1]) * MS_OF_A_BYTE


async def test_a_job_is_left_to_its_holder_for_what_that_saves_to_the_millisecond(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a", age_ms=int(saved_ms(body())) - 200)
    right_ms = float(await db.zscore(QUEUE, "a") or 0) + saved_ms(body())
    taken = list[str]()
    while not taken:
        before_s, before_ms = time.monotonic(), await now_ms(db)
        taken = await bob.take()
        after_ms, after_s = await now_ms(db), time.monotonic()
        assert taken or before_ms < right_ms
        if not taken:  # it asks for its next claim at that time
            next_ms = after_ms + (bob.claims.next_at("interactive") - after_s) * 1000
            asked_ms = max(right_ms, after_ms + 20)  # it asks no more often
            assert next_ms == pytest.approx(asked_ms, abs=2 + 2000 * (after_s - before_s))
    assert (taken, after_ms >= right_ms) == (["a"], True)
    assert bob.said.counts[0]["scanned"] == 0
    left = [counts for counts in bob.said.counts if counts["cache"]]
    assert len(left) == 1  # a job counts once, however often it is left
    assert bob.said.counts[-1]["overruled_s"] == [pytest.approx(saved_ms(body()) / 1000, abs=0.1)]
    assert bob.said.counts[-1]["left_s"] == [pytest.approx(0.2, abs=0.1)]


async def test_the_seconds_that_a_job_was_left_are_those_until_any_claim(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a")
    await ask(db, "b", left_at="soon")  # which no worker wrote
    assert await bob.take() == []
    await db.hset(keys.job("a"), "left_at", f"{await now_ms(db) / 1000 - 3:.3f}")
    assert sorted(await ada.take()) == ["a", "b"]
    assert ada.said.counts[-1]["left_s"] == [pytest.approx(3.0, abs=0.5)]
    await ada.claims.release(ada.running[0])
    ada.running.clear()
    await ada.take()
    assert ada.said.counts[-1]["left_s"] == []  # it was left before an earlier attempt


@pytest.mark.parametrize("unmeasured", ["ada", "bob"])
async def test_a_worker_that_has_computed_nothing_counts_as_fast_as_the_other(
    db: Redis, fleet: dict[str, Worker], unmeasured: str
) -> None:
    """Else a slow machine's holder would lose its chats to whoever has just started."""
    ada, bob = fleet["ada"], fleet["bob"]
    for worker in (ada, bob):
        worker.said.token_us = 5_000
    fleet[unmeasured].said.token_us = fleet[unmeasured].said.per_kib = 0
    await bob.take()
    await hold(db, ada)
    await ask(db, "a")
    assert await bob.take() == []
    assert await ada.take() == ["a"]


async def test_equal_workers_cost_equal_whatever_texts_they_have_measured(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada, "other " * 4000)
    ada.said.per_kib, bob.said.per_kib = 100, 300
    await ada.take()
    await bob.take()
    await ask(db, "held", "other " * 4000)  # so that jobs are chosen
    await ask(db, "a", age_ms=1)
    assert await bob.take() == ["a"]


async def test_a_holder_takes_its_job_at_once_also_if_it_has_more_rows_in_use(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "b")
    assert await bob.take() == []
    assert await ada.take(1) == ["b"]
    job_id, marks, size, expected = ada.said.held[-1]
    assert (job_id, (marks, size)) == ("b", marks_of(body()))
    assert expected == int(int(marks.split()[-1]) * 220 / 1024)


async def test_holders_that_are_dead_do_not_hide_one_that_took_the_prompt_later(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    names = marks_of(body())[0].split()[::2]
    dead = [f"{number:06}" for number in range(64)]
    for name in names:
        await db.set(f"sluice:px:default:{name}", f" {' '.join(dead)} ")
    await hold(db, ada)
    assert await db.get(f"sluice:px:default:{names[0]}") == f" ada {' '.join(dead[:-1])} ".encode()
    await ask(db, "a")
    assert await bob.take() == []
    for name in names:
        await db.set(f"sluice:px:default:{name}", f" {' '.join(dead[:9])} ada {dead[9]} ")
    assert await ada.take() == ["a"]
    assert await db.get(f"sluice:px:default:{names[0]}") == f" ada {' '.join(dead[:10])} ".encode()


@pytest.mark.parametrize("value", ["x" * 2_000_000, "ada", " ada" * 300 + " ", "ada bob "])
async def test_the_marks_of_another_program_count_for_nothing_and_are_replaced(
    db: Redis, fleet: dict[str, Worker], value: str
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    names = marks_of(body())[0].split()[::2]
    for name in names:
        await db.set(f"sluice:px:default:{name}", value)
    await ask(db, "a")
    assert await bob.take() == ["a"]
    assert [await db.get(f"sluice:px:default:{name}") for name in names] == [b" bob "] * len(names)
    await ask(db, "b")
    assert await ada.take() == []


async def test_a_dead_holders_job_is_taken_when_its_lease_is_over_or_its_time(db: Redis, make: Make) -> None:
    ada, bob = make("ada", lease_s=0.5), make("bob", lease_s=0.5)
    for worker in (ada, bob):
        await worker.take()
    await hold(db, ada)
    await ask(db, "a")
    assert await bob.take() == []
    await until(lambda: taken(bob, "a"), within_s=5)
    assert not await db.hexists("sluice:fleet:default", "ada")
    assert await db.zscore("sluice:ready:default", "ada") is None


async def taken(worker: Worker, job_id: str) -> bool:
    return await worker.take() == [job_id]


async def test_a_holder_that_is_full_for_longer_than_it_saves_is_left_nothing(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    text = "word " * 1000  # 0.9 s, and a row of the holder comes free every 2 s
    await hold(db, ada, text)
    await ada.take(0)
    await ask(db, "a", text)
    assert await bob.take() == ["a"]


async def test_a_holder_that_stops_is_left_nothing(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada, "word " * 1000)
    none = WorkerRows(0, 4, {"interactive": 0, "batch": 0})
    await ada.claims.take("interactive", 0, rows=none)
    await ask(db, "a", "word " * 1000)
    assert await bob.take() == ["a"]


async def test_two_workers_that_each_think_the_other_better_wait_for_the_earlier_time(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a", age_ms=int(saved_ms(body())) - 300)
    # Its holder has lost the prompt, as it knows, and another is said to hold it.
    names = marks_of(body())[0].split()[::2]
    for name in names:
        assert await db.get(f"sluice:px:default:{name}") == b" ada "
    assert await bob.take() == []
    for name in names:
        await db.set(f"sluice:px:default:{name}", " bob ")
    assert await ada.take() == []
    for name in names:
        await db.set(f"sluice:px:default:{name}", " ada ")
    await until(lambda: taken(bob, "a"), within_s=5)


@pytest.mark.parametrize("fields", [{"attempt": 1, "state": "queued"}, {"lapses": 1, "attempt": 1, "state": "queued"}])
async def test_a_job_that_was_claimed_before_is_left_to_nobody(
    db: Redis, fleet: dict[str, Worker], fields: dict[str, Any]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a", **fields)
    assert await bob.take() == ["a"]


async def test_a_job_whose_worker_died_is_left_to_nobody(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a")
    assert await ada.take() == ["a"]
    await lapse(db, "a")
    assert await bob.take() == ["a"]


async def test_a_released_job_is_left_to_nobody(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a")
    assert await ada.take() == ["a"]
    await ada.claims.release(ada.running[-1])
    assert await bob.take() == ["a"]


async def test_a_job_whose_deadline_has_passed_is_left_to_nobody(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "b")
    await ask(db, "a", deadline=1.5)
    assert await bob.take() == ["a"]
    await db.hset(keys.job("b"), "deadline", 1.5)  # the index does not know of it
    assert await bob.take() == ["b"]


async def test_a_job_is_left_for_no_more_than_a_tenth_of_the_time_to_its_deadline(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a", age_ms=1000, deadline=await now_ms(db) / 1000 + 12)
    assert await bob.take() == []
    assert 0 < bob.claims.next_at("interactive") - time.monotonic() < 0.4
    await ask(db, "b", age_ms=1000, deadline=await now_ms(db) / 1000 + 8)
    assert await bob.take() == ["b"]


async def test_a_job_of_the_batch_lane_is_left_to_nobody(db: Redis, fleet: dict[str, Worker]) -> None:
    """The records say how many rows are free for interactive jobs alone."""
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await put(db, "a", body(), lane="batch", at_ms=await now_ms(db))
    assert await bob.take(lane="batch") == ["a"]


async def test_jobs_of_the_batch_lane_are_ranked_by_cache_and_shared_by_rows(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    for k, text in enumerate((PROMPT, PROMPT, "other " * 4000, "others " * 4000)):
        await put(db, f"{k}", body(text), lane="batch", at_ms=await now_ms(db) - 10 + k)
    assert len(await bob.take(lane="batch")) == 2
    assert len(await ada.take(lane="batch")) == 2
    bob.running.clear()
    ada.running.clear()
    await put(db, "old", body("old " * 8000), lane="batch", at_ms=await now_ms(db) - 100)
    await put(db, "ours", body(), lane="batch", at_ms=await now_ms(db))
    assert await ada.take(1, lane="batch") == ["ours"]


async def test_a_job_of_a_held_prefix_overtakes(db: Redis, fleet: dict[str, Worker]) -> None:
    ada = fleet["ada"]
    await hold(db, ada)
    await ask(db, "old", "other " * 4000, age_ms=100)
    await ask(db, "ours")
    assert await ada.take(1) == ["ours"]
    assert await fleet["bob"].take() == ["old"]


async def test_a_tenant_with_fewer_rows_here_is_still_first(db: Redis, fleet: dict[str, Worker]) -> None:
    ada = fleet["ada"]
    await hold(db, ada)
    await ask(db, "theirs", "other " * 4000, tenant="small")
    for k in range(3):
        await ask(db, f"ours-{k}", tenant="big", age_ms=1000)
    ada.running = [Claim("r", "interactive", 1, 0, False, 1.0, 0, b"", 0, tenant="big")]
    assert await ada.take() == ["theirs", "ours-0", "ours-1"]


async def ask_marked(db: Redis, job_id: str, mark: str, **given: Any) -> None:
    """Queue a job of a huge prompt, which has one mark, at its end."""
    await ask(db, job_id, "", **{"marks": f"{mark} 1000000", "bytes": 1_000_000, **given})


@pytest.fixture
async def large(db: Redis, make: Make) -> dict[str, Worker]:
    """Two idle workers with hundreds of rows; ada holds what ends at the mark abc."""
    workers = {name: make(name, max_rows=512) for name in ("ada", "bob")}
    for worker in workers.values():
        await worker.take()
    await db.set("sluice:px:default:abc", " ada ")
    return workers


async def test_the_jobs_that_a_tenant_leaves_do_not_hide_its_others(db: Redis, large: dict[str, Worker]) -> None:
    bob = large["bob"]
    for k in range(40):
        await ask_marked(db, f"ada-{k:02}", "abc", tenant="one", age_ms=1000 - k, user=f"user-{k % 30}")
    await ask(db, "free", tenant="one")
    await ask(db, "old", tenant="two", age_ms=900)
    bob.running = [Claim("r", "interactive", 1, 0, False, 1.0, 0, b"", 0, tenant="two")]
    assert (await bob.take())[0] == "free"


async def test_a_claim_looks_at_no_more_than_256_jobs(db: Redis, large: dict[str, Worker]) -> None:
    ada, bob = large["ada"], large["bob"]
    for k in range(300):
        await ask_marked(db, f"job-{k:03}", "abc")
    assert await bob.take() == []
    assert bob.said.counts[-1]["scanned"] == 256
    assert len(await ada.take(512)) == 256
    assert len(await ada.take(256)) == 44


async def test_a_job_that_is_looked_at_costs_seven_commands_however_many_marks_it_has(
    db: Redis, large: dict[str, Worker]
) -> None:
    async def commands(jobs: int) -> int:
        for k in range(jobs):
            await ask_marked(db, f"{jobs}-{k}", "abc", marks=" ".join(f"{k:x}ab {(k + 1) * 34_000}" for k in range(29)))
            await db.set("sluice:px:default:1cab", " ada ")
        await large["bob"].take()  # which adds them to the index, and wakes ada
        await db.config_resetstat()
        assert await large["bob"].take() == []
        stats = await db.info("commandstats")
        return sum(each["calls"] for name, each in stats.items() if name != "cmdstat_config|resetstat")

    one, more = await commands(1), await commands(40)
    assert (more - one) / 40 <= 7


async def test_a_claim_computes_the_marks_of_four_jobs_at_most(db: Redis, make: Make) -> None:
    ada = make("ada", max_rows=8)
    for k in range(6):
        await ask(db, f"job-{k}", f"{k} " + PROMPT, age_ms=10 - k)
    assert len(await ada.take()) == 6
    marked = [await field(db, f"job-{k}", "marks") for k in range(6)]
    assert marked == [*(marks_of(body(f"{k} " + PROMPT))[0] for k in range(4)), None, None]
    assert 0 < await db.ttl(keys.job("job-0")) <= 86_400


async def test_a_flush_loses_no_job_and_the_hints_come_back(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await db.flushdb()
    await ask(db, "a")
    assert await bob.take() == ["a"]
    bob.running.clear()
    await ada.take()
    await ask(db, "b")
    assert await ada.take() == []
    assert await bob.take() == ["b"]


async def test_old_workers_and_new_ones_share_a_queue(db: Redis, make: Make) -> None:
    ada, bob, old = make("ada"), make("bob"), make("old", affinity=False)
    for worker in (ada, bob, old):
        await worker.take()
    await hold(db, ada)
    for k in range(3):
        await ask(db, f"job-{k}", age_ms=10 - k)
    assert await bob.take() == []
    assert await old.take() == ["job-0"]
    assert await ada.take() == ["job-1", "job-2"]
    assert not await db.hexists("sluice:fleet:default", "old")


@pytest.mark.parametrize("jobs", [8, 16])
async def test_a_burst_of_unknown_prompts_is_shared_as_before(db: Redis, make: Make, jobs: int) -> None:
    workers = [make(f"w{k}", max_rows=32) for k in range(4)]
    for worker in workers:
        await worker.take()
    for k in range(jobs):
        await ask(db, f"job-{k}", f"{k} {PROMPT}", age_ms=jobs - k)
    counts = [len(await worker.take()) for worker in workers]
    assert (sum(counts), max(counts) - min(counts)) == (jobs, 0)


@pytest.mark.parametrize("given", [{"affinity": False}, {"prefix_cache_gb": 0}], ids=lambda given: next(iter(given)))
async def test_without_affinity_or_a_cache_jobs_are_claimed_in_turn_and_nothing_is_said(
    db: Redis, make: Make, given: dict[str, Any]
) -> None:
    ada, bob = (make(name, **given) for name in ("ada", "bob"))
    for worker in (ada, bob):
        await worker.take()
    await ask(db, "a")
    assert await ada.take() == ["a"]
    await ask(db, "b")
    assert await bob.take() == ["b"]
    assert await db.exists("sluice:fleet:default", "sluice:ready:default") == 0
    assert await db.keys("sluice:px:*") == []
    assert await field(db, "b", "marks") is None


async def test_with_a_cache_per_tenant_a_job_whose_tenant_is_in_its_body_alone_has_no_marks(
    db: Redis, make: Make
) -> None:
    ada = make("ada", prefix_cache_per_tenant=True)
    await ada.take()
    await ask(db, "a")
    await db.hdel(keys.job("a"), "marks")
    assert await ada.take() == ["a"]
    assert ada.said.held[-1] == ("a", "", 0, 0)
    assert await db.keys("sluice:px:*") == []


async def test_a_jobs_hash_expires_also_if_leaving_the_job_has_created_it(db: Redis, fleet: dict[str, Worker]) -> None:
    bob = fleet["bob"]
    bob.said.lefts = "2000 2 0 0 0 0 0 0"
    await db.set("sluice:px:default:abc", " ada ")
    await ask_marked(db, "marked", "abc")
    await ask(db, "a")
    await db.set("arq:job:a", b"x" * 1_048_577)  # its marks are not computed
    assert await bob.take() == []
    assert await db.hget(keys.job("a"), "left_at")
    assert 0 < await db.ttl(keys.job("a")) <= 86_400


async def test_a_job_whose_score_is_infinite_is_taken_and_counted(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    await ask(db, "a")
    await db.zadd(QUEUE, {"a": float("-inf")})
    assert await bob.take() == ["a"]
    assert bob.said.counts[-1]["overruled_s"] == [1e9]


async def test_with_a_cache_per_tenant_a_mark_belongs_to_a_tenant(db: Redis, make: Make) -> None:
    ada, bob = (make(name, prefix_cache_per_tenant=True) for name in ("ada", "bob"))
    for worker in (ada, bob):
        await worker.take()
    await ask(db, "a", tenant="acme")
    assert await ada.take() == ["a"]
    ada.running.clear()
    assert all(key.startswith(b"sluice:px:default:acme:") for key in await db.keys("sluice:px:*"))
    await ask(db, "b", tenant="other")
    assert await bob.take() == ["b"]
    await ask(db, "c", tenant="acme")
    assert await bob.take() == []


@pytest.mark.parametrize("key", ["sluice:fleet:default", "sluice:ready:default"])
async def test_foreign_values_of_the_hints_are_replaced(db: Redis, fleet: dict[str, Worker], key: str) -> None:
    await db.delete(key)
    await db.set(key, "foreign")
    await ask(db, "a")
    assert await fleet["ada"].take() == ["a"]
    assert await db.type(key) != b"string"


@pytest.mark.parametrize(
    ("marks", "size"),
    [("zz", "1"), ("ab 9999999999999999999999", "5"), ("ab 5 " * 5000, "9" * 400), ("ab -1 cd 3 ef 2", "x"), ("", "")],
)
async def test_marks_that_another_program_wrote_harm_nothing(
    db: Redis, fleet: dict[str, Worker], marks: str, size: str
) -> None:
    await ask(db, "a", marks=marks, bytes=size)
    assert await fleet["ada"].take() == ["a"]


async def test_a_submit_wakes_the_holder_alone(db: Redis, redis_url: str, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    async with Client(redis_url) as client, db.pubsub() as heard:
        await heard.subscribe(keys.wake("default"))
        await heard.get_message(timeout=1)
        request = {"messages": [{"role": "user", "content": PROMPT}]}

        async def woken(lane: Lane = "interactive") -> bytes:
            while await heard.get_message(timeout=0.02):  # of claims
                pass
            await client.submit(request, model="default", lane=lane)
            message = await heard.get_message(timeout=5)
            assert message
            return bytes(message["data"])

        assert await woken() == b""
        assert len(await bob.take()) == 1
        assert await woken() == b"bob"
        assert await ada.take() == []
        assert len(await bob.take()) == 1
        await bob.take(0)
        assert await woken() == b"ada"  # the holder has no row
        assert await woken(lane="batch") == b""
        await ada.take(0)
        assert await woken() == b""


async def test_a_job_that_is_left_wakes_the_better_worker_once(db: Redis, fleet: dict[str, Worker]) -> None:
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    async with db.pubsub() as heard:
        await heard.subscribe(keys.wake("default"))
        await heard.get_message(timeout=1)
        await ask(db, "a")
        for _ in range(3):
            assert await bob.take() == []
        message = await heard.get_message(timeout=5)
        assert message
        assert message["data"] == b"ada"
        assert await heard.get_message(timeout=0.05) is None


async def test_a_claim_that_fills_a_worker_wakes_another_with_a_row_if_jobs_wait(
    db: Redis, fleet: dict[str, Worker]
) -> None:
    """Submits have woken the full one alone for each of them."""
    ada, bob = fleet["ada"], fleet["bob"]
    await hold(db, ada)
    async with db.pubsub() as heard:
        await heard.subscribe(keys.wake("default"))
        await heard.get_message(timeout=1)

        async def woken(by: Worker, taken: Sequence[str], **given: Any) -> list[bytes]:
            assert await by.take(**given) == taken
            found = list[bytes]()
            while message := await heard.get_message(timeout=0.1):
                found.append(message["data"])
            return found

        for k in range(4):
            await ask(db, f"{k}", age_ms=9 - k)
        assert await woken(ada, ["0"], free=1) == [b"bob"]
        assert await woken(ada, [], free=0) == []  # it has taken nothing
        ada.running.clear()
        await bob.take(0)
        assert await woken(ada, ["1"], free=1) == []  # the other has no row
        await bob.claims.take("interactive", 0, rows=WorkerRows(0, 4, {"interactive": 4, "batch": 4}))
        assert await woken(ada, ["2", "3"], free=2) == []  # no job waits


@pytest.mark.parametrize(("wid", "expected"), [("ada", ["", "ada"]), ("", ["", "ada", "bob"])])
async def test_a_worker_wakes_by_its_own_name_or_by_any_if_it_has_none(
    db: Redis, wid: str, expected: Sequence[str]
) -> None:
    heard = list[str]()
    listener = ControlListener(
        db, "default", keyspace_events=False, wake=lambda: heard.append(name), cancel=heard.append,
        on_reconnect=nothing, wid=lambda: wid,
    )  # fmt: skip
    for name in ("", "ada", "bob"):
        await listener._handle("message", keys.wake("default").encode(), name.encode())
    assert heard == expected


async def nothing() -> None: ...


@pytest.mark.parametrize("seed", range(6))
async def test_every_job_is_claimed_by_one_worker_in_the_end(db: Redis, make: Make, seed: int) -> None:
    """Whatever is held, handed back, lapsed and forgotten, and whatever an old worker takes meanwhile."""
    rng = random.Random(seed)
    workers = [make(name, max_rows=3) for name in ("ada", "bob", "eve")] + [make("old", affinity=False, max_rows=3)]
    texts = [f"{k} " + "word " * 1000 for k in range(4)]
    asked, ended, owners = 0, set[str](), dict[str, Worker]()

    async def take(worker: Worker, free: int | None = None) -> None:
        for job_id in await worker.take(free):
            assert job_id not in ended
            assert job_id not in owners
            owners[job_id] = worker

    async def stop(worker: Worker, *, lapses: bool) -> None:
        claim = worker.running.pop(rng.randrange(len(worker.running)))
        owner = owners.pop(claim.job_id)
        assert owner is worker
        if lapses:
            await lapse(db, claim.job_id)
        elif rng.random() < 0.3:
            await worker.claims.release(claim)
        else:
            ended.add(claim.job_id)
            await db.hset(keys.job(claim.job_id), "state", "finished")
            await db.delete(f"arq:job:{claim.job_id}", f"arq:in-progress:{claim.job_id}")
            await db.zrem(QUEUE, claim.job_id)

    for _ in range(250):
        worker, dice = rng.choice(workers), rng.random()
        if dice < 0.35 and asked < 60:
            given = {"tenant": rng.choice("ab")} if rng.random() < 0.5 else {}
            await ask(db, f"job-{asked}", rng.choice(texts), age_ms=rng.choice([0, 0, 1000]), **given)
            asked += 1
        elif dice < 0.7:
            await take(worker)
        elif dice < 0.95 and worker.running:
            await stop(worker, lapses=rng.random() < 0.1)
        elif dice > 0.98:
            names = await db.keys("sluice:px:*") + [b"sluice:fleet:default", b"sluice:ready:default"]
            await db.delete(*rng.sample(names, rng.randint(1, len(names))))
    began = time.monotonic()
    while len(ended) < asked:
        for worker in workers:
            while worker.running:
                await stop(worker, lapses=False)
            await take(worker)
        assert time.monotonic() - began < 20, set(map("job-{}".format, range(asked))) - ended
    assert await db.zcard(QUEUE) == 0
