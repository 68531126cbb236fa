"""No leaks: what a job leaves in Redis."""

import redis.asyncio


async def check_job_keys(db: redis.asyncio.Redis, job_id: str) -> None:
    """A job that has ended left its log, its result and its state, and all of them will expire."""
    name = job_id.encode()
    left = {key async for key in db.scan_iter() if name in key}
    assert left == {b"sluice:log:" + name, b"sluice:result:" + name, b"sluice:job:" + name}
    for key in left:
        assert await db.ttl(key) > 0, f"{key!r} would stay for ever"
    for queue in [key async for key in db.scan_iter(match="sluice:queue:*")]:
        assert await db.zscore(queue, job_id) is None, f"{job_id} is still in {queue!r}"
