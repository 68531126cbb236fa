"""Two models on two servers by a map: workers, gateway and command read it, and a dead server takes its model alone."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from sluice import SyncClient
from tests.end_to_end.test_cli import environment, run_here
from tests.gateway.gateways import events
from tests.support.chaos.harness import chat_request
from tests.support.chaos.paced import expected_text
from tests.support.stack import GatewayProcess, Server, WorkerProcess, free_port

BOTH = ("big", "small")
TOKENS = 4


@dataclass(frozen=True)
class Spread:
    """Two servers with a worker each, a gateway, and the map, which nobody finds elsewhere than in its variable."""

    folder: Path
    env: dict[str, str]
    servers: dict[str, Server]  # by model
    gateway: GatewayProcess

    def command(self, *args: str, stdin: str = "") -> tuple[int, str, str]:
        return run_here(*args, env=self.env, folder=self.folder, stdin=stdin)

    def post(self, path: str, **body: Any) -> str:
        url, headers = f"{self.gateway.base_url}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.gateway.base_url}{path}", timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    folder = tmp_path_factory.mktemp("spread")
    with ExitStack() as stack:
        servers = {model: stack.enter_context(Server()) for model in BOTH}
        file = folder / "servers.toml"
        file.write_text(f'default = "{servers["small"].url}"\n[models]\nbig = "{servers["big"].url}"\n')
        nowhere = f"redis://127.0.0.1:{free_port()}/0"
        more_env = {"SLUICE_REDIS_URLS": str(file), "SLUICE_REDIS_URL": nowhere}
        workers = [
            WorkerProcess(
                server.url,
                model="paced",
                module="tests.support.chaos.paced",
                name=f"of-{model}",
                model_name=model,
                lease_s=1,
                more_env=more_env,
            )
            for model, server in servers.items()
        ]
        for worker in workers:
            stack.callback(worker.stop)
            worker.start(wait=False)
        gateway = stack.enter_context(GatewayProcess(nowhere, more_env=more_env, no_worker_s=0.5))
        for worker in workers:
            worker.wait_ready()
        yield Spread(folder, {**environment(nowhere), **more_env}, servers, gateway)


def text_of(stream: str) -> str:
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in events(stream) if each["choices"])


def test_the_gateway_streams_both_models_and_finds_their_answers_by_id(spread: Spread) -> None:
    assert [each["id"] for each in spread.get("/models")["data"]] == [*BOTH]
    for model in BOTH:
        stream = spread.post("/chat/completions", model=model, stream=True, **chat_request(TOKENS))
        assert text_of(stream) == expected_text(TOKENS)
        stored = spread.get(f"/chat/completions/{events(stream)[0]['id']}")
        assert stored["choices"][0]["message"]["content"] == expected_text(TOKENS)


def test_a_conversation_of_responses_may_change_the_model(spread: Spread) -> None:
    given = {"input": "Hello", "max_output_tokens": TOKENS}
    first = json.loads(spread.post("/responses", model="big", **given))
    second = json.loads(spread.post("/responses", model="small", previous_response_id=first["id"], **given))
    third = json.loads(spread.post("/responses", model="big", previous_response_id=second["id"], **given))
    assert [each["status"] for each in (first, second, third)] == ["incomplete"] * 3
    assert spread.get(f"/responses/{first['id']}")["id"] == first["id"]
    assert len(spread.get(f"/responses/{third['id']}/input_items")["data"]) == 5


def test_the_command_submits_to_and_reads_from_all_servers(spread: Spread) -> None:
    for model in BOTH:
        request = json.dumps(chat_request(TOKENS))
        code, printed, _ = spread.command(
            "submit", "--file", "-", "--model", model, "--id", f"by-{model}", stdin=request
        )
        assert (code, printed) == (0, f"by-{model}\n")
        code, printed, _ = spread.command("tail", f"by-{model}", "--json")
        assert (code, json.loads(printed.splitlines()[-1])["type"]) == (0, "finished")
    code, printed, _ = spread.command("workers", "--json")
    assert (code, [json.loads(each)["name"] for each in printed.splitlines()]) == (0, ["of-big", "of-small"])
    code, printed, _ = spread.command("top", "--once", "--json")
    assert (code, [each["model"] for each in json.loads(printed)["models"]]) == (0, [*BOTH])
    assert "servers.toml" in spread.command("top", "--once")[1]


def test_an_option_selects_one_server_of_the_map(spread: Spread) -> None:
    code, printed, _ = spread.command("workers", "--json", "--redis-url", spread.servers["big"].url)
    assert (code, [json.loads(each)["name"] for each in printed.splitlines()]) == (0, ["of-big"])


def test_a_batch_run_sends_its_lines_to_the_servers_of_their_models(spread: Spread) -> None:
    file, out = spread.folder / "in.jsonl", spread.folder / "out.jsonl"
    lines = [
        {
            "custom_id": f"{model}-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, **chat_request(TOKENS)},
        }
        for number in range(5)
        for model in BOTH
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, errors = spread.command("batch", "run", str(file), "-o", str(out))
    assert (code, len(out.read_text().splitlines())) == (0, len(lines)), errors
    for server in spread.servers.values():
        with SyncClient(server.url) as client:
            assert client.queues() == []


def test_a_dead_server_takes_its_model_alone(spread: Spread) -> None:
    """Last: it leaves the server of `big` dead."""
    server = spread.servers["big"]
    url, named = "http://127.0.0.1:1/hook", f"127.0.0.1:{server.port}/0 of big: "
    _, printed, _ = spread.command("webhooks", "add", url, "--event", "job.*", "--allow-private", "--json")
    endpoint = json.loads(printed)["id"]
    server.kill()
    assert text_of(spread.post("/chat/completions", model="small", stream=True, **chat_request(TOKENS)))
    with pytest.raises(urllib.error.HTTPError) as refused:
        spread.post("/chat/completions", model="big", **chat_request(TOKENS))
    assert refused.value.code == 503
    assert [each["id"] for each in spread.get("/models")["data"]] == ["small"]
    command = [sys.executable, "-m", "sluice.cli", "workers", "--json"]  # with a stderr that logs are written to
    listed = subprocess.run(command, env=spread.env, cwd=spread.folder, capture_output=True, text=True)
    assert (listed.returncode, [json.loads(each)["name"] for each in listed.stdout.splitlines()]) == (0, ["of-small"])
    assert listed.stderr.count(named) == 1
    code, printed, said = spread.command("webhooks", "list", "--json")
    assert (code, json.loads(printed)["id"], said.count(named)) == (0, endpoint, 1)
    assert spread.command("webhooks", "deliveries")[0] == 0
    with Redis.from_url(spread.servers["small"].url) as db:
        stored = db.hget("sluice:webhooks", endpoint)
        code, printed, _ = spread.command("webhooks", "rotate", endpoint, "--overlap", "0")
        assert (code, printed) == (2, "")
        assert db.hget("sluice:webhooks", endpoint) == stored
    code, printed, _ = spread.command("top", "--once", "--json")
    (sentence,) = json.loads(printed)["absent"]
    assert (code, named in sentence) == (0, True)
    assert f"{server.port}/0 of big: " in spread.command("top", "--once")[1].replace("\n", "")
    code, _, said = spread.command("submit", "Hello", "--model", "big")
    assert (code, named in said) == (2, True)


def test_a_broken_map_ends_every_program_with_a_sentence(spread: Spread) -> None:
    broken = spread.folder / "broken.toml"
    broken.write_text('default = "http://queue-1"\n')
    env = {**spread.env, "SLUICE_REDIS_URLS": str(broken)}
    code, _, said = run_here("workers", env=env, folder=spread.folder, stdin="")
    assert (code, "broken.toml: default is not the URL of a server" in said) == (2, True)
    for args in (["serve", "--port", "0"], ["worker", "--model", "none"]):
        code, _, said = run_here(*args, env=env, folder=spread.folder, stdin="")
        assert (code, "broken.toml: default is not the URL of a server" in said) == (2, True), said
