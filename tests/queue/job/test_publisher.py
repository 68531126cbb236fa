import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from sluice.contract import keys
from tests.client.streaming import subscribed
from tests.keyspace import check_all_ended, check_job_keys
from tests.line import Line
from tests.queue.helpers import envelope, field, lapse, put, renew, settings
from tests.selection import examples
from tests.support.stack import Server
from worker.errors import OwnershipLost
from worker.queue.job.claims import Claim, Claims, lease_key
from worker.queue.job.publisher import JobLog, Publisher
from worker.queue.redis_server import ServerClock, redis_from_settings
from worker.queue.scripts import worker_source

BODY = envelope({"n": 1})
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
LIFE_MS = 86_400_000
_LAST = b"nothing follows"


class Desk:
    """A publisher at work, and the claims of the jobs it writes for."""

    def __init__(self, redis: Redis, name: str) -> None:
        given = settings("redis://unused", worker_name=name, log_ttl_s=60, result_ttl_s=90)
        self.redis, self.claims = redis, Claims(redis, given)
        self.publisher = Publisher(redis, ServerClock(), given)
        self.lost: list[Claim] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.publisher.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def take(self, job_id: str) -> JobLog:
        """Claim the job, and take up its log."""
        (claim,) = await self.claims.take("interactive", 1)
        assert claim.job_id == job_id
        log = self.publisher.open(claim, on_lost=lambda: self.lost.append(claim))
        if claim.events:
            log.load(await self.redis.lrange(keys.log(job_id), 0, -1))
        return log

    async def queue(self, job_id: str) -> JobLog:
        await put(self.redis, job_id, BODY)
        return await self.take(job_id)

    async def tell(self, log: JobLog, *words: str) -> None:
        for word in words:
            log.emit("delta", token_ids=[], content=word)
        await self.publisher.until_written(log)


@asynccontextmanager
async def desk(url: str, name: str = "ada") -> AsyncIterator[Desk]:
    async with redis_from_settings(settings(url)) as redis, Desk(redis, name) as one:
        yield one


@pytest.fixture
async def ada(redis_url: str) -> AsyncIterator[Desk]:
    async with desk(redis_url) as one:
        yield one


async def contents(db: Redis, job_id: str = "a") -> list[str]:
    """Return the events of the list, after a check of their numbers."""
    said = [json.loads(raw) for raw in await db.lrange(keys.log(job_id), 0, -1)]
    assert [event["seq"] for event in said] == list(range(len(said)))
    return [event.get("content", event["type"]) for event in said]


@asynccontextmanager
async def overheard(db: Redis, job_id: str = "a") -> AsyncIterator[list[dict[str, Any]]]:
    """Everything that the channel carries."""
    heard: list[dict[str, Any]] = []
    async with db.pubsub(ignore_subscribe_messages=True) as pubsub, asyncio.timeout(60):
        await pubsub.subscribe(keys.channel(job_id))
        await subscribed(db, keys.channel(job_id))
        yield heard
        await db.publish(keys.channel(job_id), _LAST)
        while (message := await pubsub.get_message(timeout=60)) is None or message["data"] != _LAST:
            if message is not None:
                heard.append(json.loads(message["data"]))


