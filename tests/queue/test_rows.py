"""Rows that each lane may take, and the hours of offline jobs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.keys import Lane
from tests.fakes import FakeChat
from tests.host.simulated import SimulatedHost
from tests.queue.helpers import ask, settings, until, working
from worker.host.courtesy import Courtesy, Pressure, Reclaim
from worker.host.watch import HostWatch
from worker.monitoring.sink import MetricsSink
from worker.queue.job.claims import MAX_COUNTS, Claim, free_rows, offline_rows
from worker.queue.redis_server import ServerClock

NOON = datetime(2026, 3, 13, 12, tzinfo=UTC)
NIGHT = datetime(2026, 3, 13, 23, tzinfo=UTC)


def claims(interactive: int, batch: int) -> list[Claim]:
    lanes: list[Lane] = [*["interactive"] * interactive, *["batch"] * batch]  # type: ignore[list-item]
    return [Claim(f"job-{k}", lane, 1, 0, False, 0.0, 0, b"", 0) for k, lane in enumerate(lanes)]


@pytest.mark.parametrize("lane", keys.LANES)
def test_token_counts_take_no_row(lane: Lane) -> None:
    known, running = settings("", max_rows=4, reserved_rows=0), claims(1, 1)
    counts = [replace(claim, is_count=True) for claim in claims(MAX_COUNTS // 2, MAX_COUNTS // 2)]
    assert free_rows(lane, [*running, *counts], known, NOON) == free_rows(lane, running, known, NOON) > 0


@pytest.mark.parametrize("lane", keys.LANES)
def test_token_counts_beyond_those_take_rows(lane: Lane) -> None:
    known = settings("", max_rows=4, reserved_rows=0)
    counts = [replace(claim, is_count=True, lane=lane) for claim in claims(MAX_COUNTS + 3, 0)]
    assert free_rows(lane, counts, known, NOON) == 4 - 3


@pytest.mark.parametrize(
    ("interactive", "batch", "now", "free"),
    [
        (0, 0, NIGHT, (8, 6)),
        (1, 2, NIGHT, (7, 3)),
        (0, 6, NIGHT, (8, 0)),
        (7, 1, NIGHT, (1, -2)),
        (0, 0, NOON, (8, 1)),
        (0, 1, NOON, (8, 0)),
        (0, 6, NOON, (8, -5)),
        (6, 0, NOON, (2, 0)),
    ],
)
def test_offline_jobs_leave_the_reserved_rows_and_outside_of_their_hours_all_but_one(
    interactive: int, batch: int, now: datetime, free: tuple[int, int]
) -> None:
    known = settings("redis://unused", max_rows=8, reserved_rows=2, batch_hours="22:00-06:00", batch_off_hours_rows=1)
    running = claims(interactive, batch)
    assert (free_rows("interactive", running, known, now), free_rows("batch", running, known, now)) == free


def test_without_hours_it_is_always_their_time() -> None:
    assert [offline_rows(settings("redis://unused", reserved_rows=3), now) for now in (NOON, NIGHT)] == [5, 5]


def test_without_a_number_nothing_offline_begins_outside_of_the_hours() -> None:
    assert offline_rows(settings("redis://unused", batch_hours="22:00-06:00"), NOON) == 0


@given(st.integers(0, 99), st.integers(0, 7), st.datetimes(timezones=st.just(UTC)))
def test_more_rows_outside_than_inside_are_not_given(outside: int, reserved: int, now: datetime) -> None:
    known = settings("redis://unused", reserved_rows=reserved, batch_hours="22:00-06:00", batch_off_hours_rows=outside)
    assert offline_rows(known, now) <= 8 - reserved


class Clock(ServerClock):
    """The server's, and it can be put forward."""

    put_forward = timedelta()

    def utc(self) -> datetime:
        return NOON + self.put_forward


@asynccontextmanager
async def by_day(url: str, **given: Any) -> AsyncIterator[tuple[FakeChat, Clock]]:
    """A worker at noon whose offline hours begin at ten at night."""
    chat, clock = FakeChat(), Clock()
    known = settings(url, max_rows=4, reserved_rows=1, batch_hours="22:00-06:00", poll_s=0.05, **given)
    async with working(known, chat.chat, clock=clock):
        yield chat, clock


