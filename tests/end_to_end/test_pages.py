"""The code in docs/ works as it stands. test_openai serves the endpoint for OpenAI clients."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from sluice import SyncClient, sse
from tests.end_to_end.test_cli import run_here
from tests.support.stack import ROOT, WorkerProcess

SSE = "Server-sent events, and resuming"


def code(page: str, heading: str, language: str = "python") -> list[str]:
    """Return the blocks of a language below a heading of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


(OPENAI_BACKEND,) = code("backends.md", "An endpoint for OpenAI clients")


def on(redis_url: str, source: str) -> str:
    assert "redis://localhost:6379" in source
    return source.replace("redis://localhost:6379", redis_url.removesuffix("/0"))


@pytest.mark.parametrize("heading", ["With asyncio", "With threads", "With plain arq"])
def test_an_example_prints_the_answer(worker: WorkerProcess, redis_url: str, heading: str) -> None:
    (source,) = code("backends.md", heading)
    command = [sys.executable, "-c", on(redis_url, source)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5 6 7 8 9 10 11 12"), ran.stderr


def test_the_starlette_backend_submits_resumes_and_cancels(worker: WorkerProcess, redis_url: str) -> None:
    names: dict[str, Any] = {}
    exec(on(redis_url, code("backends.md", SSE)[0]), names)
    with TestClient(names["app"]) as http:
        job = http.post("/chats", json={"messages": [{"role": "user", "content": "Count to 5."}]}).json()
        body = http.get(f"/chats/{job['id']}/events", headers={"Last-Event-ID": "0"}).text
        assert http.delete(f"/chats/{job['id']}").json() == {"outcome": "ended"}
    check_stream_after_first_event(body)


def test_the_synchronous_view_streams_a_job(worker: WorkerProcess, redis_url: str) -> None:
    """With a stand-in for Django's response."""
    with SyncClient(redis_url) as client:
        names: dict[str, Any] = {"client": client, "sse": sse, "StreamingHttpResponse": Response}
        exec(code("backends.md", SSE)[1], names)
        job = client.submit([{"role": "user", "content": "Count to 5."}])
        answer = names["events"](Request({"last-event-id": "0"}), job.id)
        check_stream_after_first_event(b"".join(answer.frames).decode())


def test_the_batch_example_runs_a_file_in_any_folder(worker: WorkerProcess, redis_url: str, tmp_path: Path) -> None:
    worker.wait_ready()
    (source,) = code("batches.md", "Run a file")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", on(redis_url, source)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    counts = "RequestCounts(total=1, completed=1, failed=0)"
    assert (ran.returncode, ran.stdout) == (0, f"completed {counts}\n"), ran.stderr


def test_the_example_file_has_the_line_on_the_page_and_runs(
    worker: WorkerProcess, redis_url: str, tmp_path: Path
) -> None:
    worker.wait_ready()
    file = ROOT / "examples" / "batch.jsonl"
    (shown,) = code("batches.md", "Run a file", "json")
    assert json.loads(shown)["body"].items() <= json.loads(file.read_text().splitlines()[0])["body"].items()
    with SyncClient(redis_url) as client:
        assert client.batch(file, tmp_path / "out.jsonl").request_counts.completed == 3


def test_the_request_for_json_is_answered_in_json(worker: WorkerProcess, redis_url: str) -> None:
    (request,) = code("models.md", "JSON schemas", "json")
    with SyncClient(redis_url) as client:
        result = client.result(client.submit(json.loads(request)).id, timeout=30)
    assert json.loads(result["choices"][0]["message"]["content"]).keys() == {"country", "capital"}


def test_the_page_on_models_explains_every_line_of_sluice_check() -> None:
    code, shown, err = run_here("check", "models/tiny-chat", env=os.environ, folder=ROOT)
    assert code == 0, err
    section = (ROOT / "docs" / "models.md").read_text().partition("## Check a model first")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", section, re.MULTILINE)
    assert explained[1:] == re.findall(r"^│ ([a-zA-Z ]+?) +│ \S", shown, re.MULTILINE)


class Request:
    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers


class Response:
    def __init__(self, frames: Any, headers: dict[str, str]) -> None:
        assert headers["Content-Type"] == "text/event-stream"
        self.frames = frames


def check_stream_after_first_event(body: str) -> None:
    ids = [int(seq) for seq in re.findall(r"^id: (\d+)$", body, re.MULTILINE)]
    assert ids == list(range(1, len(ids) + 1))
    assert re.findall(r"^event: (\w+)$", body, re.MULTILINE)[-1] == "finished"
