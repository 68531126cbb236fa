"""Embeddings through the queue and the gateway: the vectors are those of mlx-embeddings, whoever else asks."""

import asyncio
import base64
import json
import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
import redis.asyncio
from mlx_embeddings import generate, load
from openai import AsyncOpenAI, BadRequestError

from schemas import EmbeddingResult
from sluice import Client, DeadLetter, JobCancelled, JobFailed, SyncClient
from sluice.contract import keys
from sluice.gateway import ServeSettings
from tests.end_to_end.test_cli import run_here
from tests.end_to_end.test_up import ENV, running
from tests.gateway.gateways import HttpGateway, serving
from tests.keyspace import check_all_ended, check_job_keys
from tests.support.embedding import VOCAB, write_checkpoint
from tests.support.stack import Server, WorkerProcess, free_port
from tests.waiting import until

NAME = "sentences"
CONTEXT = 130
TEXTS = ["Hello there!", "a", "The cat sat on the mat. " * 4, "日本 🚀", "Hello there!", "b"]
LEASE_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("bert", tmp_path_factory.mktemp("embeddings"))


@pytest.fixture(scope="module")
def embedder(model: Path) -> Iterator[WorkerProcess]:
    with Server() as server, WorkerProcess(server.url, model=model, model_name=NAME, lease_s=LEASE_S) as process:
        yield process


@pytest.fixture(scope="module")
def gateway(embedder: WorkerProcess) -> Iterator[HttpGateway]:
    with serving(embedder.url, ServeSettings(_env_file=None)) as gateway:
        yield gateway


@pytest.fixture
async def openai(gateway: HttpGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def queue(embedder: WorkerProcess) -> AsyncIterator[Client]:
    async with Client(embedder.url) as client:
        yield client


@cache
def library(folder: Path) -> tuple[Any, Any]:
    return load(str(folder))


def alone(folder: Path, text: str) -> list[float]:
    """Return what mlx-embeddings makes of a text."""
    found: list[float] = generate(*library(folder), text).text_embeds[0].astype(mx.float32).tolist()
    return found


def ids(folder: Path, text: str) -> list[int]:
    found: list[int] = library(folder)[1].encode(text)
    return found


async def test_openai_s_client_gets_the_library_s_vectors(openai: AsyncOpenAI, model: Path) -> None:
    expected = [alone(model, text) for text in TEXTS]
    tokens = sum(len(ids(model, text)) for text in TEXTS)
    for given in ({}, {"encoding_format": "float"}):  # by default the client asks for base64, and decodes it
        answer = await openai.embeddings.create(model=NAME, input=TEXTS, **given)
        assert [each.embedding for each in answer.data] == expected
        assert [each.index for each in answer.data] == [*range(len(TEXTS))]
        assert (answer.object, answer.model, answer.data[0].object) == ("list", NAME, "embedding")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


async def test_base64_holds_the_same_numbers(gateway: HttpGateway, model: Path) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url) as http:
        body = {"model": NAME, "input": TEXTS}
        numbers = (await http.post("/embeddings", json=body)).json()
        encoded = (await http.post("/embeddings", json={**body, "encoding_format": "base64"})).json()
    vectors = [alone(model, text) for text in TEXTS]
    assert [each["embedding"] for each in numbers["data"]] == vectors
    packed = [base64.b64encode(struct.pack("<64f", *vector)).decode() for vector in vectors]
    assert [each["embedding"] for each in encoded["data"]] == packed
    assert numbers["usage"] == encoded["usage"]


async def test_an_alias_of_an_embedding_model_is_answered_with_its_vectors(
    openai: AsyncOpenAI, queue: Client, model: Path
) -> None:
    assert await queue.set_alias("vectors", NAME) is None
    try:
        answer = await openai.embeddings.create(model="vectors", input=TEXTS[0])
    finally:
        await queue.set_alias("vectors", None)
    assert answer.data[0].embedding == alone(model, TEXTS[0])


async def test_every_form_of_input_is_read(openai: AsyncOpenAI, model: Path) -> None:
    text = TEXTS[0]
    forms: Sequence[Any] = [text, [text], ids(model, text), [ids(model, text)]]
    for form in forms:
        answer = await openai.embeddings.create(model=NAME, input=form, encoding_format="float", user="ann")
        assert [each.embedding for each in answer.data] == [alone(model, text)]


async def test_a_request_with_a_key_that_is_sent_again_gets_the_answer_of_its_first_job(openai: AsyncOpenAI) -> None:
    headers = {"Idempotency-Key": "again"}
    first, second = [
        await openai.embeddings.create(model=NAME, input=TEXTS, extra_headers=headers) for _ in range(2)
    ]  # fmt: skip
    assert first == second
    assert first.id.startswith("embd-")  # type: ignore[attr-defined]


