"""Slots of a crontab on a real server: each is one worker's."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis

from sluice.batch.times import Crontab
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.line import Line
from tests.queue.helpers import QUEUE, ask, ended, envelope, put, settings, until, working
from worker.queue.cron import Cron
from worker.queue.redis_server import ServerClock, redis_from_settings

NOON = datetime(2026, 3, 13, 12, tzinfo=UTC)
SECOND, MINUTE, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(days=1)


class Clock(ServerClock):
    moment = NOON

    def utc(self) -> datetime:
        return self.moment


class Keeper:
    """Counts the slots that it is given."""

    def __init__(self, expression: str = "* * * * *", *, name: str = "night") -> None:
        self.ran, self.free = 0, True
        self.cron = Cron(name, self._begin, Crontab(expression), free=lambda: self.free)

    def _begin(self) -> None:
        self.ran += 1

    async def look(self, db: Redis, now: datetime, *, worker: str = "ada") -> int:
        await self.cron.begin_if_due(db, worker, now)
        return self.ran


async def test_a_slot_is_run_when_it_has_come_and_once(db: Redis) -> None:
    ada = Keeper()
    looks = [NOON + k * 20 * SECOND for k in range(10)]
    assert [await ada.look(db, now) for now in looks] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


async def test_a_slot_that_has_come_before_the_worker_is_not_made_up_for(db: Redis) -> None:
    ada = Keeper("0 12 * * *")
    assert [await ada.look(db, NOON + k * MINUTE) for k in range(3)] == [0, 0, 0]
    assert await ada.look(db, NOON + DAY) == 1


async def test_slots_that_pass_while_nobody_looks_are_one(db: Redis) -> None:
    ada = Keeper()
    await ada.look(db, NOON)
    assert [await ada.look(db, NOON + 8 * 60 * MINUTE + k * SECOND) for k in range(3)] == [1, 1, 1]


async def test_of_many_workers_one_has_each_slot(db: Redis) -> None:
    workers = {name: Keeper() for name in ("ada", "ben", "cleo", "dan")}
    for k in range(11):
        now = NOON + k * MINUTE
        await asyncio.gather(*(worker.look(db, now, worker=name) for name, worker in workers.items()))
        assert sum(worker.ran for worker in workers.values()) == k


async def test_a_worker_whose_clock_is_late_finds_its_slots_taken(db: Redis) -> None:
    ada, ben = Keeper(), Keeper()
    await ada.look(db, NOON - MINUTE)
    for k in range(5):
        await ada.look(db, NOON + k * MINUTE)
        await ben.look(db, NOON + k * MINUTE - 40 * SECOND, worker="ben")
    assert (ada.ran, ben.ran) == (5, 0)


async def test_two_folders_have_slots_of_their_own(db: Redis) -> None:
    ada, ben = Keeper(), Keeper(name="another")
    for k in range(2):
        assert [await keeper.look(db, NOON + k * MINUTE) for keeper in (ada, ben)] == [k, k]


async def test_a_busy_worker_leaves_a_slot_to_one_that_is_free(db: Redis) -> None:
    ada, ben = Keeper(), Keeper()
    for keeper in (ada, ben):
        await keeper.look(db, NOON)
    ada.free = False
    assert await ada.look(db, NOON + MINUTE) == 0
    assert await ben.look(db, NOON + MINUTE, worker="ben") == 1
    ada.free = True
    assert await ada.look(db, NOON + MINUTE + SECOND) == 0
    assert await ada.look(db, NOON + 2 * MINUTE) == 1


async def test_a_slot_that_found_all_workers_busy_is_run_by_the_first_that_is_free_again(db: Redis) -> None:
    ada, ben = Keeper("0 2 * * *"), Keeper("0 2 * * *")
    for keeper in (ada, ben):
        await keeper.look(db, NOON)
        keeper.free = False
        await keeper.look(db, NOON + DAY)
        keeper.free = True
    assert await ben.look(db, NOON + DAY + MINUTE, worker="ben") == 1
    assert await ada.look(db, NOON + DAY + MINUTE) == 0


async def test_a_slot_whose_answer_was_lost_is_still_ours(db: Redis) -> None:
    ada, ben = Keeper(), Keeper()
    for keeper in (ada, ben):
        await keeper.look(db, NOON)
    await db.set(keys.slot("night", int((NOON + MINUTE).timestamp())), "ada")
    assert await ben.look(db, NOON + MINUTE, worker="ben") == 0
    assert await ada.look(db, NOON + MINUTE) == 1


async def test_a_taken_slot_is_forgotten_in_time(db: Redis) -> None:
    ada = Keeper()
    for k in range(2):
        await ada.look(db, NOON + k * MINUTE)
    (key,) = [key async for key in db.scan_iter()]
    assert key.decode() == keys.slot("night", int((NOON + MINUTE).timestamp()))
    assert 0 < await db.ttl(key) <= 86_400


# In a worker


async def test_of_two_workers_one_has_the_slot_and_both_have_jobs(redis_url: str, db: Redis) -> None:
    keepers, clock, chat = [Keeper(), Keeper()], Clock(), FakeChat()
    ada, ben = [settings(redis_url, worker_name=name, poll_s=0.05, max_rows=1, reserved_rows=0) for name in "ab"]
    async with (
        working(ada, chat.chat, crons=[keepers[0].cron], clock=clock),
        working(ben, chat.chat, crons=[keepers[1].cron], clock=clock),
    ):
        await until(lambda: all(keeper.cron.next_run == NOON + MINUTE for keeper in keepers))
        clock.moment += MINUTE
        await until(lambda: all(keeper.cron.next_run == NOON + 2 * MINUTE for keeper in keepers))
        assert Counter(keeper.ran for keeper in keepers) == {0: 1, 1: 1}
        for k in range(2):
            await ask(db, f"job-{k}", {"say": ["Hello"]})
            await ended(db, f"job-{k}")


async def test_a_slot_that_comes_while_redis_is_away_is_run_when_it_is_back(redis_url: str) -> None:
    keeper, clock = Keeper(), Clock()
    async with Line(redis_url) as line:
        known = settings(line.url, poll_s=0.05)
        async with working(known, FakeChat().chat, crons=[keeper.cron], clock=clock):
            await until(lambda: keeper.cron.next_run is not None)
            line.down()
            clock.moment += MINUTE
            await asyncio.sleep(0.3)
            assert keeper.ran == 0
            line.up()
            await until(lambda: keeper.ran == 1)


async def test_nobody_can_run_a_cron_job_through_the_queue(redis_url: str, db: Redis) -> None:
    keeper = Keeper(name="night")
    async with working(settings(redis_url), FakeChat().chat, crons=[keeper.cron], clock=Clock()):
        await put(db, "a", envelope({}, function="night"))
        (said,) = await ended(db, "a")
    assert said["error"]["message"] == "The function 'night' does not exist; this worker has: chat."
    assert keeper.ran == 0


async def test_arq_s_own_queue_stays_empty(redis_url: str, db: Redis) -> None:
    """arq would put a job there for each slot."""
    keeper, clock = Keeper(), Clock()
    async with working(settings(redis_url, poll_s=0.05), FakeChat().chat, crons=[keeper.cron], clock=clock):
        await until(lambda: keeper.cron.next_run is not None)
        clock.moment += MINUTE
        await until(lambda: keeper.ran == 1)
        assert await db.exists(QUEUE) == 0


async def test_slots_are_told_by_the_server_s_clock(redis_url: str) -> None:
    clock = ServerClock()
    async with redis_from_settings(settings(redis_url)) as redis:
        await clock.sync(redis)
        seconds, _ = await redis.time()
    assert abs(clock.utc() - datetime.fromtimestamp(seconds, UTC)) < timedelta(seconds=2)
