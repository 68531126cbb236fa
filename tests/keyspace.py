"""No leaks: what a job leaves in Redis."""

import json

import redis.asyncio

from sluice.contract.events import FINAL

NAMES = {  # prefix: does it outlive its job?
    b"sluice:log:": True,
    b"sluice:result:": True,
    b"sluice:job:": True,
    b"sluice:worker:": True,
    b"sluice:model:": True,
    b"sluice:cron:": True,
    b"sluice:fleet:": True,
    b"sluice:ready:": True,
    b"sluice:px:": True,
    b"sluice:cancel:": False,
    b"sluice:queue:": False,
    b"sluice:index:": False,
    b"arq:job:": False,
    b"arq:in-progress:": False,
    b"arq:retry:": False,
    b"arq:abort": False,
}


async def check_job_keys(db: redis.asyncio.Redis, job_id: str) -> None:
    """A job that has ended left its log, its result and its state, and all of them will expire."""
    name = job_id.encode()
    left = {key async for key in db.scan_iter() if name in key}
    assert left == {b"sluice:log:" + name, b"sluice:result:" + name, b"sluice:job:" + name}
    for key in left:
        assert await db.ttl(key) > 0, f"{key!r} would stay for ever"
    for queue in [key async for key in db.scan_iter(match="sluice:queue:*")]:
        assert await db.zscore(queue, job_id) is None, f"{job_id} is still in {queue!r}"


async def check_all_ended(db: redis.asyncio.Redis) -> None:
    """Check a server on which every job has ended: nothing is queued or leased, all of it will expire, each job has
    one final event, and its state, its result and the numbers of its events agree with that."""
    found = [key async for key in db.scan_iter()]
    for key in found:
        outlives = [stays for prefix, stays in NAMES.items() if key.startswith(prefix)]
        assert outlives == [True], f"{key!r} is there although every job has ended"
        assert await db.pttl(key) > 0, f"{key!r} would stay for ever"
    for key in found:
        if key.startswith(b"sluice:job:"):
            await _check_ending(db, key.removeprefix(b"sluice:job:"))


async def _check_ending(db: redis.asyncio.Redis, name: bytes) -> None:
    said = [json.loads(raw) for raw in await db.lrange(b"sluice:log:" + name, 0, -1)]
    assert [event["seq"] for event in said] == list(range(len(said))), f"{name!r}: the numbers of the events"
    assert [event["type"] in FINAL for event in said] == [False] * (len(said) - 1) + [True], f"{name!r}: the endings"
    final, stored = said[-1], json.loads(await db.get(b"sluice:result:" + name))
    assert (await db.hget(b"sluice:job:" + name, "state")).decode() == final["type"], f"{name!r}: the state"
    if final["type"] == "finished":
        assert "type" not in stored, f"{name!r}: the result of a good ending is no event"
    else:
        assert stored == final, f"{name!r}: the result of a bad ending is its event"
