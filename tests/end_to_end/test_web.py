"""The example backend, over real HTTP."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import redis
import uvicorn

from examples.web import app as web
from scripts.stack import ROOT, WorkerProcess, free_port
from tests.end_to_end.test_demo import alive, children

ENDLESS: dict[str, Any] = {"logit_bias": {"2": -100}}  # without the end of sequence it counts on to max_tokens
EXAMPLE = [sys.executable, "-m", "examples.web"]

Said = dict[str, Any]


@contextmanager
def serving(redis_url: str) -> Iterator[httpx.Client]:
    port = free_port()
    app = web.create_app(redis_url)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            yield http
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def module_http(worker: WorkerProcess) -> Iterator[httpx.Client]:
    with serving(worker.url) as http:
        yield http


@pytest.fixture
def http(module_http: httpx.Client, worker: WorkerProcess, redis_url: str) -> httpx.Client:
    return module_http


def ask(http: httpx.Client, text: str = "Count to 12.", **fields: Any) -> str:
    reply = http.post("/chat", json={"messages": [{"role": "user", "content": text}], **fields})
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


@contextmanager
def listening(http: httpx.Client, job_id: str, **request: Any) -> Iterator[Iterator[Said]]:
    """As an EventSource would. It leaves at the end of the block."""
    with http.stream("GET", f"/chat/{job_id}/events", **request) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield (parse(block) for block in blocks(reply.iter_lines()) if "data" in block)


def blocks(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    block: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            block[name] = value
        else:
            yield block
            block = {}


def parse(block: dict[str, str]) -> Said:
    said: Said = json.loads(block["data"])
    assert (block["id"], block["event"]) == (str(said["seq"]), said["type"])
    return said


def events(http: httpx.Client, job_id: str, **request: Any) -> list[Said]:
    with listening(http, job_id, **request) as stream:
        return list(stream)


def look_in(http: httpx.Client, job_id: str, count: int, **request: Any) -> list[Said]:
    """So many events, then the browser is gone."""
    with listening(http, job_id, **request) as stream:
        return [next(stream) for _ in range(count)]


def text(said: list[Said]) -> str:
    return "".join(event.get("content", "") for event in said)


def test_a_chat_streams_from_started_to_finished(http: httpx.Client) -> None:
    said = events(http, ask(http))
    assert [event["seq"] for event in said] == list(range(len(said)))
    assert (said[0]["type"], said[-1]["type"]) == ("started", "finished")
    assert {event["type"] for event in said[1:-1]} <= {"progress", "delta"}
    assert text(said) == "1 2 3 4 5 6 7 8 9 10 11 12"
    assert said[-1]["timings"].keys() >= {"queue_s", "ttft_s", "tokens_per_s"}


def test_sampling_fields_pass_through(http: httpx.Client) -> None:
    said = events(http, ask(http, max_tokens=3))
    assert (said[-1]["finish_reason"], said[-1]["usage"]["completion_tokens"]) == ("length", 3)


@pytest.mark.parametrize("by", ["header", "query"])
def test_a_stream_dropped_in_the_middle_goes_on_as_if_unbroken(http: httpx.Client, by: str) -> None:
    job_id = ask(http, max_tokens=100, **ENDLESS)
    before = look_in(http, job_id, 7)
    seen = str(before[-1]["seq"])
    again: Said = {"headers": {"Last-Event-ID": seen}} if by == "header" else {"params": {"after": seen}}
    after = events(http, job_id, **again)
    assert before + after == events(http, job_id)
    assert after[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("chosen", ["cancel", "continue"])
def test_a_browser_that_leaves_has_its_job_cancelled_unless_it_chose_otherwise(
    http: httpx.Client, redis_url: str, chosen: str
) -> None:
    job_id = ask(http, max_tokens=4000, **ENDLESS, **({} if chosen == "cancel" else {"on_disconnect": chosen}))
    with redis.Redis.from_url(redis_url) as db:
        (request,) = json.loads(db.get(f"arq:job:{job_id}"))["a"]  # type: ignore[arg-type]
    assert request["on_disconnect"] == chosen
    http.delete(f"/chat/{job_id}")


def test_delete_cancels(http: httpx.Client) -> None:
    job_id = ask(http, max_tokens=4000, **ENDLESS)
    with listening(http, job_id) as stream:
        next(stream)
        assert http.delete(f"/chat/{job_id}").status_code == 204
        assert list(stream)[-1]["type"] == "cancelled"


BAD = {
    b"{": "The body is not JSON.",
    b"\xff": "The body is not JSON.",
    b"[" * 100_000: "The body is not JSON.",
    b"[]": "The body must be an object",
    b'{"seed": NaN}': "The job cannot be queued",
}


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:15].decode(errors="replace"))
def test_a_body_that_is_no_request_is_400_with_a_sentence(http: httpx.Client, body: bytes) -> None:
    reply = http.post("/chat", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(BAD[body])


def test_a_request_that_makes_no_sense_streams_failed(http: httpx.Client) -> None:
    said = events(http, ask(http, max_token=5))
    assert said[-1]["type"] == "failed"
    assert "did you mean max_tokens" in said[-1]["error"]["message"]


def test_a_job_that_nobody_knows_gets_one_event_and_an_end(http: httpx.Client) -> None:
    assert "event: unknown\ndata: {" in http.get(f"/chat/{UUID(int=0)}/events").text


def test_while_the_server_is_away_a_post_is_503_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.transport.retries._CALL_S", 0.5)
    with serving(f"redis://127.0.0.1:{free_port()}/0") as http:
        reply = http.post("/chat", json={"messages": []})
    assert reply.status_code == 503
    assert "does not answer" in reply.json()["error"]["message"]


def test_the_page_is_served_and_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    reply = http.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "<title>Sluice chat</title>" in reply.text
    for outside in ("src=", "@import", "url(", "innerHTML"):
        assert outside not in reply.text


COPY = """
import sys
from starlette.testclient import TestClient

