"""A client of sentinels follows the primary that they name, also if the server before it answers still."""

import asyncio
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from sluice import Client, ServerUnreachable
from sluice.contract import keys
from tests.client.streaming import HELLO, event, say, seqs, subscribed
from tests.client.test_outages import GAP_S
from tests.support.sentinels import Sentinels
from tests.support.stack import Server, free_port


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server, Sentinels]]:
    """Two servers, and a sentinel that names the first as the primary."""
    with Server() as first, Server() as second, Sentinels(first, count=1, replicas=0) as sentinels:
        yield first, second, sentinels


async def test_commands_and_streams_move_to_the_primary_that_is_named_now(
    pair: tuple[Server, Server, Sentinels], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.streaming._QUIET_S", 0.2)
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 3600)  # the list is read only after a gap
    first, second, sentinels = pair
    async with (
        Client(sentinels.url) as client,
        Redis.from_url(first.url) as before,
        Redis.from_url(second.url) as after,
    ):
        stream = asyncio.create_task(seqs(client, "a", unknown_s=60))
        await subscribed(before, keys.channel("a"))
        await client.submit(HELLO, id="b")
        assert await before.zcard(keys.queue("default", "interactive")) == 1
        sentinels.name(second)
        await subscribed(after, keys.channel("a"))
        await say(after, event(0), event(1, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1]
        assert (await client.submit(HELLO, id="b")).new
        assert await after.zcard(keys.queue("default", "interactive")) == 1


async def test_a_sentinel_that_is_gone_costs_less_than_an_outage(pair: tuple[Server, Server, Sentinels]) -> None:
    url = pair[2].url.replace("://", f"://127.0.0.1:{free_port()},")
    async with Client(url) as client:
        assert await client.ping() is None


async def test_an_unknown_service_is_named_in_the_error(pair: tuple[Server, Server, Sentinels]) -> None:
    async with Client(pair[2].url.replace("/main/", "/mian/"), outage_s=0.1) as client:
        with pytest.raises(ServerUnreachable, match="'mian'"):
            await client.ping()
