"""A client's stream among publications and items of others, and a lane full of them."""

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client, QueueFull, SyncClient, UnreadableLog, sse
from sluice.contract import keys
from tests.client.streaming import seqs

FOREIGN = [
    b"\xff", b"", b"x", b"[]", b"{}", b"null", b"[" * 100_000, b'"type"', b'{"type":"delta"}', b'{"type":[]}',
    b'{"type":"delta","id":"a","seq":"0","attempt":1,"ts":1}', b'{"type":"delta","id":"a","seq":0,"attempt":1,"ts":1}',
    b'{"type":"failed","id":"a","seq":0,"attempt":1,"ts":1,"error":1,"usage":{}}', b"9" * 5000,
]  # fmt: skip


def event(seq: int, type: str, **fields: Any) -> bytes:
    return json.dumps({"type": type, "id": "a", "seq": seq, "attempt": 1, "ts": 1.0, **fields}).encode()


DELTA, LAST = event(0, "delta", token_ids=[1]), event(1, "cancelled", reason="requested", usage={})


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_a_foreign_publication_is_skipped(
    db: Redis, client: Client, foreign: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 0.2)  # after which the list is read
    await db.rpush(keys.log("a"), DELTA)
    seqs = []
    async for each in client.stream("a"):
        seqs.append(each.seq)
        if each.seq == 0:
            await db.publish(keys.channel("a"), foreign)
            await db.rpush(keys.log("a"), LAST)
    assert seqs == [0, 1]


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_a_foreign_item_in_the_list_ends_the_stream_by_a_named_error(
    db: Redis, client: Client, foreign: bytes
) -> None:
    await db.rpush(keys.log("a"), foreign)
    with pytest.raises(UnreadableLog):
        async for _ in client.stream("a"):
            pass


SECOND = event(1, "delta", token_ids=[2])
# Logs whose numbers are not their indices, each with the number after which a stream begins.
MISNUMBERED = [
    ([event(1, "delta", token_ids=[1])], -1),  # the first is missing
    ([DELTA, event(2, "cancelled", reason="requested", usage={})], -1),  # a gap
    ([DELTA, DELTA], -1),  # a duplicate
    ([DELTA, SECOND, DELTA], -1),  # backwards
    ([DELTA, event(-1, "delta", token_ids=[1])], -1),
    ([DELTA, event(2**70, "delta", token_ids=[1])], -1),
    ([event(7, "delta", token_ids=[1])], 60),  # a number beyond the end
    ([DELTA, event(2**70, "delta", token_ids=[1])], 60),
    ([DELTA, event(-1, "delta", token_ids=[1])], 60),
    ([DELTA, SECOND, SECOND], 9),
    ([DELTA, DELTA, SECOND], 9),
]


@pytest.mark.parametrize(("log", "after"), MISNUMBERED)
async def test_a_wrong_number_in_the_list_ends_the_stream_by_a_named_error(
    db: Redis, client: Client, log: list[bytes], after: int
) -> None:
    await db.rpush(keys.log("a"), *log)
    with pytest.raises(UnreadableLog):
        await asyncio.wait_for(seqs(client, "a", after=after), 60)


async def test_a_wrong_number_that_is_found_after_a_gap_ends_the_stream(db: Redis, client: Client) -> None:
    await db.rpush(keys.log("a"), DELTA)

    async def read() -> None:
        async for _ in client.stream("a"):
            await db.rpush(keys.log("a"), event(5, "delta", token_ids=[1]))
            await db.publish(keys.channel("a"), event(5, "delta", token_ids=[1]))

    with pytest.raises(UnreadableLog):
        await asyncio.wait_for(read(), 60)


async def test_a_wrong_number_ends_server_sent_events_and_a_wait_for_the_result(db: Redis, client: Client) -> None:
    await db.rpush(keys.log("a"), event(3, "delta", token_ids=[1]))

    seen = list[bytes]()

    async def read() -> None:
        async for frame in sse.frames(client, "a"):
            seen.append(frame)

    with pytest.raises(UnreadableLog):
        await asyncio.wait_for(read(), 60)
    assert seen[-1].startswith(b"event: unknown\n")  # or an EventSource would ask again and again
    with pytest.raises(UnreadableLog):
        await client.result("a", timeout=60)


async def test_a_wrong_number_ends_the_streams_of_a_blocking_client(db: Redis, redis_url: str) -> None:
    await db.rpush(keys.log("a"), event(3, "delta", token_ids=[1]))

    def read(client: SyncClient) -> None:
        with pytest.raises(UnreadableLog):
            list(client.stream("a"))
        with pytest.raises(UnreadableLog):
            list(sse.sync_frames(client, "a"))

    with SyncClient(redis_url) as client:
        await asyncio.wait_for(asyncio.to_thread(read, client), 60)


async def test_a_stream_from_beyond_the_end_waits_while_the_list_grows(
    db: Redis, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 0.05)
    await db.rpush(keys.log("a"), DELTA)
    reading = asyncio.create_task(seqs(client, "a", after=1))
    await asyncio.sleep(0.3)  # the list was read from beyond its end
    await db.rpush(keys.log("a"), SECOND, event(2, "cancelled", reason="requested", usage={}))
    assert await asyncio.wait_for(reading, 60) == [2]


async def test_no_more_than_an_hour_is_estimated_for_a_lane_full_of_foreign_ids(db: Redis, client: Client) -> None:
    await db.zadd(keys.queue("default", "interactive"), {f"x{k}": 1 for k in range(1000)})
    await db.hset(keys.model("default"), "ada", "5 0.017 9999999999 0 0")
    with pytest.raises(QueueFull) as full:
        await client.submit([{"role": "user", "content": "Hello"}])
    assert full.value.retry_after_s == 3600