async def test_an_event_is_the_same_in_the_list_and_on_the_channel(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    async with overheard(db) as heard:
        await ada.tell(log, "one", "two")
    events = [json.loads(raw) for raw in await db.lrange(keys.log("a"), 0, -1)]
    assert heard == events
    assert [event.pop("ts") for event in events] == pytest.approx([time.time()] * 2, abs=5)
    assert events == [
        {"id": "a", "seq": 0, "attempt": 1, "type": "delta", "token_ids": [], "content": "one"},
        {"id": "a", "seq": 1, "attempt": 1, "type": "delta", "token_ids": [], "content": "two"},
    ]


async def test_any_text_at_all_comes_out_as_it_went_in(db: Redis, ada: Desk) -> None:
    words = ["né 🙂 日本語", 'quote " and \\', "line\nend\r\t", "\x00\x01", "\u2028", "a\ud800b", ""]
    await ada.tell(await ada.queue("a"), *words)
    assert await contents(db) == words


async def test_the_log_of_a_running_job_lives_for_a_day(db: Redis, ada: Desk) -> None:
    await ada.tell(await ada.queue("a"), "one")
    assert LIFE_MS - 60_000 < await db.pttl(keys.log("a")) <= LIFE_MS


async def test_fields_for_the_job_s_hash_are_written_with_the_events(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    log.store({"seed": 7, "fingerprint": "fp"})
    await ada.tell(log, "one")
    assert [await field(db, "a", name) for name in ("seed", "fingerprint")] == ["7", "fp"]


async def test_many_jobs_share_a_call_and_each_has_its_own(db: Redis, ada: Desk) -> None:
    logs = [await ada.queue(f"job-{k}") for k in range(20)]
    for step in range(10):
        for k, log in enumerate(logs):
            log.emit("delta", token_ids=[], content=f"{k}/{step}")
        await asyncio.sleep(0)
    await asyncio.gather(*map(ada.publisher.until_written, logs))
    for k in range(20):
        assert await contents(db, f"job-{k}") == [f"{k}/{step}" for step in range(10)]


async def test_the_first_events_of_a_stream_are_published_before_those_of_streams_that_have_begun(
    db: Redis, ada: Desk
) -> None:
    old, young = await ada.queue("old"), await ada.queue("young")
    await ada.tell(old, "one", "two")
    async with db.pubsub() as pubsub:
        await pubsub.subscribe(keys.channel("old"), keys.channel("young"))
        old.emit("delta", token_ids=[], content="three")
        young.emit("delta", token_ids=[], content="one")
        await asyncio.gather(*map(ada.publisher.until_written, (old, young)))
        heard = [message async for message in messages(pubsub, 2)]
    assert [json.loads(data)["id"] for data in heard] == ["young", "old"]


async def messages(pubsub: PubSub, number: int) -> AsyncIterator[bytes]:
    """Yield the data of this many messages."""
    async with asyncio.timeout(60):
        while number:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1)
            if message is not None:
                number -= 1
                yield message["data"]


async def test_one_fenced_row_does_not_hold_up_the_others(db: Redis, ada: Desk) -> None:
    logs = [await ada.queue(f"job-{k}") for k in range(3)]
    await db.hset(keys.job("job-1"), "attempt", 99)
    for log in logs:
        log.emit("delta", token_ids=[], content="one")
    await asyncio.gather(ada.publisher.until_written(logs[0]), ada.publisher.until_written(logs[2]))
    assert [await contents(db, f"job-{k}") for k in range(3)] == [["one"], [], ["one"]]
    assert [claim.job_id for claim in ada.lost] == ["job-1"]


# The fence


async def test_an_old_attempt_writes_nothing_more(redis_url: str, db: Redis, ada: Desk) -> None:
    async with desk(redis_url, "ben") as ben:
        old = await ada.queue("a")
        await ada.tell(old, "old")
        await lapse(db, "a")
        new = await ben.take("a")
        await ben.tell(new, "new")
        with pytest.raises(OwnershipLost):
            await ada.tell(old, "too late")
        with pytest.raises(OwnershipLost):
            await ada.publisher.finish(old, "failed", error={}, usage=USAGE)
        assert await renew(db, old.claim)
        await ada.claims.release(old.claim)
        assert await contents(db) == ["old", "new"]
        assert [ada.lost, ben.lost] == [[old.claim], []]
        assert [await field(db, "a", name) for name in ("state", "worker")] == ["running", "ben"]
        assert await db.get(lease_key("a")) == b"ben:2"
        assert not await renew(db, new.claim)


async def test_a_lease_that_ran_out_unnoticed_is_taken_again_by_its_owner(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    await lapse(db, "a")
    assert not await renew(db, log.claim)
    assert await db.get(lease_key("a")) == b"ada:1"
    assert await ada.claims.take("interactive", 1) == []


async def test_the_first_final_event_wins(redis_url: str, db: Redis, ada: Desk) -> None:
    async with desk(redis_url, "ben") as ben:
        old = await ada.queue("a")
        await lapse(db, "a")
        new = await ben.take("a")
        endings = await asyncio.gather(
            ada.publisher.finish(old, "finished", b"{}", usage=USAGE),
            ben.publisher.finish(new, "cancelled", reason="requested", usage=USAGE),
            return_exceptions=True,
        )
        assert [type(ending) for ending in endings] == [OwnershipLost, type(None)]
        assert await contents(db) == ["cancelled"]
    await check_all_ended(db)


async def test_nothing_is_said_after_the_final_event(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    await ada.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
    with pytest.raises(OwnershipLost):
        await ada.tell(log, "one more thing")
    assert await contents(db) == ["cancelled"]


# The ending


async def test_an_ending_cleans_up_and_sets_what_will_expire(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    await ada.tell(log, "one")
    await db.set(keys.cancel("a"), "1")
    await db.set("arq:retry:a", "1")
    await ada.publisher.finish(log, "finished", b'{"object": "chat.completion"}', usage=USAGE)
    await check_job_keys(db, "a")
    await check_all_ended(db)
    assert await db.get(keys.result("a")) == b'{"object": "chat.completion"}'
    assert 59_000 < await db.pttl(keys.log("a")) <= 60_000
    assert 89_000 < await db.pttl(keys.result("a")) <= 90_000
    assert 89_000 < await db.pttl(keys.job("a")) <= 90_000
    assert float(await field(db, "a", "finished_at") or 0) == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize("state", ["failed", "cancelled"])
async def test_the_result_of_a_bad_ending_is_its_event(db: Redis, ada: Desk, state: Any) -> None:
    log = await ada.queue("a")
    await ada.publisher.finish(log, state, reason="requested", usage=USAGE)
    assert await db.get(keys.result("a")) == await db.lindex(keys.log("a"), -1)
    await check_all_ended(db)


async def test_whoever_hears_the_final_event_finds_everything_in_place(redis_url: str, db: Redis, ada: Desk) -> None:
    with SyncRedis.from_url(redis_url) as reader:
        listener = reader.pubsub(ignore_subscribe_messages=True)
        listener.subscribe(keys.channel("a"))
        listener.get_message(timeout=1)
        log = await ada.queue("a")
        log.emit("delta", token_ids=[], content="one")
        await ada.publisher.finish(log, "finished", b"{}", usage=USAGE)
        while (message := listener.get_message(timeout=1)) is not None and b'"finished"' not in message["data"]:
            pass
        assert message is not None
        assert (reader.hget(keys.job("a"), "state"), reader.get(keys.result("a"))) == (b"finished", b"{}")
        listener.close()


async def test_an_ending_takes_the_job_off_its_own_lane(db: Redis, ada: Desk) -> None:
    for lane in keys.LANES:
        await put(db, lane, BODY, lane=lane)
    for lane in keys.LANES:
        (claim,) = await ada.claims.take(lane, 1)
        log = ada.publisher.open(claim, on_lost=lambda: None)
        await ada.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
    await check_all_ended(db)


async def test_an_id_of_any_bytes_is_cleaned_up_too(db: Redis, ada: Desk) -> None:
    for name in ("né 🙂", "\udcff\udcfe", "a:b c*[x]\n"):
        log = await ada.queue(name)
        await ada.tell(log, "one")
        await ada.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
    await check_all_ended(db)


# What goes wrong on the way


async def test_a_list_that_lost_its_end_is_filled_again(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    await ada.tell(log, "one", "two", "three")
    await db.ltrim(keys.log("a"), 0, 0)
    await ada.tell(log, "four")
    assert await contents(db) == ["one", "two", "three", "four"]


async def test_a_list_that_is_gone_is_filled_again_by_the_ending(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    await ada.tell(log, "one", "two")
    await db.delete(keys.log("a"))
    await ada.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
    assert await contents(db) == ["one", "two", "cancelled"]
    await check_all_ended(db)


async def test_a_list_that_lost_what_an_earlier_attempt_said_is_filled_again(
    redis_url: str, db: Redis, ada: Desk
) -> None:
    async with desk(redis_url, "ben") as ben:
        await ada.tell(await ada.queue("a"), "one", "two")
        await lapse(db, "a")
        log = await ben.take("a")
        await ben.tell(log, "three")
        await db.ltrim(keys.log("a"), 0, 0)
        await ben.tell(log, "four")
        assert await contents(db) == ["one", "two", "three", "four"]


async def test_scripts_that_the_server_forgot_are_loaded_again(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    for word in "abc":
        await db.script_flush()
        await ada.tell(log, word)
    await db.script_flush()
    await ada.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
    assert await contents(db) == ["a", "b", "c", "cancelled"]


async def talk(one: Desk, log: JobLog, *, until: Callable[[], bool] = lambda: True) -> list[str]:
    """Append a hundred words, and more of them until this is true; then end the job. Return what the log has then."""
    words = list[str]()
    while len(words) < 100 or not until():
        words.append(str(len(words)))
        log.emit("delta", token_ids=[], content=words[-1])
        await asyncio.sleep(0.005)
    await one.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
    return [*words, "cancelled"]


async def test_answers_lost_all_the_time_cost_no_event_and_repeat_none(redis_url: str, db: Redis) -> None:
    """The server has done it, and the worker does not know."""
    dice = random.Random(5)
    async with Line(redis_url) as line, desk(line.url) as one:
        log = await one.queue("a")
        line.loses = lambda: dice.random() < 0.3
        async with overheard(db) as heard:
            said = await asyncio.wait_for(talk(one, log, until=lambda: line.lost > 5), 60)
        assert one.lost == []
    assert await contents(db) == said
    assert [event["seq"] for event in heard] == list(range(len(said)))
    await check_all_ended(db)


async def test_an_ending_whose_answer_was_lost_has_happened(redis_url: str, db: Redis) -> None:
    losses = iter([True])
    async with Line(redis_url) as line, desk(line.url) as one:
        log = await one.queue("a")
        await one.tell(log, "one")
        await one.publisher.finish(await one.queue("warm"), "cancelled", reason="requested", usage=USAGE)
        line.loses = lambda: next(losses, False)
        ending = one.publisher.finish(log, "cancelled", reason="requested", usage=USAGE)
        await asyncio.wait_for(ending, 60)
        assert (line.lost, one.lost) == (1, [])
    assert await contents(db) == ["one", "cancelled"]
    await check_all_ended(db)


async def test_connections_killed_in_the_middle_cost_no_event_and_repeat_none(db: Redis, ada: Desk) -> None:
    log = await ada.queue("a")
    killed = 0
    talking = asyncio.create_task(talk(ada, log, until=lambda: killed >= 5))
    while not talking.done():
        killed += await db.client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.05)
    assert await contents(db) == await talking


async def test_a_server_that_dies_and_comes_back_has_lost_no_event_and_repeats_none() -> None:
    server, is_back = Server(args=("--appendonly", "yes", "--appendfsync", "always")), False
    with server:
        async with desk(server.url) as one, Redis.from_url(server.url) as db:
            log = await one.queue("a")
            talking = asyncio.create_task(talk(one, log, until=lambda: is_back))
            await asyncio.sleep(0.1)
            assert server.process is not None
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            await asyncio.to_thread(server.start)
            is_back = True
            said = await asyncio.wait_for(talking, 60)
            assert await contents(db) == said
            await check_all_ended(db)


@dataclass
class Call:
    """An append that may be sent again: what it wrote, where."""

    attempt: int
    seq: int
    events: list[str]


class AppendMachine(RuleBasedStateMachine):
    """Appends of several attempts, sent again whole or in part and in any order, against a list in Python."""

    db: SyncRedis

    @initialize()
    def begin(self) -> None:
        self.db.flushdb()
        self.append = self.db.register_script(worker_source("append"))
        self.db.hset("sluice:job:a", mapping={"attempt": 1, "state": "running"})
        self.listener = self.db.pubsub(ignore_subscribe_messages=True)
        self.listener.subscribe("sluice:ch:a")
        self.listener.get_message(timeout=1)
        self.attempt, self.said = 1, list[str]()
        self.calls: list[Call] = []
        self.pushed: list[str] = []

    def teardown(self) -> None:
        self.listener.close()

    def send(self, call: Call) -> Any:
        header = f"{call.attempt} {call.seq} 0 {len(call.events)} 0"
        answer = self.append(keys=["sluice:job:a"], args=[LIFE_MS, header, *call.events])
        return None if answer == [] else answer[1]

    def expect(self, call: Call, answer: Any) -> None:
        """Write what is new of it into our own list, or see that it was turned down."""
        if call.attempt != self.attempt:
            assert answer == b"fenced"
        elif len(self.said) < call.seq:
            assert answer == len(self.said)
        else:
            overlap = self.said[call.seq : call.seq + len(call.events)]
            assert overlap == call.events[: len(overlap)]
            assert answer is None
            self.pushed += call.events[len(overlap) :]
            self.said += call.events[len(overlap) :]

    @rule(count=st.integers(0, 4))
    def say(self, count: int) -> None:
        seq = len(self.said)
        events = [f"{self.attempt}.{seq + k}" for k in range(count)]
        self.calls.append(call := Call(self.attempt, seq, events))
        self.expect(call, self.send(call))

    @rule(which=st.integers(0, 99), first=st.integers(0, 4), last=st.integers(0, 4))
    def send_again(self, which: int, first: int, last: int) -> None:
        if not self.calls:
            return
        call = self.calls[which % len(self.calls)]
        first = min(first, len(call.events))
        part = Call(call.attempt, call.seq + first, call.events[first : first + last])
        self.expect(part, self.send(part))

    @rule(ahead=st.integers(1, 3))
    def leave_a_gap(self, ahead: int) -> None:
        gap = Call(self.attempt, len(self.said) + ahead, ["never"])
        self.expect(gap, self.send(gap))

    @rule(keep=st.integers(0, 9))
    def fail_over(self, keep: int) -> None:
        """The list is shorter than it was; the calls that are sent again fill it."""
        if keep < len(self.said):
            self.db.ltrim("sluice:log:a", 0, keep - 1) if keep else self.db.delete("sluice:log:a")
            del self.said[keep:]
            self.calls = [call for call in self.calls if call.attempt == self.attempt or call.seq < keep]

    @rule()
    def next_attempt(self) -> None:
        self.attempt += 1
        self.db.hset("sluice:job:a", "attempt", self.attempt)

    @rule(at=st.integers(0, 9))
    def contradict(self, at: int) -> None:
        """An event of ours that is not the one in the list: somebody else wrote it."""
        if at < len(self.said):
            assert self.send(Call(self.attempt, at, ["another"])) == b"fenced"

    @invariant()
    def the_list_is_what_was_said(self) -> None:
        assert [raw.decode() for raw in self.db.lrange("sluice:log:a", 0, -1)] == self.said

    @invariant()
    def the_channel_carried_what_was_pushed(self) -> None:
        while self.pushed:
            message = self.listener.get_message(timeout=1)
            assert message is not None, f"{self.pushed} not published"
            assert message["data"].decode() == self.pushed.pop(0)
        assert self.listener.get_message() is None


def test_appends_follow_the_model(redis_url: str) -> None:
    with SyncRedis.from_url(redis_url) as AppendMachine.db:
        run_state_machine_as_test(
            AppendMachine,
            settings=hypothesis_settings(
                max_examples=examples(60),
                stateful_step_count=20,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
