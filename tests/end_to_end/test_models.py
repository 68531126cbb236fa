"""`sluice models`: the names of models, over real workers."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from sluice import Client, Finished
from sluice.cli.commands.models import _follow
from sluice.cli.errors import CliError
from sluice.contract import keys
from sluice.contract.models import Model, State
from sluice.gateway import ServeSettings
from tests.end_to_end.test_cli import Command
from tests.end_to_end.test_several_models import Supervisor
from tests.gateway.gateways import serving
from tests.queue.helpers import enqueue
from tests.support.stack import WorkerProcess


@pytest.fixture(scope="module")
def other(worker: WorkerProcess) -> Iterator[WorkerProcess]:
    """A worker of the model `other` on the server of `worker`, which serves `default`."""
    with WorkerProcess(worker.url, lease_s=2, model_name="other", max_rows=4) as process:
        yield process


@pytest.fixture
def sluice(redis_url: str, tmp_path: Path, worker: WorkerProcess, other: WorkerProcess) -> Command:
    worker.wait_ready()
    other.wait_ready()
    return Command(redis_url, tmp_path)


def counting(i: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Count to {5 + i % 9}."}], "temperature": 0, **fields}


def until(number: int) -> str:
    return " ".join(map(str, range(1, number + 1)))


async def test_an_alias_that_moves_under_load_loses_no_job(sluice: Command, client: Client, tmp_path: Path) -> None:
    """Chats of our client and over HTTP, plain producers, and a batch run, while the alias moves eight times."""
    await client.set_alias("fast", "default")
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": counting(i, model="fast")}
        for i in range(24)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    models, moving = Counter[str](), True

    async def chat(k: int) -> None:
        i = k
        while moving:
            request = counting(i, **({"model": "fast"} if i % 2 else {}))
            job = await client.submit(request, model="fast", id=f"chat-{i}")
            again = await client.submit(request, model="fast", id=f"chat-{i}")  # the same key, whatever it stands for
            assert (again.new, job.model in ("default", "other")) == (False, True)
            events = [event async for event in client.stream(job.id)]
            assert isinstance(events[-1], Finished), events[-1]
            result = await client.result(job.id)
            assert (result["model"], result["choices"][0]["message"]["content"]) == (job.model, until(5 + i % 9))
            models[result["model"]] += 1
            i += 10

    async def plain() -> None:
        i = 0
        while moving:
            await enqueue(sluice.env["SLUICE_REDIS_URL"], "sluice:queue:fast:interactive", f"plain-{i}", counting(i))
            result = await client.result(f"plain-{i}", timeout=30)
            assert result["choices"][0]["message"]["content"] == until(5 + i % 9)
            models[result["model"]] += 1
            i += 1

    async def over_http(http: httpx.AsyncClient) -> None:
        i = 0
        while moving:
            found = await http.post("/v1/chat/completions", json=counting(i, model="fast"))
            assert found.status_code == 200, found.text
            models[found.json()["model"]] += 1
            i += 1

    with serving(sluice.env["SLUICE_REDIS_URL"], ServeSettings(_env_file=None)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            work = [asyncio.create_task(each) for each in (*map(chat, range(4)), plain(), over_http(http))]
            run = asyncio.create_task(client.batch(file, out, served_only=True))
            for i in range(8):
                await asyncio.sleep(0.4)
                await client.set_alias("fast", ("other", "default")[i % 2])
            moving = False
            await asyncio.gather(*work)
    batch = await run
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 24, 0)
    assert min(models["default"], models["other"]) > 3, models
    assert sluice.db.keys("sluice:queue:*") == [], "nothing is left under any name"


def test_the_command_sets_moves_lists_and_removes_an_alias(sluice: Command) -> None:
    assert sluice("models", "alias", "fast", "default")[0] == 0
    code, out, err = sluice("models", "alias", "fast", "other")
    assert (code, out) == (0, "")
    assert "before: default" in err
    listed = [json.loads(line) for line in sluice("models", "list", "--served", "--json")[1].splitlines()]
    assert [(each["name"], each["model"], each["workers"]) for each in listed] == [
        ("default", None, 1),
        ("fast", "other", 1),
        ("other", None, 1),
    ]
    assert "fast" in sluice("models", "list")[1]
    assert sluice("models", "alias", "fast", "--remove")[0] == 0
    assert sluice.db.exists("sluice:aliases") == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["fast"], "--remove"),
        (["fast", "other", "--remove"], "not both"),
        (["default", "other"], "live workers"),
        (["fast", "gone"], "--force"),
        (["fast", "fast"], "itself"),
        (["a b", "other"], "must match"),
    ],
)
def test_the_command_refuses_what_cannot_be_an_alias(sluice: Command, args: list[str], says: str) -> None:
    code, out, err = sluice("models", "alias", *args)
    assert (code, out) == (2, "")
    assert says in err
    assert sluice.db.exists("sluice:aliases") == 0


def test_a_chat_with_an_alias_is_answered_without_a_note(sluice: Command) -> None:
    sluice("models", "alias", "fast", "other")
    code, out, err = sluice("chat", "Count to 3.", "--model", "fast")
    assert (code, out.strip()) == (0, "1 2 3")
    assert "no worker" not in err


@pytest.fixture
def supervised(redis_url: str, tmp_path: Path) -> Iterator[tuple[Supervisor, Command]]:
    """A supervisor with the models a, b and c, which has memory for two, once those are loaded."""
    with Supervisor(redis_url) as supervisor:
        deadline = time.monotonic() + 60
        while supervisor.states() != "loaded loaded unloaded":
            assert time.monotonic() < deadline, supervisor.log()
            time.sleep(0.1)
        yield supervisor, Command(redis_url, tmp_path)


def test_models_of_a_supervisor_are_loaded_and_unloaded_by_the_command(
    supervised: tuple[Supervisor, Command],
) -> None:
    supervisor, sluice = supervised
    listed = [json.loads(line) for line in sluice("models", "list", "--served", "--json")[1].splitlines()]
    states = [(each["name"], each["workers"], [held["state"] for held in each["supervisors"]]) for each in listed]
    assert states == [("a", 1, ["loaded"]), ("b", 1, ["loaded"]), ("c", 0, ["unloaded"])]
    code, out, err = sluice("models", "load", "c")
    assert (code, out, "c is loaded" in err) == (0, "", True), err
    assert sorted(model["state"] for model in supervisor.models().values()) == ["loaded", "loaded", "unloaded"]
    assert sluice("models", "alias", "fast", "c")[0] == 0
    code, _, err = sluice("models", "unload", "fast")
    assert (code, "c is unloaded" in err, supervisor.models()["c"]["state"]) == (0, True, "unloaded"), err
    shown = sluice("models", "list", "--served")[1]
    assert "unloaded" in shown
    code, _, err = sluice("models", "load", "d")
    assert (code, "a, b, c" in err) == (2, True), err
    code, _, err = sluice("chat", "Count to 3.", "--model", "fast")  # the alias of an unloaded model
    assert (code, "no worker" in err) == (0, False), err


@pytest.mark.parametrize(
    ("states", "ends"),
    [
        (["loaded", "unloading", "loading"], "loaded again for jobs that wait"),
        (["loaded", "loading"], "loaded again for jobs that wait"),  # it left between two looks
        (["unloading", "loaded"], "loaded again for jobs that wait"),
        (["loading", "loaded", "unloading", "unloaded"], None),
    ],
)
async def test_following_a_model_that_leaves_ends_at_once_if_it_is_loaded_again(
    client: Client, db: redis.asyncio.Redis, states: list[State], ends: str | None
) -> None:
    first, *others = [
        Model(path="a", bytes=2, state=state, since=float(at), weights=1, worker="", problem="")
        for at, state in enumerate(states)
    ]
    await db.hset(keys.models("one"), "a", json.dumps(first))
    following = asyncio.create_task(_follow(client, "a", {"one": first}, "unloaded", 30.0))
    for each in others:
        await asyncio.sleep(0.5)  # it looks five times a second
        assert not following.done()
        await db.hset(keys.models("one"), "a", json.dumps(each))
    async with asyncio.timeout(5):
        if ends is None:
            await following
        else:
            with pytest.raises(CliError, match=ends) as raised:
                await following
            assert raised.value.exit_code == 1


@pytest.mark.slow
async def test_a_plain_producer_s_job_under_an_alias_loads_its_model(
    supervised: tuple[Supervisor, Command], client: Client, redis_url: str
) -> None:
    await client.set_alias("fast", "c")
    await enqueue(redis_url, "sluice:queue:fast:interactive", "plain", counting(0, model="fast"))
    result = await client.result("plain", timeout=60)
    assert (result["model"], result["choices"][0]["message"]["content"]) == ("c", until(5))


def test_without_a_supervisor_nothing_can_be_loaded(sluice: Command) -> None:
    for what in ("load", "unload"):
        code, out, err = sluice("models", what, "default")
        assert (code, out, "sluice workers" in err) == (2, "", True), err
