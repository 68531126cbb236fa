"""A client's stream among publications and items of others, and a lane full of them."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from schemas import keys
from sluice import Client, QueueFull, UnreadableLog

FOREIGN = [
    b"\xff", b"", b"x", b"[]", b"{}", b"null", b"[" * 100_000, b'"type"', b'{"type":"delta"}', b'{"type":[]}',
    b'{"type":"delta","id":"a","seq":"0","attempt":1,"ts":1}', b'{"type":"delta","id":"a","seq":0,"attempt":1,"ts":1}',
    b'{"type":"failed","id":"a","seq":0,"attempt":1,"ts":1,"error":1,"usage":{}}', b"9" * 5000,
]  # fmt: skip


def event(seq: int, type: str, **fields: Any) -> bytes:
    return json.dumps({"type": type, "id": "a", "seq": seq, "attempt": 1, "ts": 1.0, **fields}).encode()


DELTA, LAST = event(0, "delta", token_ids=[1]), event(1, "cancelled", reason="requested", usage={})


@pytest.mark.parametrize("foreign", FOREIGN)
async def test_a_foreign_publication_is_skipped(db: Redis, client: Client, foreign: bytes) -> None:
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


async def test_no_more_than_an_hour_is_estimated_for_a_lane_full_of_foreign_ids(db: Redis, client: Client) -> None:
    await db.zadd(keys.queue("default", "interactive"), {f"x{k}": 1 for k in range(1000)})
    await db.hset(keys.model("default"), "ada", "5 0.017 9999999999 0 0")
    with pytest.raises(QueueFull) as full:
        await client.submit([{"role": "user", "content": "Hello"}])
    assert full.value.retry_after_s == 3600
