"""One connection that many streams share."""

import asyncio

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.streaming import Subscription
from tests.waiting import until


async def seqs(client: Client, job_id: str) -> list[int]:
    return [event.seq async for event in client.stream(job_id)]


async def test_a_reader_that_is_cancelled_just_as_news_arrives_ends() -> None:
    mail = Subscription()
    reader = asyncio.create_task(mail.take(5))
    await asyncio.sleep(0)
    mail.put(b"news")
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()


@pytest.mark.parametrize("turns", range(0, 30, 3))
async def test_a_client_closes_at_any_moment(redis_url: str, turns: int) -> None:
    async with Redis.from_url(redis_url, socket_timeout=5) as theirs:
        client = Client(redis=theirs)
        stream = asyncio.create_task(seqs(client, "a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        while not stream.done():
            stream.cancel()  # again, where redis-py has lost it
            await asyncio.wait([stream], timeout=0.05)
        await asyncio.wait_for(client.aclose(), 60)


async def test_a_channel_that_is_left_and_entered_at_once_is_subscribed(client: Client, db: Redis) -> None:
    async with client._hub.listen("news") as subscription:
        assert await subscription.take(5) == []  # the subscription is acknowledged
    first = client._hub.listen("news")
    subscription = await first.__aenter__()
    await subscription.take(5)
    leaving = asyncio.create_task(first.__aexit__(None, None, None))
    await asyncio.sleep(0)
    entering = client._hub.listen("news")
    again = await entering.__aenter__()
    await leaving
    assert await again.take(5) == []
    await db.publish("news", "x")
    assert await again.take(5) == [b"x"]
    await entering.__aexit__(None, None, None)


async def test_a_client_that_was_closed_hears_again(db: Redis, redis_url: str) -> None:
    client = Client(redis_url)
    for _ in range(2):
        early = asyncio.create_task(seqs(client, "a"))
        await until(lambda: client._hub._pubsub is not None)
        early.cancel()
        await client.aclose()


async def test_a_client_that_decodes_is_refused(redis_url: str) -> None:
    async with Redis.from_url(redis_url, decode_responses=True) as decodes:
        with pytest.raises(ValueError, match="decode_responses"):
            Client(redis=decodes)


async def test_a_slow_reader_gets_what_it_missed_from_the_list() -> None:
    mail = Subscription()
    for k in range(5000):
        mail.put(str(k).encode())
    assert await mail.take(0.1) == []
    mail.put(b"after")
    assert await mail.take(0.1) == [b"after"]
