"""Prompts that cannot fit hold up nobody, and take no memory that grows with their number."""

import asyncio
import subprocess
import time

import pytest

from sluice import Client, Event, Failed, Started
from tests.support.stack import WorkerProcess

ORDINARY = {"messages": [{"role": "user", "content": "The quick brown fox. " * 150}], "max_tokens": 2}
SCHEMA = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 8,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
}


def digits(characters: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "1234567890" * (characters // 10)}]}


async def events_of(client: Client, job_id: str) -> list[Event]:
    return [event async for event in client.stream(job_id)]


def started_s(events: list[Event], submitted: float) -> float:
    """Until the prompt was tokenized and the schema compiled."""
    return next(event.ts for event in events if isinstance(event, Started)) - submitted


def resident_mb(worker: WorkerProcess) -> float:
    assert worker.process is not None
    said = subprocess.run(["ps", "-o", "rss=", "-p", str(worker.process.pid)], capture_output=True, check=True)
    return int(said.stdout) / 1e3


async def most_resident_mb(worker: WorkerProcess, until: asyncio.Event) -> float:
    highest_mb = 0.0
    while not until.is_set():
        highest_mb = max(highest_mb, await asyncio.to_thread(resident_mb, worker))
        await asyncio.sleep(0.05)
    return highest_mb


@pytest.mark.timing
async def test_an_ordinary_prompt_does_not_wait_for_six_too_large_ones(worker: WorkerProcess, client: Client) -> None:
    large = [await client.submit(digits(1_500_000)) for _ in range(6)]
    submitted = time.time()
    job = await client.submit(ORDINARY)
    assert started_s(await asyncio.wait_for(events_of(client, job.id), 30), submitted) < 5
    for each in large:
        (failed,) = [event for event in await events_of(client, each.id) if isinstance(event, Failed)]
        assert (failed.error.type, failed.error.retryable) == ("too_large", False)


@pytest.mark.slow
@pytest.mark.timing
async def test_a_schema_does_not_wait_for_eight_texts_as_large_as_a_body_may_be(
    worker: WorkerProcess, client: Client
) -> None:
    await client.result((await client.submit(SCHEMA)).id, timeout=30)
    before, over = resident_mb(worker), asyncio.Event()
    watching = asyncio.ensure_future(most_resident_mb(worker, over))
    large = [await client.submit(digits(14_500_000)) for _ in range(8)]
    submitted = time.time()
    job = await client.submit(SCHEMA)
    assert started_s(await asyncio.wait_for(events_of(client, job.id), 30), submitted) < 10
    for each in large:
        (failed,) = [event for event in await events_of(client, each.id) if isinstance(event, Failed)]
        assert failed.error.type == "too_large"
    over.set()
    # The body, its text, and what the text was read from, of all jobs at once.
    assert await watching - before < 8 * 4 * 14.5


async def test_the_refusal_names_the_context_and_the_count_whether_it_is_exact_or_not(
    worker: WorkerProcess, client: Client
) -> None:
    near, far = await client.submit(digits(32_760)), await client.submit(digits(1_500_000))
    for job, has in ((near, "327"), (far, "at least 40")):
        (failed,) = [event for event in await events_of(client, job.id) if isinstance(event, Failed)]
        assert failed.error.type == "too_large"
        said = "This model's maximum context length is 32768 tokens. However, your messages resulted in "
        assert failed.error.message.startswith(said + has)
