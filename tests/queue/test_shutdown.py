"""Signals set the events of a shutdown, and the drain requeues the jobs that do not end in their grace period."""

import asyncio
import logging
from signal import SIGINT, SIGTERM

import pytest
from redis.asyncio import Redis

from tests.queue.held import HeldJobs, claim_of
from worker.errors import Requeue
from worker.queue import shutdown
from worker.queue.shutdown import Shutdown


@pytest.fixture
async def held(db: Redis) -> HeldJobs:
    return HeldJobs(db)


def states(of: Shutdown) -> tuple[bool, bool]:
    return of.stopping.is_set(), of.force_stop.is_set()


async def test_the_first_signal_stops_the_second_forces_and_a_third_changes_nothing(
    held: HeldJobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    stop = Shutdown(held.jobs, 30)
    assert states(stop) == (False, False)
    after = []
    for signum in (SIGINT, SIGTERM, SIGTERM):
        stop.signal(signum)
        after.append(states(stop))
    assert after == [(True, False), (True, True), (True, True)]
    assert [message.partition(":")[0] for message in caplog.messages] == ["SIGINT", "SIGTERM again"]


@pytest.mark.parametrize(
    ("jobs", "grace_s", "plan"),
    [
        (0, 30, "no job is running"),
        (0, 0, "no job is running"),
        (1, 0, "requeueing 1 job"),
        (2, 0.5, "waiting up to 0.5 s for 2 jobs; a second signal requeues them at once"),
    ],
)
async def test_the_log_says_which_jobs_the_worker_waits_for(
    held: HeldJobs, caplog: pytest.LogCaptureFixture, jobs: int, grace_s: float, plan: str
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    await held.start(*(claim_of(f"job-{k}") for k in range(jobs)))
    Shutdown(held.jobs, grace_s).signal(SIGTERM)
    assert caplog.messages == [f"SIGTERM: stopping; {plan}"]
    await held.release()


async def test_jobs_that_end_in_the_grace_period_are_not_interrupted(held: HeldJobs) -> None:
    await held.start(claim_of("a"), claim_of("b"))
    draining = asyncio.create_task(Shutdown(held.jobs, 60).drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    await held.release()
    await asyncio.wait_for(draining, 5)
    assert held.ended == {"a": None, "b": None}


async def test_jobs_that_outlast_the_grace_period_are_requeued(held: HeldJobs) -> None:
    await held.start(claim_of("a"))
    await asyncio.wait_for(Shutdown(held.jobs, 0.05).drain(), 5)
    assert isinstance(held.ended["a"], Requeue)


async def test_a_second_signal_ends_the_grace_period(held: HeldJobs) -> None:
    stop = Shutdown(held.jobs, 60)
    await held.start(claim_of("a"))
    draining = asyncio.create_task(stop.drain())
    stop.signal(SIGTERM)
    await asyncio.sleep(0.05)
    assert held.ended == {}
    stop.signal(SIGTERM)
    await asyncio.wait_for(draining, 5)
    assert isinstance(held.ended["a"], Requeue)


async def test_a_job_whose_last_write_does_not_arrive_does_not_keep_the_worker(
    db: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "_LAST_WRITES_S", 0.05)
    held = HeldJobs(db, stubborn=True)
    await held.start(claim_of("a"))
    await asyncio.wait_for(Shutdown(held.jobs, 0).drain(), 5)
    assert [(record.levelno, record.message[:6]) for record in caplog.records] == [(logging.ERROR, "1 jobs")]
    await held.release()
