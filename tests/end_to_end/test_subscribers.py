"""Late, dropped and absent subscribers: each token once, in order, one final event."""

import asyncio
import random

import redis.asyncio

from sluice import Client, Event
from tests.keyspace import check_job_keys
from tests.support.stack import WorkerProcess

LONG = {
    "messages": [{"role": "user", "content": "Count to 40."}],
    "max_tokens": 400,
    "logit_bias": {"2": -100},  # the end of the sequence: the row runs on to its limit
}


async def read(client: Client, job_id: str, *, after: int = -1, max_events: int = 10**6) -> list[Event]:
    events = []
    async for event in client.stream(job_id, after=after):
        events.append(event)
        if len(events) == max_events:
            break
    return events


async def test_early_late_dropped_and_returning_subscribers_see_the_same(
    worker: WorkerProcess, client: Client, db: redis.asyncio.Redis
) -> None:
    dice = random.Random(1)
    job = await client.submit(LONG)

    async def late() -> list[Event]:
        await asyncio.sleep(dice.uniform(0, 1.5))
        return await read(client, job.id)

    async def dropping() -> list[Event]:
        events: list[Event] = []
        while not events or not events[-1].final:
            after = events[-1].seq if events else -1
            events += await read(client, job.id, after=after, max_events=dice.randrange(1, 60))
            await asyncio.sleep(dice.uniform(0, 0.1))
        return events

    unbroken, *others = await asyncio.wait_for(
        asyncio.gather(read(client, job.id), *(late() for _ in range(6)), *(dropping() for _ in range(6))), 60
    )
    assert [event.seq for event in unbroken] == list(range(len(unbroken)))
    assert [event.final for event in unbroken].count(True) == 1
    assert unbroken[-1].type == "finished"
    for events in others:
        assert events == unbroken
    await check_job_keys(db, job.id)


async def test_a_job_that_nobody_listens_to_is_there_to_be_read(
    worker: WorkerProcess, client: Client, db: redis.asyncio.Redis
) -> None:
    job = await client.submit([{"role": "user", "content": "Count to 9."}])
    while not await db.exists(f"sluice:result:{job.id}"):
        await asyncio.sleep(0.02)
    events = await asyncio.wait_for(read(client, job.id), 60)
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[-1].type == "finished"
    assert (await client.result(job.id))["choices"][0]["message"]["content"] == "1 2 3 4 5 6 7 8 9"
