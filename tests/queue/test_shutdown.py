"""Signals set the events of a shutdown, and the drain requeues the jobs that do not end in their grace period."""

import asyncio
import logging
import os
from signal import SIGINT, SIGTERM

import pytest

from tests.queue.held import claim_of, holding
from tests.queue.helpers import until
from worker.errors import Requeue
from worker.queue import worker as queue_worker
from worker.queue.worker import QueueWorker


def states(of: QueueWorker) -> tuple[bool, bool]:
    return of.stopping.is_set(), of.force_stop.is_set()


async def test_the_first_signal_stops_the_second_forces_and_a_third_changes_nothing(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    async with holding(redis_url, grace_s=30) as parts:
        assert states(parts.worker) == (False, False)
        after = []
        for signum in (SIGINT, SIGTERM, SIGTERM):
            parts.worker.on_signal(signum)
            after.append(states(parts.worker))
    assert after == [(True, False), (True, True), (True, True)]
    assert [message.partition(":")[0] for message in caplog.messages] == ["SIGINT", "SIGTERM again"]


async def test_the_process_s_signals_stop_the_worker(redis_url: str) -> None:
    async with holding(redis_url) as parts:
        for signum, after in ((SIGINT, (True, False)), (SIGTERM, (True, True))):
            os.kill(os.getpid(), signum)
            await until(lambda after=after: states(parts.worker) == after)


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
    redis_url: str, caplog: pytest.LogCaptureFixture, jobs: int, grace_s: float, plan: str
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    async with holding(redis_url, grace_s=grace_s) as parts:
        await parts.held.start(*(claim_of(f"job-{k}") for k in range(jobs)))
        parts.worker.stop()
        assert caplog.messages == [f"SIGTERM: stopping; {plan}"]


async def test_jobs_that_end_in_the_grace_period_are_not_interrupted(redis_url: str) -> None:
    async with holding(redis_url, grace_s=60) as parts:
        await parts.held.start(claim_of("a"), claim_of("b"))
        draining = asyncio.create_task(parts.worker.drain())
        await asyncio.sleep(0.05)
        assert not draining.done()
        await parts.held.release()
        await asyncio.wait_for(draining, 5)
        assert parts.held.ended == {"a": None, "b": None}


async def test_jobs_that_outlast_the_grace_period_are_requeued(redis_url: str) -> None:
    async with holding(redis_url, grace_s=0.05) as parts:
        await parts.held.start(claim_of("a"))
        await asyncio.wait_for(parts.worker.drain(), 5)
        assert isinstance(parts.held.ended["a"], Requeue)


async def test_a_second_signal_ends_the_grace_period(redis_url: str) -> None:
    async with holding(redis_url, grace_s=60) as parts:
        await parts.held.start(claim_of("a"))
        draining = asyncio.create_task(parts.worker.drain())
        parts.worker.stop()
        await asyncio.sleep(0.05)
        assert parts.held.ended == {}
        parts.worker.stop()
        await asyncio.wait_for(draining, 5)
        assert isinstance(parts.held.ended["a"], Requeue)


async def test_a_job_whose_last_write_does_not_arrive_does_not_keep_the_worker(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue_worker, "_LAST_WRITES_S", 0.05)
    async with holding(redis_url, stubborn=True, grace_s=0) as parts:
        await parts.held.start(claim_of("a"))
        await asyncio.wait_for(parts.worker.drain(), 5)
        assert [(record.levelno, record.message[:6]) for record in caplog.records] == [(logging.ERROR, "1 jobs")]
