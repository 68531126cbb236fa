"""A claimed job is run to one ending, whatever its function does and whatever Redis does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from arq.worker import func
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.phases import JobPhases
from tests.fakes import FakeChat
from tests.line import Line
from tests.queue.helpers import envelope, field, log, put, settings, types
from worker.errors import CancelJob, JobFailure
from worker.monitoring.metrics import Metrics
from worker.queue.job.claims import Claims
from worker.queue.job.job import Job
from worker.queue.job.publisher import Publisher
from worker.queue.job.runner import JobFunctions, JobRunner
from worker.queue.redis_server import ServerClock, redis_from_settings
from worker.settings import Settings

LARGE = "x" * 100_000  # does not come with the claim


class Runner:
    """Claims the one job that is queued, and runs it in a task of its own."""

    def __init__(self, redis: Redis, known: Settings) -> None:
        self.chat, self.stopping = FakeChat(), asyncio.Event()
        self.publisher, self._claims = Publisher(redis, ServerClock(), known), Claims(redis, known)
        self._runner = JobRunner(
            redis,
            JobFunctions([func(self.chat.chat, name="chat")], {}),
            self._claims,
            self.publisher,
            Metrics("m"),
            settings=known,
            stopping=self.stopping,
        )

    async def start(self, **changed: Any) -> Job:
        """Claim the job, with changes to the claim, and start it."""
        (claim,) = await self._claims.take("interactive", 1)
        claim = replace(claim, **changed)
        job = Job(claim, self.publisher.open(claim, on_lost=lambda: None), None)

        async def run() -> None:
            await self._runner.run(job)

        job.task = asyncio.create_task(run())
        return job

    async def run(self, **changed: Any) -> None:
        job = await self.start(**changed)
        assert job.task is not None
        await asyncio.wait_for(job.task, 60)


@asynccontextmanager
async def running(url: str) -> AsyncIterator[Runner]:
    known = settings(url)
    async with redis_from_settings(known) as redis:
        runner = Runner(redis, known)
        publishing = asyncio.create_task(runner.publisher.run())
        try:
            yield runner
        finally:
            publishing.cancel()


@pytest.fixture
async def runner(redis_url: str) -> AsyncIterator[Runner]:
    async with running(redis_url) as runner:
        yield runner


@pytest.mark.parametrize("more", ["", LARGE])
async def test_a_job_is_finished_with_the_result_of_its_function(db: Redis, runner: Runner, more: str) -> None:
    await put(db, "a", envelope({"say": ["Hello"], "more": more}))
    await runner.run()
    assert types(await log(db, "a")) == ["started", "delta", "finished"]
    assert json.loads(await db.get(keys.result("a")))["said"] == "Hello"


@pytest.mark.parametrize(
    ("changed", "ending"),
    [
        ({"cancelled": True}, ("cancelled", None)),
        ({"expired": True}, ("failed", "deadline")),
        ({"crashes": 3}, ("failed", "internal")),
        ({"body": b"", "body_bytes": 0}, ("failed", "invalid_request")),
        ({"body_bytes": 1 << 40}, ("failed", "too_large")),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
async def test_a_claim_that_cannot_run_is_ended_without_a_call(
    db: Redis, runner: Runner, changed: dict[str, Any], ending: tuple[str, str | None]
) -> None:
    await put(db, "a", envelope({"say": ["never"]}))
    await runner.run(**changed)
    (event,) = await log(db, "a")
    assert (event["type"], event.get("error", {}).get("type")) == ending
    assert runner.chat.began == []
    assert await db.hexists(keys.DEAD, "a") is (changed == {"crashes": 3})


async def test_an_error_of_the_function_is_an_internal_failure(
    db: Redis, runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    await put(db, "a", envelope({"then": "broken by the test"}))
    await runner.run()
    assert (await log(db, "a"))[-1]["error"]["type"] == "internal"
    assert "ValueError: broken by the test" in caplog.text


@pytest.mark.parametrize(
    ("param", "line"),
    [
        (None, "job a failed: invalid_request"),
        ("messages[2].content", "job a failed: invalid_request, 'messages[2].content'"),
        ("a\n" * 99, "job a failed: invalid_request, '" + "a\\n" * 40 + "'"),
    ],
)
async def test_the_log_names_the_field_of_a_request_that_failed(
    db: Redis, runner: Runner, caplog: pytest.LogCaptureFixture, param: str | None, line: str
) -> None:
    await put(db, "a", envelope({"then": "hang"}))
    with caplog.at_level("INFO", "sluice.queue"):
        job = await runner.start()
        while not runner.chat.running:
            await asyncio.sleep(0.005)
        job.interrupt(JobFailure("invalid_request", "a secret prompt", param=param))
        assert job.task is not None
        await asyncio.wait_for(job.task, 60)
    assert line in caplog.messages
    assert "secret" not in caplog.text


async def test_a_job_that_is_interrupted_ends_by_the_reason(db: Redis, runner: Runner) -> None:
    await put(db, "a", envelope({"then": "hang"}))
    job = await runner.start()
    while not runner.chat.running:
        await asyncio.sleep(0.005)
    job.interrupt(CancelJob("requested"))
    assert job.task is not None
    await asyncio.wait_for(job.task, 60)
    assert (await log(db, "a"))[-1]["reason"] == "requested"


async def test_a_task_that_is_cancelled_without_a_reason_requeues_its_job(db: Redis, runner: Runner) -> None:
    await put(db, "a", envelope({"then": "hang"}))
    job = await runner.start()
    while not runner.chat.running:
        await asyncio.sleep(0.005)
    assert job.task is not None
    job.task.cancel()
    await asyncio.wait_for(job.task, 60)
    assert await field(db, "a", "state") == "queued"


@pytest.mark.parametrize("unread", ["the log", "the body"])
async def test_a_job_that_a_stopping_worker_cannot_read_is_requeued(redis_url: str, db: Redis, unread: str) -> None:
    await put(db, "a", envelope({"say": ["never"], "more": LARGE if unread == "the body" else ""}))
    if unread == "the log":
        await db.rpush(keys.log("a"), json.dumps({"seq": 0, "type": "delta", "ts": 0, "content": "so far"}))
    earlier = JobPhases()
    earlier.begin(1, "bob", 0, queued_at=10, seen_at=0, now=12)
    async with Line(redis_url) as line, running(line.url) as runner:
        job = await runner.start(phases=earlier.as_json().encode())
        line.down()
        runner.stopping.set()
        await asyncio.sleep(0.3)
        assert job.task is not None
        assert not job.task.done(), "it is requeued when Redis is back"
        line.up()
        await asyncio.wait_for(job.task, 60)
    assert (await field(db, "a", "state"), runner.chat.began) == ("queued", [])
    kept = JobPhases.read((await field(db, "a", "phases") or "").encode())
    assert [each.worker for each in kept.phases()] == ["bob", "bob", "ada", "ada", "ada"]