async def test_dimensions_are_the_first_numbers_scaled_to_the_length_1(openai: AsyncOpenAI, model: Path) -> None:
    for dimensions in (1, 10, 64):
        answer = await openai.embeddings.create(
            model=NAME, input=TEXTS[0], dimensions=dimensions, encoding_format="float"
        )
        vector = mx.array(alone(model, TEXTS[0])[:dimensions])
        assert answer.data[0].embedding == pytest.approx((vector / mx.linalg.norm(vector)).tolist(), abs=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "input", "input is missing"),
    "an empty text": ({"input": ""}, "input", "must not be empty"),
    "no texts": ({"input": []}, "input", "must not be empty"),
    "an empty text of several": ({"input": ["a", ""]}, "input[1]", "must not be empty"),
    "mixed": ({"input": ["a", 1]}, "input", "mixes strings, token ids and lists"),
    "too many": ({"input": ["a"] * 2049}, "input", "2,049 entries; at most 2,048"),
    "no token of the model": ({"input": [VOCAB]}, "input", f"no token {VOCAB}; its ids are below {VOCAB}"),
    "a negative token": ({"input": [[1], [2, -1]]}, "input[1][1]", "the least is 0"),
    "too many dimensions": ({"input": "a", "dimensions": 65}, "dimensions", "the model's vectors have 64"),
    "an unknown encoding": ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    "an unknown field": ({"input": "a", "dimension": 8}, "dimension", "did you mean dimensions"),
    "too long an input": (
        {"input": [[5], [5] * 131]}, "input[1]",
        f"maximum context length is {CONTEXT} tokens. However, the input has 131 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_request_is_refused_with_a_sentence_that_names_the_field(gateway: HttpGateway, name: str) -> None:
    body, param, sentence = REFUSED[name]
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as http:
        answer = await http.post("/embeddings", json={"model": NAME, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert sentence in error["message"]


async def test_an_answer_that_would_be_too_large_is_refused_before_it_is_computed(redis_url: str, model: Path) -> None:
    limit = 20_000
    with WorkerProcess(redis_url, model=model, max_request_bytes=limit, lease_s=LEASE_S):
        async with Client(redis_url) as client:
            assert len(await client.embed(["a"] * 50)) == 50
            with pytest.raises(JobFailed, match="send at most 58 of them") as refused:
                await client.embed(["a"] * 59)
            assert refused.value.error.type == "too_large"
            job = await client.submit({"input": ["a"] * 14}, function="embed")
            with pytest.raises(JobFailed, match="send at most 13 of them, or ask for base64"):
                await client.result(job.id)


async def test_a_chat_is_refused_by_an_embedding_model_and_an_embedding_by_a_chat_model(
    openai: AsyncOpenAI, queue: Client, worker: WorkerProcess
) -> None:
    with pytest.raises(BadRequestError, match="needs a chat model") as refused:
        await openai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Hi"}])
    assert refused.value.code == "unsupported"
    with pytest.raises(JobFailed, match="needs a chat model"):
        await queue.count_tokens([{"role": "user", "content": "Hi"}], model=NAME)
    async with Client(worker.url) as chats:
        with pytest.raises(JobFailed, match="needs an embedding model"):
            await chats.embed("Hi")


async def test_the_list_of_models_says_which_embed(openai: AsyncOpenAI) -> None:
    (listed,) = [each async for each in openai.models.list()]
    assert listed.id == NAME
    assert listed.sluice["embeddings"] is True  # type: ignore[attr-defined]
    assert listed.max_model_len == CONTEXT  # type: ignore[attr-defined]


async def test_the_client_s_call_returns_the_vectors(queue: Client, embedder: WorkerProcess, model: Path) -> None:
    expected = [alone(model, text) for text in TEXTS]
    assert await queue.embed(TEXTS, model=NAME) == expected
    assert await queue.embed(TEXTS[0], model=NAME, lane="batch") == expected[:1]
    assert [len(each) for each in await queue.embed([[5, 6], [7]], model=NAME, dimensions=8)] == [8, 8]
    with SyncClient(embedder.url) as client:
        assert await asyncio.to_thread(client.embed, TEXTS[:1], model=NAME) == expected[:1]


async def test_a_job_has_a_final_event_alone_and_a_result_of_the_contract(
    queue: Client, embedder: WorkerProcess, model: Path
) -> None:
    request = {"input": TEXTS, "user": "ann", "safety_identifier": "acme", "metadata": {"a": 1}}
    job = await queue.submit(request, model=NAME, function="embed")
    result = EmbeddingResult.model_validate_json(json.dumps(await queue.result(job.id)))
    assert [each.embedding for each in result.data] == [alone(model, text) for text in TEXTS]
    (event,) = [event async for event in queue.stream(job.id)]
    assert (event.type, event.usage.prompt_tokens) == ("finished", result.usage.prompt_tokens)  # type: ignore[attr-defined]
    told = result.sluice.model_dump()
    assert (told["tenant"], told["user"], told["metadata"]) == ("acme", "ann", {"a": 1})
    await check_job_keys(queue.redis, job.id)


async def test_many_requests_at_once_get_the_vectors_that_each_gets_alone(queue: Client, model: Path) -> None:
    words = "the cat sat on a mat and saw one more cat there".split()
    texts = [" ".join(words[: 1 + at % 11]) + f" {at}" for at in range(40)]
    found = await asyncio.gather(
        *(queue.embed([text, texts[0]], model=NAME, lane="batch" if at % 3 == 0 else None)
          for at, text in enumerate(texts))
    )  # fmt: skip
    assert found == [[alone(model, text), alone(model, texts[0])] for text in texts]


async def test_a_job_past_its_deadline_or_cancelled_ends_and_leaves_nothing(
    redis_url: str, db: redis.asyncio.Redis, model: Path, client: Client
) -> None:
    large = {"input": ["a b c d e f g h " * 4] * 300}
    with WorkerProcess(redis_url, model=model, lease_s=LEASE_S):
        late = await client.submit({**large, "deadline_s": 0.05}, function="embed")
        with pytest.raises(JobFailed) as failed:
            await client.result(late.id, timeout=30)
        assert failed.value.error.type == "deadline"
        job = await client.submit(large, function="embed")
        await until(lambda: is_running(client, job.id))
        assert await client.cancel(job.id) == "requested"
        with pytest.raises(JobCancelled):
            await client.result(job.id, timeout=30)
        assert await client.embed(TEXTS[0]) == [alone(model, TEXTS[0])]
    await check_all_ended(db)


async def is_running(client: Client, job_id: str) -> bool:
    return await client.state(job_id) == "running"


async def test_a_job_whose_worker_is_killed_is_computed_again_by_another(
    redis_url: str, db: redis.asyncio.Redis, model: Path, client: Client
) -> None:
    texts = [f"{TEXTS[2]} {at}" for at in range(200)]
    first = WorkerProcess(redis_url, model=model, lease_s=LEASE_S)
    with first, WorkerProcess(redis_url, model=model, lease_s=LEASE_S) as second:
        second.signal(signal.SIGSTOP)  # so that the first has the job
        job = await client.submit({"input": texts, "encoding_format": "base64"}, function="embed", id="killed")
        await until(lambda: is_running(client, job.id))
        first.kill()
        second.signal(signal.SIGCONT)
        result = EmbeddingResult.model_validate_json(json.dumps(await client.result(job.id, timeout=60)))
        assert (result.sluice.attempt, result.sluice.worker) == (2, second.name)
        vector = struct.pack("<64f", *alone(model, texts[7]))
        assert result.data[7].embedding == base64.b64encode(vector).decode()
        assert len(json.loads(await db.get(keys.result(job.id)))["data"]) == len(texts)
    await check_all_ended(db)


@pytest.mark.slow  # the test above has a worker that is killed
async def test_a_worker_that_is_stopped_ends_its_job_or_gives_it_back(
    redis_url: str, model: Path, client: Client
) -> None:
    texts = [f"{TEXTS[2]} {at}" for at in range(200)]
    with WorkerProcess(redis_url, model=model, lease_s=LEASE_S, grace_s=0) as first:
        job = await client.submit({"input": texts}, function="embed")
        await until(lambda: is_running(client, job.id))
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    with WorkerProcess(redis_url, model=model, lease_s=LEASE_S):
        result = await client.result(job.id, timeout=60)
    assert len(result["data"]) == len(texts)


def test_the_check_of_a_model_says_that_it_embeds(model: Path, tmp_path: Path) -> None:
    code, out, _ = run_here("check", str(model), "--json", env={}, folder=tmp_path)
    facts = json.loads(out)
    assert (code, facts["architecture"], facts["context"], facts["embeddings"]) == (0, "bert", CONTEXT, True)
    code, out, _ = run_here("check", str(model), env={}, folder=tmp_path)
    assert code == 0
    assert "embeddings" in out


@pytest.mark.slow
def test_the_lines_that_up_prints_for_an_embedding_model_work_as_printed(model: Path, tmp_path: Path) -> None:
    with running(tmp_path, "--name", NAME, "--http-port", str(free_port()), model=model) as up:
        up.until_said("Ctrl-C here")
        lines = [line for line in up.said().partition("ready.")[2].splitlines() if line.startswith("  ")]
        script = "set -e\n" + "\n".join(lines)
        done = subprocess.run(["bash", "-c", script], env=ENV, capture_output=True, text=True, check=True)
        vector, answer = done.stdout.splitlines()
        expected = [alone(model, "Hello!")]
        assert (json.loads(vector), [each["embedding"] for each in json.loads(answer)["data"]]) == (expected, expected)
        assert up.end() == 0, up.said()


def test_prompts_to_warm_are_refused(refusal: Callable[..., str], redis_url: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('["Be brief."]')
    assert "embedding model" in refusal(redis_url, model=str(model), prefix_warm=tmp_path / "prompts.json")


@pytest.mark.parametrize(("named", "kind"), [("embed", "embed"), ("count", "count"), ("chat", "chat"), ("x", "chat")])
def test_a_dead_letter_is_tried_again_as_the_job_that_it_was(named: str, kind: str) -> None:
    letter = DeadLetter("a", NAME, "batch", 3, 0.0, {}, json.dumps({"f": named, "a": [{"input": "a"}]}))
    assert letter.function == kind
