"""Jobs that are read by a gateway with keys, and settled for the limits of the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client, JobFailed
from sluice.gateway import ServeSettings
from sluice.gateway.caller import Limits
from sluice.gateway.gateway import Gateway
from sluice.gateway.jobs import Jobs
from sluice.gateway.key_file import Key, key_digest
from sluice.transport import Retries

KEY = Key(id="k-1", sha256=key_digest("secret"), tenant="acme", tokens_per_minute=6_000)
FAILED: dict[str, Any] = {
    "type": "failed",
    "id": "j",
    "seq": 1,
    "attempt": 1,
    "ts": 0.0,
    "error": {"type": "deadline", "message": "It took too long.", "retryable": True},
    "usage": {"prompt_tokens": 900, "completion_tokens": 100},
}


@pytest.fixture
def jobs(client: Client, tmp_path: Path) -> Jobs:
    (tmp_path / "keys.json").write_text('{"keys": []}')
    return Gateway(client, ServeSettings(_env_file=None, keys=tmp_path / "keys.json")).jobs


@pytest.mark.parametrize(
    ("fields", "result", "used"),
    [
        ({}, FAILED, 1_000),
        ({"function": "count"}, FAILED, 0),
        ({}, {**FAILED, "usage": None}, 5_000),  # no worker wrote it: the estimate stands
    ],
)
async def test_a_job_that_failed_is_settled_by_its_final_event_and_a_token_count_by_none(
    jobs: Jobs, db: Redis, fields: dict[str, str], result: dict[str, Any], used: int
) -> None:
    limits = Limits(db, Retries(db, None))
    await limits.reserve(KEY, ["j"], 5_000, "m")
    await db.hset("sluice:job:j", mapping={"state": "failed", **fields})
    await db.set("sluice:result:j", json.dumps(result))
    with pytest.raises(JobFailed):
        await jobs.result("j")
    assert 6_000 - used <= (await limits.read(KEY)).tokens_left < 6_000 - used + 200
