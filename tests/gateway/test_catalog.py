"""The models that are listed, and their abilities."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract import models as models_of_supervisors
from sluice.gateway import ServeSettings
from sluice.gateway.caller import LOCAL, Caller
from sluice.gateway.catalog import model_info, models
from tests.fakes import FakeChat
from tests.gateway.gateways import serving
from tests.queue.helpers import settings, until, working


def worker(model: str, **fields: Any) -> dict[str, str]:
    return {"model": model, "started_at": "5.5", "rows": "1", "max_rows": "8", "images": "no", **fields}


def test_a_model_has_what_all_its_workers_can() -> None:
    workers = [
        worker("tiny", context_tokens="4096", tools="yes", reasoning="yes", started_at="9"),
        worker("tiny", context_tokens="2048", tools="yes"),
    ]
    assert models(workers, {}, LOCAL, aliases={}, supervised={}) == {
        "tiny": {
            "id": "tiny",
            "object": "model",
            "created": 5,
            "owned_by": "sluice",
            "max_model_len": 2048,
            "sluice": {
                "model": "tiny",
                "state": "loaded",
                "images": False,
                "tools": True,
                "reasoning": False,
                "embeddings": False,
                "workers": 2,
                "rows": 2,
                "max_rows": 16,
            },
        }
    }


@pytest.mark.parametrize(
    ("mapped", "names"),
    [
        ({}, ["big", "tiny"]),
        ({"gpt-4o": "big"}, ["big", "gpt-4o", "tiny"]),
        ({"gpt-4o": "gone"}, ["big", "tiny"]),
        ({"*": "tiny"}, ["tiny"]),
        ({"tiny": "big"}, ["big", "tiny"]),
        ({"claude-*": "big"}, ["big", "tiny"]),
        ({"ti*": "big"}, ["big"]),
    ],
)
def test_the_names_are_those_that_a_request_may_use(mapped: dict[str, str], names: list[str]) -> None:
    found = models([worker("tiny"), worker("big")], mapped, LOCAL, aliases={}, supervised={})
    assert list(found) == names
    assert {name: found[name]["sluice"]["model"] for name in mapped if name in found}.items() <= mapped.items()


def test_a_caller_sees_its_own_models_alone() -> None:
    caller = Caller(models=frozenset({"gpt-4o"}))
    assert list(models([worker("tiny"), worker("big")], {"gpt-4o": "big"}, caller, aliases={}, supervised={})) == [
        "gpt-4o"
    ]


@pytest.mark.parametrize("wrong", ["", "many", "nan", "-1", "1e400", "inf"])
def test_numbers_that_no_worker_wrote_count_as_none(wrong: str) -> None:
    (model,) = models([worker("tiny", started_at=wrong, rows=wrong)], {}, LOCAL, aliases={}, supervised={}).values()
    assert (model["created"], model["sluice"]["rows"]) == (0, 0)


@pytest.mark.parametrize(
    ("started_at", "created_at"),
    [("253402300799", "9999-12-31T23:59:59Z"), ("253402300800", "1970-01-01T00:00:00Z")],
)
def test_a_time_beyond_the_last_year_of_a_calendar_counts_as_none(started_at: str, created_at: str) -> None:
    (model,) = models([worker("tiny", started_at=started_at)], {}, LOCAL, aliases={}, supervised={}).values()
    assert model_info(model)["created_at"] == created_at


@pytest.mark.usefixtures("fake_worker")
async def test_the_models_of_live_workers_are_listed_and_found_by_name(http: httpx.AsyncClient, db: Redis) -> None:
    (listed,) = (await http.get("/v1/models")).json()["data"]
    assert (listed["id"], listed["sluice"]["workers"]) == ("default", 1)
    assert (await http.get("/v1/models/default")).json() == listed
    missing = await http.get("/v1/models/a/b")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.usefixtures("fake_worker")
async def test_a_name_that_a_pattern_serves_is_answered_and_found_and_the_longest_pattern_decides(
    redis_url: str,
) -> None:
    mapped = "*=gone,claude-haiku*=default,claude-haiku-9=gone"
    question = [{"role": "user", "content": "Hi."}]
    with serving(redis_url, ServeSettings(_env_file=None, models=mapped, no_worker_s=0.5)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            for name, status in (("claude-haiku-4-5", 200), ("claude-haiku-9", 404), ("default", 404)):
                found = await http.get(f"/v1/models/{name}")
                body = {"model": name, "max_tokens": 9, "messages": question, "say": ["a"]}
                asked = await http.post("/v1/chat/completions", json=body)
                assert (name, found.status_code, asked.status_code) == (name, status, status)
            found = await http.get("/v1/models/claude-haiku-4-5")
            of_anthropic = await http.get("/v1/models/claude-haiku-4-5", headers={"anthropic-version": "2023-06-01"})
    assert (found.json()["id"], found.json()["sluice"]["model"]) == ("claude-haiku-4-5", "default")
    assert (of_anthropic.json()["type"], of_anthropic.json()["id"]) == ("model", "claude-haiku-4-5")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}], "stream": True, "n": 2}),
        ("/v1/responses", {"input": "Hi."}),
    ],
)
async def test_a_request_without_a_model_is_told_which_are_served_if_none_is_the_default(
    http: httpx.AsyncClient, redis_url: str, db: Redis, chat: FakeChat, path: str, said: dict[str, Any]
) -> None:
    known = settings(redis_url, model_name="other")
    async with working(known, chat.chat):
        await until(lambda: db.exists(keys.worker(known.worker_name)))
        answer = await http.post(path, json=said)
        named = await http.post(path, json={**said, "model": "default"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "model")
    assert "other" in error["message"]
    assert (named.status_code, named.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_model_that_is_awaited_does_not_exist_once_a_worker_of_another_has_started(
    redis_url: str, db: Redis, chat: FakeChat
) -> None:
    body = {"model": "gpt-9", "messages": [{"role": "user", "content": "Hi."}]}
    with serving(redis_url, ServeSettings(_env_file=None, no_worker_s=60)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=50) as http:
            waiting = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            done, _ = await asyncio.wait({waiting}, timeout=0.5)
            assert not done
            async with working(settings(redis_url), chat.chat):
                answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_alias_of_a_served_model_is_listed_under_its_own_name() -> None:
    aliases = {"fast": "tiny", "waiting": "gone", "hidden": "big"}
    found = models(
        [worker("tiny"), worker("big")], {"gpt-4o": "fast", "hid*": "tiny"}, LOCAL, aliases=aliases, supervised={}
    )
    assert {name: each["sluice"]["model"] for name, each in found.items()} == {
        "big": "big",
        "fast": "tiny",
        "gpt-4o": "tiny",
        "tiny": "tiny",
    }
    assert list(models([worker("tiny")], {}, Caller(models=frozenset({"fast"})), aliases=aliases, supervised={})) == [
        "fast"
    ]


@pytest.mark.usefixtures("fake_worker")
async def test_an_alias_is_found_and_served_like_its_model(http: httpx.AsyncClient, db: Redis) -> None:
    await db.hset(keys.ALIASES, mapping={"fast": "default", "waiting": "gone"})
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["sluice"]["model"]) for each in listed] == [("default", "default"), ("fast", "default")]
    assert (await http.get("/v1/models/fast")).json() == listed[1]
    said = await http.post(
        "/v1/chat/completions", json={"model": "fast", "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert said.status_code == 200, said.text
    missing = await http.post("/v1/chat/completions", json={"model": "waiting", "messages": []})
    assert missing.status_code == 503, "the alias exists, and its model has no worker"
    assert (await http.get("/v1/models/waiting")).status_code == 404


def unloaded(state: models_of_supervisors.State = "unloaded") -> models_of_supervisors.Model:
    return models_of_supervisors.Model(
        path="m/a", bytes=7, state=state, since=9.5, weights=5, loaded_bytes=2, worker="", problem=""
    )


def test_a_model_that_is_loaded_for_a_job_is_listed_with_its_state_and_without_abilities() -> None:
    supervised = {"tiny": unloaded("loaded"), "small": unloaded()}
    found = models([worker("tiny")], {"gpt-4o": "small"}, LOCAL, aliases={"fast": "small"}, supervised=supervised)
    assert {name: (each["sluice"]["state"], each["sluice"]["tools"]) for name, each in found.items()} == {
        "fast": ("unloaded", None),
        "gpt-4o": ("unloaded", None),
        "small": ("unloaded", None),
        "tiny": ("loaded", False),
    }
    assert (found["small"]["created"], found["small"]["max_model_len"]) == (9, None)


def test_a_model_that_is_being_loaded_has_the_share_that_is() -> None:
    found = models([], {}, LOCAL, aliases={}, supervised={"a": unloaded("loading"), "b": unloaded()})
    assert {name: (each["sluice"]["state"], each["sluice"].get("loaded")) for name, each in found.items()} == {
        "a": ("loading", 0.4),
        "b": ("unloaded", None),
    }


@pytest.mark.usefixtures("fake_worker")
async def test_a_model_that_a_supervisor_loads_is_found_and_a_request_for_it_is_queued(
    http: httpx.AsyncClient, db: Redis
) -> None:
    await db.hset(keys.models("mac-1"), "small", json.dumps(unloaded()))
    await db.hset(keys.models("mac-2"), "wrong", "{}")
    await db.hset(keys.model("small"), "mac-1", "100 0 99999999999 0 0")
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["sluice"]["state"]) for each in listed] == [("default", "loaded"), ("small", "unloaded")]
    assert (await http.get("/v1/models/small")).json() == listed[1]
    body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    asked = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await until(lambda: db.exists(keys.queue("small", "interactive")))
    asked.cancel()
