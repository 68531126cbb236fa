"""A gateway whose user on the server has the permissions of docs/operations.md, and no more."""

import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from tests.gateway.gateways import serving
from tests.support.stack import ROOT
from tests.waiting import until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "Hi."}], "say": ["1", " 2"]}
ENDLESS = {**HELLO, "say": ["1"] * 10_000, "pace_s": 0.05}


def rules() -> list[str]:
    """The rules of the user in the document."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (line,) = re.findall(r"^ACL SETUSER gateway on >PASSWORD (.*)$", page, re.MULTILINE)
    return line.split()


@pytest.fixture
async def user(db: Redis) -> AsyncIterator[str]:
    await db.execute_command("ACL", "SETUSER", "gateway", "reset", "on", ">PASSWORD", "resetchannels", *rules())
    await db.execute_command("ACL", "LOG", "RESET")
    yield "gateway:PASSWORD@"
    await db.execute_command("ACL", "DELUSER", "gateway")


def test_every_command_of_the_scripts_is_allowed() -> None:
    package = files("sluice")
    folders = [
        package / "contract" / "lua",
        *(package / "gateway" / each / "lua" for each in (".", "responses")),
    ]
    scripts = [file.read_text() for folder in folders for file in folder.iterdir() if file.name.endswith(".lua")]
    called = {name.lower() for script in scripts for name in re.findall(r"redis\.p?call\('([A-Z]+)'", script)}
    assert {f"+{name}" for name in called} <= set(rules())


@pytest.mark.usefixtures("fake_worker")
async def test_the_documented_permissions_are_enough_for_every_route(
    redis_url: str, db: Redis, user: str, tmp_path: Path
) -> None:
    key = {
        "id": "k",
        "sha256": key_digest("secret"),
        "tenant": "a",
        "requests_per_minute": 1_000,
        "tokens_per_minute": 10**9,
    }
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [key]}))
    settings = ServeSettings(_env_file=None, keys=tmp_path / "keys.json", no_worker_s=0.5, batch_dir=tmp_path)
    with serving(redis_url.replace("redis://", f"redis://{user}"), settings) as gateway:
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60, headers=headers) as http:
            statuses = await use_completions(http) | await use_responses(http) | await use_the_rest(http)
            statuses |= await use_batches(http)
    assert {name: status for name, status in statuses.items() if status != 200} == {"nobody": 404, "nothing": 404}
    denied = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in await db.execute_command("ACL", "LOG")]
    assert [
        each for each in denied if each[b"username"] == b"gateway" and not each[b"object"].startswith(b"client")
    ] == []


async def use_completions(http: httpx.AsyncClient) -> dict[str, int]:
    whole = await http.post(CHAT, json=HELLO)
    streamed = await http.post(CHAT, json={**HELLO, "stream": True}, headers={"idempotency-key": "k"})
    again = await http.post(CHAT, json={**HELLO, "stream": True}, headers={"idempotency-key": "k"})
    path = f"{CHAT}/{streamed.headers['x-request-id']}"
    async with http.stream("POST", CHAT, json={**ENDLESS, "stream": True}) as left:
        cancelled = await http.post(f"{CHAT}/{left.headers['x-request-id']}/cancel")
    answers = {
        "whole": whole,
        "streamed": streamed,
        "again": again,
        "retrieved": await http.get(path),
        "resumed": await http.get(f"{path}/stream", headers={"last-event-id": "1"}),
        "cancelled": cancelled,
        "nobody": await http.post(CHAT, json={**HELLO, "model": "nobody"}, headers={"idempotency-key": "other"}),
        "nothing": await http.get(f"{CHAT}/nothing"),
    }
    return {name: answer.status_code for name, answer in answers.items()}


async def use_responses(http: httpx.AsyncClient) -> dict[str, int]:
    body: dict[str, Any] = {"input": "Hi."}
    first = await http.post(RESPONSES, json=body)
    path = f"{RESPONSES}/{first.json()['id']}"
    later = await http.post(RESPONSES, json={**body, "previous_response_id": first.json()["id"], "stream": True})
    behind = await http.post(RESPONSES, json={**body, "background": True})
    answers = {
        "response": first,
        "later response": later,
        "response in the background": behind,
        "response retrieved": await http.get(path),
        "response streamed": await http.get(f"{path}?stream=true"),
        "input items": await http.get(f"{path}/input_items"),
        "response cancelled": await http.post(f"{RESPONSES}/{behind.json()['id']}/cancel"),
        "response deleted": await http.delete(path),
    }
    return {name: answer.status_code for name, answer in answers.items()}


async def use_batches(http: httpx.AsyncClient) -> dict[str, int]:
    file = await http.post("/v1/files", files={"file": ("in.jsonl", b"{}\n")}, data={"purpose": "batch"})
    body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    made = await http.post("/v1/batches", json=body)
    path = f"/v1/batches/{made.json().get('id')}"
    answers = {
        "file": file,
        "batch": made,
        "batch retrieved": await http.get(path),
        "batch cancelled": await http.post(f"{path}/cancel"),
        "metrics": await http.get("/metrics"),
    }
    return {name: answer.status_code for name, answer in answers.items()}


async def use_the_rest(http: httpx.AsyncClient) -> dict[str, int]:
    message = {"max_tokens": 9, "messages": HELLO["messages"], "model": "default"}

    async def is_ready() -> bool:
        return (await http.get("/readyz")).status_code == 200

    await until(is_ready)
    answers = {
        "message": await http.post(MESSAGES, json=message),
        "models": await http.get("/v1/models"),
        "model": await http.get("/v1/models/default"),
    }
    return {name: answer.status_code for name, answer in answers.items()}
