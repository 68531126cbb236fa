"""Jobs are known from their claim to the end of their task."""

import asyncio
from dataclasses import replace
from threading import Thread

import pytest
from redis.asyncio import Redis

from tests.queue.held import HeldJobs, claim_of
from tests.waiting import until
from worker.errors import CancelJob, OwnershipLost, Requeue


@pytest.fixture
async def held(db: Redis) -> HeldJobs:
    return HeldJobs.of_no_worker(db)


async def test_a_job_is_known_until_its_task_ends_which_wakes_the_worker(held: HeldJobs) -> None:
    await held.start(claim_of("a"), claim_of("b"))
    assert (len(held.jobs), "a" in held.jobs, held.jobs.ids()) == (2, True, ["a", "b"])
    assert held.jobs["a"].claim in held.jobs.claims()
    assert held.wakes == 0
    await held.release()
    assert (len(held.jobs), "a" in held.jobs, held.jobs.claims(), held.wakes) == (0, False, [], 2)
    assert held.ended == {"a": None, "b": None}


async def test_an_interruption_reaches_one_job_and_tells_if_it_runs_here(held: HeldJobs) -> None:
    await held.start(claim_of("a"), claim_of("b"))
    assert (held.jobs.cancel("a"), held.jobs.cancel("elsewhere")) == (True, False)
    await until(lambda: held.jobs.ids() == ["b"])
    assert isinstance(held.ended["a"], CancelJob)
    await held.release()


async def test_all_jobs_are_interrupted_with_reasons_of_their_own(held: HeldJobs) -> None:
    await held.start(claim_of("a"), claim_of("b"))
    held.jobs.interrupt_all(Requeue)
    await held.jobs.all_ended()
    a, b = held.ended["a"], held.ended["b"]
    assert isinstance(a, Requeue)
    assert isinstance(b, Requeue)
    assert a is not b


async def test_jobs_are_counted_by_lane_and_by_suspicion(held: HeldJobs) -> None:
    await held.start(claim_of("a"), claim_of("b", "batch", lease_expirations=1), claim_of("c", "batch"))
    assert (held.jobs.by_lane(), held.jobs.suspects()) == ({"interactive": 1, "batch": 2}, 1)
    await held.start(replace(claim_of("d"), is_count=True))
    assert (held.jobs.by_lane(), held.jobs.rows()) == ({"interactive": 2, "batch": 2}, 3)
    held.jobs["b"].made_progress()
    assert (held.jobs.suspects(), held.wakes) == (0, 1)
    await held.release()


async def test_a_lost_claim_interrupts_its_own_attempt_only(held: HeldJobs) -> None:
    """The keeper of the leases reports from its thread, when another attempt may run under the same id."""
    earlier, present = claim_of("a"), claim_of("a")
    await held.start(present)
    for lost in (earlier, claim_of("elsewhere")):
        await asyncio.to_thread(held.jobs.ownership_lost, lost)
    await asyncio.sleep(0.01)
    assert held.jobs["a"].interruption is None
    await asyncio.to_thread(held.jobs.ownership_lost, present)
    await held.jobs.all_ended()
    assert isinstance(held.ended["a"], OwnershipLost)


def test_a_claim_lost_after_the_event_loop_has_closed_is_ignored() -> None:
    async def started() -> HeldJobs:
        held = HeldJobs.of_no_worker(Redis())
        await held.start(claim_of("a"))
        await held.release()
        return held

    held = asyncio.run(started())
    errors: list[BaseException] = []

    def report() -> None:
        try:
            held.jobs.ownership_lost(claim_of("a"))
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=report)
    thread.start()
    thread.join()
    assert errors == []