def running(chat: FakeChat) -> set[str]:
    return {job.claim.job_id for job in chat.running}


async def test_offline_jobs_wait_for_their_hours_and_interactive_ones_do_not(redis_url: str, db: Redis) -> None:
    async with by_day(redis_url) as (chat, clock):
        for k in range(5):
            await ask(db, f"file-{k}", {"then": "hang"}, lane="batch", at_ms=k)
        await ask(db, "chat-0", {"then": "hang"}, at_ms=100)
        await until(lambda: running(chat) == {"chat-0"})
        clock.put_forward = timedelta(hours=10)
        await until(lambda: running(chat) == {"chat-0", "file-0", "file-1"})


async def test_outside_of_their_hours_offline_jobs_have_the_rows_that_the_setting_leaves(
    redis_url: str, db: Redis
) -> None:
    async with by_day(redis_url, batch_off_hours_rows=2) as (chat, _):
        for k in range(6):
            await ask(db, f"file-{k}", {"say": ["a", "b"], "pace_s": 0.02}, lane="batch", at_ms=k)
        await until(lambda: len(chat.began) == 6)
        assert chat.most == 2
        assert await db.hget(keys.worker("ada"), "offline_rows") == b"2"


async def test_when_the_hours_end_what_runs_goes_on_and_nothing_more_begins(redis_url: str, db: Redis) -> None:
    async with by_day(redis_url) as (chat, clock):
        clock.put_forward = timedelta(hours=12)
        await ask(db, "file-0", {"say": ["a", "b"], "pace_s": 0.5}, lane="batch", at_ms=0)
        await until(lambda: running(chat) == {"file-0"})
        clock.put_forward = timedelta()
        await ask(db, "chat-0", {"say": ["now"]}, at_ms=1)
        await until(lambda: "chat-0" in chat.began)  # so the claim that still saw the night has ended
        await ask(db, "file-1", {"say": ["never"]}, lane="batch", at_ms=2)
        await until(lambda: not chat.running)
        await ask(db, "chat-1", {"say": ["soon"]}, at_ms=3)
        await until(lambda: "chat-1" in chat.began)
        assert chat.began == ["file-0", "chat-0", "chat-1"]


async def test_jobs_that_would_wait_for_memory_stay_in_the_queue(redis_url: str, db: Redis) -> None:
    chat, machine, known = FakeChat(), SimulatedHost(), settings(redis_url, max_rows=4, reserved_rows=1, poll_s=0.05)
    watch = HostWatch(known, MetricsSink(), lambda throttle: None, machine, every_s=0.01)
    async with working(known, chat.chat, host=watch):
        machine.press(Pressure.CRITICAL)
        await until(lambda: watch.reclaim == Reclaim.NEW_JOBS)
        await ask(db, "file-0", {"say": ["a"]}, lane="batch", at_ms=1)
        await ask(db, "chat-0", {"then": "hang"}, at_ms=2)
        await until(lambda: running(chat) == {"chat-0"})  # a worker without a job takes one
        await ask(db, "chat-1", {"say": ["a"]}, at_ms=3)
        await asyncio.sleep(0.5)  # several polls
        assert chat.began == ["chat-0"]
        watch._courtesy = Courtesy("off")  # as if the pressure was long ago
        await until(lambda: {*chat.began} == {"chat-0", "chat-1", "file-0"})


async def test_a_worker_whose_offline_jobs_wait_for_memory_takes_an_interactive_one(redis_url: str, db: Redis) -> None:
    chat, machine, known = FakeChat(), SimulatedHost(), settings(redis_url, max_rows=4, reserved_rows=1, poll_s=0.05)
    watch = HostWatch(known, MetricsSink(), lambda throttle: None, machine, every_s=0.01)
    async with working(known, chat.chat, host=watch):
        await ask(db, "file-0", {"then": "hang"}, lane="batch", at_ms=1)
        await until(lambda: running(chat) == {"file-0"})
        machine.press(Pressure.CRITICAL)
        await until(lambda: watch.reclaim == Reclaim.NEW_JOBS)
        await ask(db, "chat-0", {"then": "hang"}, at_ms=2)
        await until(lambda: running(chat) == {"file-0", "chat-0"})
