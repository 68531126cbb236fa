"""Drafts through Redis: the same answers, also after a crash, and a receipt of what was proposed and accepted."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sluice import Client, Delta, Event
from tests.end_to_end.test_exact import checkpoint
from tests.engine.tiny import CONFIGS, write_checkpoint
from tests.support.stack import TINY_CHAT, WorkerProcess

LIST = "Repeat after me: red key lamp river market red key lamp river market red key lamp river market"
SCHEMA = {
    "type": "object",
    "properties": {"the_name_of_the_customer": {"type": "string", "maxLength": 8}, "is_it_urgent": {"type": "boolean"}},
    "required": ["the_name_of_the_customer", "is_it_urgent"],
    "additionalProperties": False,
}
PLAIN = "plain"  # the name under which one worker answers all tests without drafts
FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": LIST}], "temperature": 0, "max_tokens": 60},
    {"messages": [{"role": "user", "content": LIST}], "temperature": 1.2, "seed": 7, "max_tokens": 40},
    {"messages": [{"role": "user", "content": "Count to 12."}], "temperature": 0, "max_tokens": 40},
    {"messages": [{"role": "user", "content": "My name is Petra."}], "seed": 3, "response_format": FORMAT},
]


async def answers(client: Client, requests: list[dict[str, Any]], *, served: str = "default") -> list[dict[str, Any]]:
    jobs = [await client.submit(request, model=served) for request in requests]
    return await asyncio.gather(*(client.result(job.id) for job in jobs))


def messages(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result["choices"][0]["message"] for result in results]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, a hybrid, in fp32."""
    return checkpoint("tiny_chat", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain_worker(server_url: str, model: Path) -> Iterator[None]:
    with WorkerProcess(server_url, model=model, model_name=PLAIN, speculation="off"):
        yield


@pytest.mark.usefixtures("plain_worker")
async def test_drafts_change_no_answer_and_are_counted(redis_url: str, client: Client, model: Path) -> None:
    plain = await answers(client, REQUESTS, served=PLAIN)
    assert all("speculation" not in result["sluice"] for result in plain)
    text = messages(plain)[0]["content"]
    predicted = {**REQUESTS[0], "prediction": {"type": "content", "content": text}}
    with WorkerProcess(redis_url, model=model, speculation="auto"):
        alone = [(await answers(client, [request]))[0] for request in [*REQUESTS, predicted]]
        assert messages(await answers(client, REQUESTS)) == messages(plain)
        for _ in range(5):  # on a busy machine drafts seem to lose, and pause for a while
            if alone[-1]["sluice"]["speculation"]["accepted"]:
                break
            alone[-1:] = await answers(client, [predicted])
        assert messages(alone) == [*messages(plain), messages(plain)[0]]
        receipt = alone[-1]["sluice"]["speculation"]
        assert 0 < receipt["accepted"] <= receipt["proposed"]
        assert alone[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        refused = {**predicted, "speculation": False}
        (result,) = await answers(client, [refused])
        assert result["sluice"]["speculation"]["proposed"] == 0


@pytest.mark.slow  # the next test kills a worker in the middle of a verification
@pytest.mark.usefixtures("plain_worker")
async def test_a_killed_workers_answers_with_a_prediction_are_resumed(
    redis_url: str, client: Client, model: Path
) -> None:
    plain = await answers(client, REQUESTS[:1], served=PLAIN)
    predicted = {**REQUESTS[0], "prediction": {"type": "content", "content": messages(plain)[0]["content"]}}
    with WorkerProcess(redis_url, model=model, speculation="auto", lease_s=2) as worker:
        jobs = [await client.submit(request) for request in (REQUESTS[0], predicted)]
        events = client.stream(jobs[1].id)
        async for event in events:
            if event.seq > 2:
                break
        worker.signal(signal.SIGKILL)
    with WorkerProcess(redis_url, model=model, speculation="auto"):
        resumed = [await client.result(job.id) for job in jobs]
    assert messages(resumed) == [messages(plain)[0]] * 2


@pytest.mark.usefixtures("plain_worker")
@pytest.mark.parametrize(
    ("setting", "kind"), [("mtp_model", "mtp"), pytest.param("draft_model", "draft", marks=pytest.mark.slow)]
)
async def test_a_head_and_a_draft_model_change_no_answer_and_are_counted(
    redis_url: str, client: Client, model: Path, setting: str, kind: str
) -> None:
    plain = await answers(client, REQUESTS, served=PLAIN)
    given = {"module": "tests.end_to_end.verifying_all", "speculation": "auto", setting: TINY_CHAT}
    with WorkerProcess(redis_url, model=model, **given):
        alone = [(await answers(client, [request]))[0] for request in REQUESTS]
        together = await answers(client, REQUESTS)
    assert messages(alone) == messages(together) == messages(plain)
    receipts = [result["sluice"].get("speculation", {"kinds": {}}) for result in alone]
    assert sum(receipt["kinds"].get(kind, {"accepted": 0})["accepted"] for receipt in receipts) > 10, receipts


def test_a_checkpoint_of_another_model_is_refused_at_start(
    redis_url: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    other = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    said = refusal(redis_url, speculation="auto", mtp_model=str(other))
    assert said.startswith(f"SLUICE_MTP_MODEL={other}: its MTP head belongs to another model")


@dataclass(frozen=True)
class Streamed:
    """The events of a job, as a subscriber has seen them."""

    events: list[Event]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Delta) for token in event.token_ids]

    @property
    def kinds(self) -> list[str]:
        return [event.type for event in self.events]


async def streamed(client: Client, id: str) -> Streamed:
    return Streamed([event async for event in client.stream(id)])


@pytest.mark.usefixtures("plain_worker")
async def test_a_worker_killed_in_a_verification_is_resumed_with_the_same_tokens(
    redis_url: str, client: Client, model: Path
) -> None:
    before = [await client.submit(request, model=PLAIN) for request in REQUESTS]
    plain = await asyncio.gather(*(streamed(client, job.id) for job in before))
    texts = [message["content"] for message in messages([await client.result(job.id) for job in before])]
    predicted = [
        {**request, "prediction": {"type": "content", "content": text}}
        for request, text in zip(REQUESTS, texts, strict=True)
    ]
    killed = "tests.end_to_end.killed_in_verification"
    with WorkerProcess(redis_url, model=model, module=killed, speculation="auto", lease_s=2) as worker:
        jobs = [await client.submit(request) for request in predicted]
        assert await asyncio.to_thread(worker.wait) == -signal.SIGKILL
    with WorkerProcess(redis_url, model=model, speculation="auto"):
        resumed = await asyncio.wait_for(asyncio.gather(*(streamed(client, job.id) for job in jobs)), 60)
    assert [each.tokens for each in resumed] == [each.tokens for each in plain]
    assert [each.kinds[-1] for each in resumed] == ["finished"] * len(REQUESTS)
    cut = [each.kinds.index("resumed") for each in resumed if "resumed" in each.kinds]
    assert any("delta" in each.kinds[: max(cut, default=0)] for each in resumed), "nothing was cut"
    assert all("restarted" not in each.kinds for each in resumed)


@pytest.mark.slow  # tests/chat/test_speculation.py and tests/engine/speculation have each by itself
@pytest.mark.usefixtures("plain_worker")
async def test_stop_strings_within_drafts_logprobs_and_biases_are_as_without(
    redis_url: str, client: Client, model: Path
) -> None:
    text = messages(await answers(client, [REQUESTS[0]], served=PLAIN))[0]["content"]
    # At every place of a draft, and across its end.
    stops = [{"stop": text[at : at + 4]} for at in range(4, 40, 3)]
    others = [{"logprobs": True, "top_logprobs": 2}, {"logit_bias": {"2": -100, "300": 3}, "max_tokens": 70}]
    requests = [{**REQUESTS[0], **more} for more in (*stops, *others)]
    plain = await answers(client, requests, served=PLAIN)
    predicted = [{**each, "prediction": {"type": "content", "content": text}} for each in requests]
    with WorkerProcess(redis_url, model=model, module="tests.end_to_end.verifying_all", speculation="auto"):
        drafted = await answers(client, predicted)
    assert sum(each["sluice"]["speculation"]["accepted"] for each in drafted) > 100
    assert {each["choices"][0]["finish_reason"] for each in plain[: len(stops)]} == {"stop"}
    for one, other in zip(plain, drafted, strict=True):
        assert other["choices"][0]["message"] == one["choices"][0]["message"]
        assert other["choices"][0]["finish_reason"] == one["choices"][0]["finish_reason"]
        assert other["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
        assert logprobs(other) == pytest.approx(logprobs(one), abs=1e-3)


def logprobs(result: dict[str, Any]) -> list[float]:
    found = result["choices"][0].get("logprobs") or {}
    return [each["logprob"] for each in found.get("content") or []]
