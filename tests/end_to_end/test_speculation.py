"""Drafts through Redis: the same answers, also after a crash, and a receipt of what was proposed and accepted."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from scripts.stack import WorkerProcess
from sluice import Client
from tests.end_to_end.test_exact import checkpoint

LIST = "Repeat after me: red key lamp river market red key lamp river market red key lamp river market"
SCHEMA = {
    "type": "object",
    "properties": {"the_name_of_the_customer": {"type": "string", "maxLength": 8}, "is_it_urgent": {"type": "boolean"}},
    "required": ["the_name_of_the_customer", "is_it_urgent"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": LIST}], "temperature": 0, "max_tokens": 60},
    {"messages": [{"role": "user", "content": LIST}], "temperature": 1.2, "seed": 7, "max_tokens": 40},
    {"messages": [{"role": "user", "content": "Count to 12."}], "temperature": 0, "max_tokens": 40},
    {"messages": [{"role": "user", "content": "My name is Petra."}], "seed": 3, "response_format": FORMAT},
]


async def answers(client: Client, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs = [await client.submit(request) for request in requests]
    return await asyncio.gather(*(client.result(job.id) for job in jobs))


def messages(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result["choices"][0]["message"] for result in results]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, a hybrid, in fp32."""
    return checkpoint("tiny_chat", tmp_path_factory.mktemp("tiny"))


async def test_drafts_change_no_answer_and_are_counted(redis_url: str, client: Client, model: Path) -> None:
    with WorkerProcess(redis_url, model=model, speculation="off"):
        plain = await answers(client, REQUESTS)
    assert all("speculation" not in result["sluice"] for result in plain)
    text = messages(plain)[0]["content"]
    predicted = {**REQUESTS[0], "prediction": {"type": "content", "content": text}}
    with WorkerProcess(redis_url, model=model, speculation="auto", lease_s=2) as worker:
        alone = [(await answers(client, [request]))[0] for request in [*REQUESTS, predicted]]
        assert messages(alone) == [*messages(plain), messages(plain)[0]]
        assert messages(await answers(client, REQUESTS)) == messages(plain)
        receipt = alone[-1]["sluice"]["speculation"]
        assert 0 < receipt["accepted"] <= receipt["proposed"]
        assert alone[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        refused = {**predicted, "speculation": False}
        (result,) = await answers(client, [refused])
        assert result["sluice"]["speculation"]["proposed"] == 0
        jobs = [await client.submit(request) for request in (REQUESTS[0], predicted)]
        events = client.stream(jobs[1].id)
        async for event in events:
            if event.seq > 2:
                break
        worker.signal(signal.SIGKILL)
    with WorkerProcess(redis_url, model=model, speculation="auto"):
        resumed = [await client.result(job.id) for job in jobs]
    assert messages(resumed) == [messages(plain)[0]] * 2
