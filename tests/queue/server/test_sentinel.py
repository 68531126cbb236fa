"""A worker whose URL names sentinels works for the primary that they name."""

import pytest
import redis
from redis.asyncio import Redis

from sluice.contract import keys
from tests.fakes import FakeChat
from tests.queue.helpers import ask, ended, listening, settings, until, working
from tests.support.sentinels import Sentinels
from tests.support.stack import Server
from worker.queue.job.claims import LeaseKeeper


async def test_a_worker_moves_to_the_primary_that_is_named_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.running._QUIET_S", 0.2)
    with Server() as first, Server() as second, Sentinels(first, count=1, replicas=0) as sentinels:
        async with (
            Redis.from_url(first.url) as before,
            Redis.from_url(second.url) as after,
            working(settings(sentinels.url), FakeChat().chat),
        ):
            await listening(before)
            await ask(before, "a", {})
            await ended(before, "a")
            sentinels.name(second)
            await listening(after)
            await ask(after, "b", {})
            await ended(after, "b")

            async def is_gone() -> bool:
                return bool((await before.pubsub_numsub(keys.CONTROL))[0][1] == 0)

            await until(is_gone)


def test_leases_are_renewed_on_the_primary_that_is_named_now() -> None:
    with Server() as first, Server() as second, Sentinels(first, count=1, replicas=0) as sentinels:
        keeper = LeaseKeeper(settings(sentinels.url), list, lambda claim: None, [])
        assert keeper._renew_leases([]) == []
        assert [_runs_scripts(server) for server in (first, second)] == [True, False]
        sentinels.name(second)
        assert keeper._renew_leases([]) == []
        assert _runs_scripts(second)


def _runs_scripts(server: Server) -> bool:
    with redis.Redis.from_url(server.url) as client:
        stats = client.info("commandstats")
    return "cmdstat_evalsha" in stats