from app import create_app
import schemas, worker

with TestClient(create_app(sys.argv[1])) as http:
    job_id = http.post("/chat", json={"messages": [{"role": "user", "content": "Count to 5."}]}).json()["id"]
    assert "event: finished" in http.get(f"/chat/{job_id}/events").text
assert schemas.MINE and worker.MINE
heavy = {"scripts", "arq", "pydantic", "mlx", "mlx_lm"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_copy_beside_a_schemas_and_a_worker_of_its_own_runs(
    worker: WorkerProcess, redis_url: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "examples" / "web" / "app.py", tmp_path)
    for name in ("schemas.py", "worker.py"):
        (tmp_path / name).write_text("MINE = True")
    # As installed in a backend's environment: our packages come after its own folder.
    (tmp_path / "main.py").write_text(f"import sys; sys.path.append({str(ROOT)!r})\n" + COPY)
    command = [sys.executable, str(tmp_path / "main.py"), redis_url]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@contextmanager
def started_example() -> Iterator[subprocess.Popen[str]]:
    """On a server and a worker of its own."""
    env = {name: value for name, value in os.environ.items() if name != "SLUICE_REDIS_URL"}
    command, pipe = [*EXAMPLE, "--port", "0"], subprocess.PIPE
    example = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        yield example
    finally:
        example.terminate()
        example.communicate(timeout=20)


def test_one_command_serves_a_chat_and_ctrl_c_ends_all_it_started() -> None:
    with started_example() as example:
        assert example.stdout is not None
        address = [example.stdout.readline() for _ in range(2)][1].split()[4]
        with httpx.Client(base_url=address, timeout=20) as http:
            look_in(http, ask(http, max_tokens=4000, **ENDLESS), 5)
            started = children(example.pid)
            assert len(started) == 2
            example.send_signal(signal.SIGINT)
            said = example.communicate(timeout=20)
        assert (example.returncode, *said) == (0, "stopped, with all processes that it started\n", "")
        assert not any(alive(pid) for pid in started)


def test_a_taken_port_is_told_in_a_sentence(module_http: httpx.Client) -> None:
    port = str(module_http.base_url.port)
    ran = subprocess.run([*EXAMPLE, "--port", port], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"sluice: port {port} is in use or not permitted; choose another with --port.\n"
