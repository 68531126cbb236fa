"""Running jobs with a cancel key are interrupted, whatever became of the message."""

from redis.asyncio import Redis

from schemas import keys
from scripts.stack import free_port
from tests.queue.held import HeldJobs, claim_of
from worker.errors import Cancelled
from worker.queue.cancel_keys import CancelKeys


async def test_the_jobs_that_have_a_key_are_interrupted_and_no_others(db: Redis) -> None:
    held = HeldJobs(db)
    await held.start(*map(claim_of, ("a", "b", "c")))
    for job_id in ("a", "c", "elsewhere"):
        await db.set(keys.cancel(job_id), "1")
    cancel_keys = CancelKeys(db, held.jobs)
    await cancel_keys.check(["a", "b", "elsewhere"])
    reasons = {job_id: held.jobs[job_id].interruption for job_id in ("a", "b", "c")}
    assert isinstance(reasons.pop("a"), Cancelled)
    assert reasons == {"b": None, "c": None}
    await cancel_keys.check_all()
    assert (held.jobs["b"].interruption, isinstance(held.jobs["c"].interruption, Cancelled)) == (None, True)
    await held.release()


async def test_redis_is_not_called_while_no_job_runs() -> None:
    async with Redis(port=free_port()) as nothing_listens:
        await CancelKeys(nothing_listens, HeldJobs(nothing_listens).jobs).check_all()
