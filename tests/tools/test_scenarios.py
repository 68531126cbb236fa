"""What the scenarios count, so that none holds that has tested nothing."""

import subprocess
import sys

import pytest
from redis.asyncio import Redis

from tests.support.chaos.harness import at_each, at_some, count_leases, count_running, until_taken_over
from tests.support.stack import ROOT


@pytest.mark.parametrize(
    ("counts", "holds"), [([32], True), ([32, 1], True), ([32, 0], False), ([0], False), ([], False)]
)
def test_a_signal_that_found_no_stream_running_does_not_hold(counts: list[int], holds: bool) -> None:
    assert at_each("x", counts, 32).holds is holds


@pytest.mark.parametrize(("counts", "holds"), [([0, 3, 0], True), ([0, 0], False), ([], False)])
def test_random_signals_hold_if_one_of_them_found_a_job_running(counts: list[int], holds: bool) -> None:
    assert at_some("x", counts).holds is holds


def test_the_figures_tell_how_many_ran() -> None:
    assert at_each("x", [32, 7], 32).value == "32, then 7 of 32"
    assert at_some("x", [0, 3, 9]).value == "2 of 3, up to 9 jobs"


async def test_jobs_that_wait_or_have_ended_do_not_run(db: Redis) -> None:
    for job_id, state in {"a": "running", "b": "queued", "c": "finished", "d": "running"}.items():
        await db.hset(f"sluice:job:{job_id}", "state", state)
    assert await count_running(db, ["a", "b", "c", "d", "none"]) == 2


async def test_the_leases_of_a_worker_are_told_from_those_of_others(db: Redis) -> None:
    for job_id, owner in {"a": "worker-1:1", "b": "worker-12:1", "c": "worker-1:3"}.items():
        await db.set(f"arq:in-progress:{job_id}", owner)
    assert (await count_leases(db, "worker-1"), await count_leases(db, "worker-2")) == (2, 0)


async def test_a_job_is_taken_over_with_its_second_attempt_or_has_ended_before(db: Redis) -> None:
    await db.hset("sluice:job:a", mapping={"state": "running", "attempt": 2})
    await db.hset("sluice:job:b", mapping={"state": "finished", "attempt": 1})
    await until_taken_over(db, ["a", "b"], timeout_s=1)
    await db.hset("sluice:job:c", mapping={"state": "running", "attempt": 1})
    with pytest.raises(TimeoutError):
        await until_taken_over(db, ["c"], timeout_s=0.2)


def test_the_paced_worker_starts_without_mlx() -> None:
    """Importing it takes most of the time in which a worker starts, and the scenarios start many."""
    code = (
        "import sys, tests.support.chaos.paced; sys.exit(not {'mlx', 'mlx_lm', 'transformers'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
