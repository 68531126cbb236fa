"""The examples in Node and Go speak the contract in plain Redis commands. Run for the toolchains that are installed."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.end_to_end.toolchains import TOOLCHAINS
from tests.support.stack import ROOT, WorkerProcess

COUNT = {"messages": [{"role": "user", "content": "Count to 12."}]}
TWELVE = "1 2 3 4 5 6 7 8 9 10 11 12"
ENDLESS = COUNT | {"max_tokens": 30_000, "logit_bias": {"0": -100, "2": -100}}  # a bias against every end of the answer


def build_node(folder: Path) -> list[str]:
    return ["node", str(ROOT / "examples" / "node" / "chat.mjs")]


def build_go(folder: Path) -> list[str]:
    binary = folder / "chat"
    subprocess.run(["go", "build", "-o", str(binary), "."], cwd=ROOT / "examples" / "go", check=True)
    return [str(binary)]


BUILDERS: dict[str, Callable[[Path], list[str]]] = {"node": build_node, "go": build_go}


@pytest.fixture(scope="module", params=TOOLCHAINS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of an example."""
    return BUILDERS[request.param](tmp_path_factory.mktemp("program"))


class Producer:
    """An example, run on a server."""

    def __init__(self, program: list[str], url: str) -> None:
        self._program, self._env = program, {**os.environ, "SLUICE_REDIS_URL": url}
        self.db = redis.Redis.from_url(url)

    def run(self, *words: str, code: int = 0) -> str:
        ran = subprocess.run([*self._program, *words], env=self._env, capture_output=True, text=True, timeout=60)
        assert ran.returncode == code, ran.stderr
        return ran.stdout.rstrip("\n") if code == 0 else ran.stderr

    def submit(self, request: dict[str, Any]) -> str:
        return self.run("submit", json.dumps(request))

    def follow(self, job_id: str) -> "subprocess.Popen[str]":
        return subprocess.Popen([*self._program, "events", job_id], env=self._env, stdout=subprocess.PIPE, text=True)

    def log(self, job_id: str) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.db.lrange(f"sluice:log:{job_id}", 0, -1)]


@pytest.fixture
def producer(worker: WorkerProcess, redis_url: str, program: list[str]) -> Iterator[Producer]:
    worker.wait_ready()
    producer = Producer(program, redis_url)
    yield producer
    producer.db.close()


def parse(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_chat_prints_the_answer(producer: Producer) -> None:
    assert producer.run("chat", "Count to 12.") == TWELVE


def test_a_subscriber_that_comes_late_gets_every_event_and_the_result(producer: Producer) -> None:
    job_id = producer.submit(COUNT)
    wait_for(lambda: producer.db.exists(f"sluice:result:{job_id}"))
    events = parse(producer.run("events", job_id))
    assert events == producer.log(job_id)
    assert events[-1]["type"] == "finished"
    assert json.loads(producer.run("result", job_id))["choices"][0]["message"]["content"] == TWELVE


def test_a_stream_resumes_after_a_sequence_number(producer: Producer) -> None:
    job_id = producer.submit(COUNT)
    everything = parse(producer.run("events", job_id))
    assert parse(producer.run("events", job_id, "4")) == everything[5:]


def test_a_stream_that_loses_its_connections_misses_no_event_until_the_job_is_cancelled(producer: Producer) -> None:
    job_id = producer.submit(ENDLESS)
    following = producer.follow(job_id)
    for _ in range(3):
        wait_for(lambda: kill_subscribers(producer.db))
        length = producer.db.llen(f"sluice:log:{job_id}")
        wait_for(lambda seen=length: producer.db.llen(f"sluice:log:{job_id}") > seen + 5)
    wait_for(lambda: subscribers(producer.db))
    producer.run("cancel", job_id)
    events = parse(following.communicate(timeout=60)[0])
    assert events == producer.log(job_id)
    assert (events[-1]["type"], following.returncode) == ("cancelled", 0)


def subscribers(db: "redis.Redis") -> list[str]:
    """Return the connections that are subscribed to a job's channel; workers subscribe by other names."""
    if not db.pubsub_channels("sluice:ch:*"):
        return []
    unnamed = [each for each in db.client_list(_type="pubsub") if each["name"] == ""]
    return [each["id"] for each in unnamed if each.get("lib-name", "") == ""]  # Redis before 7.2 has none


def kill_subscribers(db: "redis.Redis") -> int:
    return sum(int(db.client_kill_filter(_id=each)) for each in subscribers(db))


def test_a_refused_request_ends_the_chat_with_the_worker_s_message(producer: Producer) -> None:
    job_id = producer.submit({"messages": [], "temperature": 5})
    (failed,) = parse(producer.run("events", job_id))
    assert failed["error"]["type"] == "invalid_request"
    assert json.loads(producer.run("result", job_id)) == failed


def test_text_beyond_ascii_arrives_whole(producer: Producer) -> None:
    text = "Repeat: héllo 日本 🙂"
    job_id = producer.submit({"messages": [{"role": "user", "content": text}], "metadata": {"text": text}})
    assert parse(producer.run("events", job_id)) == producer.log(job_id)
    assert json.loads(producer.run("result", job_id))["sluice"]["metadata"] == {"text": text}


@pytest.mark.slow  # a producer waits for ten seconds
def test_a_job_without_a_trace_is_reported_as_unknown(producer: Producer) -> None:
    assert "no such job, or its events have expired" in producer.run("events", "nobody", code=1)
