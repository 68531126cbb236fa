"""Lines of every endpoint: the body of each is what the gateway answers to the same request."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import Message
from openai.types import Batch, CreateEmbeddingResponse
from openai.types.responses import Response

from sluice import Client
from sluice.gateway import ServeSettings
from tests.batch.helpers import ids, read, write
from tests.end_to_end.test_cli import Command
from tests.gateway.gateways import HttpGateway, serving
from tests.gateway.messages.bodies import HOSTED, WEATHER
from tests.support.embedding import write_checkpoint
from tests.support.stack import Server, WorkerProcess

COUNT = [{"role": "user", "content": "Count to 4."}]
FUNCTION = {"type": "function", "name": "get_weather", "parameters": WEATHER["input_schema"]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
CUT = "max_output_tokens"
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "plain": {"messages": COUNT},
        "left out": {"messages": [{**COUNT[0], "cache_control": {"type": "ephemeral"}}]},
        "custom": {
            "messages": COUNT,
            "tools": [{"type": "custom", "custom": {"name": "code"}}],
            "tool_choice": {"type": "custom", "custom": {"name": "code"}},
            "max_tokens": 12,
        },
        "refused": {"messages": COUNT, "temperature": 9},
        "no tool": {"messages": COUNT, "tools": [{"type": "custom", "custom": {"name": 7}}]},
    },
    "/v1/responses": {
        "plain": {"input": "Count to 4.", "instructions": "Be short.", "metadata": {"a": "b"}, "stream": True},
        "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Count to 4."}]}]},
        "cut": {"input": "Count to 9.", CUT: 3},
        "logprobs": {"input": "Count to 4.", "top_logprobs": 1},
        "tool": {"input": "Weather?", "tools": [FUNCTION], "tool_choice": "required", "seed": 1, CUT: 40},
        "schema": {"input": "One?", "text": {"format": FORMAT}, "seed": 1, CUT: 60},
        "refused": {"input": "Count to 4.", "temperature": 9},
        "too few": {"input": []},
        "unknown": {"input": "a", "conversation": "conv_1"},
    },
    "/v1/messages": {
        "plain": {"messages": COUNT, "system": "Be short."},
        "hosted": {"messages": COUNT, "tools": [HOSTED]},
        "stop": {"messages": COUNT, "stop_sequences": ["3"]},
        "cut": {"messages": COUNT, "max_tokens": 2},
        "tool": {"messages": COUNT, "tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 40},
        "past": {
            "messages": [
                *COUNT,
                {"role": "assistant", "content": [{"type": "server_tool_use", "id": "a", "name": "b", "input": {}}]},
                *COUNT,
            ]
        },
        "too long": {"messages": [{"role": "user", "content": "word " * 20_000}]},
        "no messages": {"messages": []},
    },
}
EMBEDDED = {
    "numbers": {"input": ["Hello there!", "a"]},
    "base64": {"input": "Hello there!", "encoding_format": "base64"},
    "tokens": {"input": [[5, 6, 7]], "encoding_format": "float"},
    "refused": {"input": ""},
}


def lines(url: str, bodies: dict[str, dict[str, Any]], model: str) -> list[dict[str, Any]]:
    more = {"max_tokens": 64} if url == "/v1/messages" else {}
    how = {"temperature": 0} if url != "/v1/embeddings" else {}
    return [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": model, **how, **more, **body}}
        for name, body in bodies.items()
    ]


def comparable(body: dict[str, Any]) -> Any:
    """Return an answer or an error without its ids, its times, and what the prefix cache changes."""
    text = json.dumps(body)
    for id in {body.get("id"), body.get("request_id")} - {None}:
        text = text.replace(id, "ID").replace(re.sub(r"^(resp|msg)_", "", id), "ID")
    found = json.loads(text)
    for name in ("created", "created_at", "service_tier", "store"):
        found.pop(name, None)
    if found.get("completed_at") is not None:
        found["completed_at"] = 0
    usage = found.get("usage") or {}
    if "cache_read_input_tokens" in usage:
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    for details in ("prompt_tokens_details", "input_tokens_details"):
        usage.pop(details, None)
    found["sluice"] = found.get("sluice", {}).get("ignored")
    return _without_call_ids(found)


def _without_call_ids(value: Any) -> Any:
    """The ids of calls follow from that of the job."""
    if isinstance(value, dict):
        return {name: "call" if _is_call_id(name, each) else _without_call_ids(each) for name, each in value.items()}
    return [_without_call_ids(each) for each in value] if isinstance(value, list) else value


def _is_call_id(name: str, value: Any) -> bool:
    return name in ("id", "call_id") and isinstance(value, str) and value.startswith(("call_", "toolu_"))


async def by_http(url: str, gateway: HttpGateway, line: dict[str, Any]) -> tuple[int, Any]:
    body = {name: value for name, value in line["body"].items() if name != "stream"}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}{url}", json=body)
    return answer.status_code, comparable(answer.json())


def by_line(out: Path) -> dict[str, tuple[int, Any]]:
    errors = out.with_name("out.errors.jsonl")
    said = [*read(out), *(read(errors) if errors.exists() else [])]
    return {each["custom_id"]: (each["response"]["status_code"], comparable(each["response"]["body"])) for each in said}


@pytest.fixture(scope="module")
def gateway(worker: WorkerProcess) -> Iterator[HttpGateway]:
    with serving(worker.url, ServeSettings(_env_file=None)) as gateway:
        yield gateway


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize("url", BODIES)
async def test_each_line_is_answered_as_the_gateway_answers_it(
    client: Client, gateway: HttpGateway, tmp_path: Path, url: str
) -> None:
    many = lines(url, BODIES[url], "default")
    out = tmp_path / "out.jsonl"
    batch = await client.batch(write(tmp_path / "in.jsonl", *many), out)
    assert (batch.status, batch.endpoint, batch.errors) == ("completed", url, None)
    answered = by_line(out)
    for each in many:
        assert answered[each["custom_id"]] == await by_http(url, gateway, each)
    assert len(answered) == len(many)
    failed = [name for name, (status, _) in answered.items() if status >= 400]
    assert batch.request_counts.failed == len(failed) >= 2
    if url == "/v1/chat/completions":
        return
    kind = Response if url == "/v1/responses" else Message
    cut = [each for each in read(out) if each["custom_id"] == "cut"]
    assert [each["sluice"]["kind"] for each in cut] == ["cut"]
    assert batch.sluice.cut_off >= 1
    assert batch.usage.output_tokens == sum(each["response"]["body"]["usage"]["output_tokens"] for each in read(out))
    for each in read(out):
        kind.model_validate(each["response"]["body"], strict=True)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = write_checkpoint("bert", tmp_path_factory.mktemp("embeddings"))
    with Server() as server, WorkerProcess(server.url, model=folder, model_name="sentences") as process:
        yield process


@pytest.fixture
async def queue(embedder: WorkerProcess) -> AsyncIterator[Client]:
    async with Client(embedder.url) as client:
        yield client


async def test_embeddings_of_lines_are_those_of_the_gateway(
    queue: Client, embedder: WorkerProcess, tmp_path: Path
) -> None:
    many, out = lines("/v1/embeddings", EMBEDDED, "sentences"), tmp_path / "out.jsonl"
    batch = await queue.batch(write(tmp_path / "in.jsonl", *many), out)
    with serving(embedder.url, ServeSettings(_env_file=None)) as gateway:
        assert by_line(out) == {each["custom_id"]: await by_http("/v1/embeddings", gateway, each) for each in many}
    assert (batch.endpoint, batch.request_counts.completed, batch.request_counts.failed) == ("/v1/embeddings", 3, 1)
    assert batch.usage.input_tokens == sum(each["response"]["body"]["usage"]["prompt_tokens"] for each in read(out))
    Batch.model_validate_json(batch.to_json(), strict=True)
    for each in read(out):
        if each["custom_id"] != "base64":
            CreateEmbeddingResponse.model_validate(each["response"]["body"], strict=True)


@pytest.mark.usefixtures("alive")
def test_a_killed_feeder_s_run_of_responses_goes_on(sluice: Command, tmp_path: Path) -> None:
    bodies = {f"r{k}": {"input": f"Count to {3 + k % 7}."} for k in range(60)}
    write(tmp_path / "in.jsonl", *lines("/v1/responses", bodies, "default"))
    out, command = tmp_path / "out.jsonl", ("batch", "run", "in.jsonl", "-o", "out.jsonl", "--window", "10")
    with sluice.running(*command) as process:
        while not out.exists() or len(out.read_bytes().splitlines()) < 10:
            assert process.poll() is None
        process.kill()
        process.communicate()
    code, _, err = sluice(*command)
    assert code == 0, err
    assert sorted(ids(out)) == sorted(bodies)
    said = {each["custom_id"]: each["response"]["body"]["output"][-1]["content"][0]["text"] for each in read(out)}
    assert said == {f"r{k}": " ".join(str(n) for n in range(1, 4 + k % 7)) for k in range(60)}
