"""The code in docs/backends.md works as it stands."""

import re
import subprocess
import sys
from typing import Any

import pytest
from starlette.testclient import TestClient

from scripts.stack import ROOT, WorkerProcess
from sluice import SyncClient, sse

PAGE = (ROOT / "docs" / "backends.md").read_text()


def code(heading: str) -> list[str]:
    """Return the Python blocks below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def on(redis_url: str, source: str) -> str:
    assert "redis://localhost:6379" in source
    return source.replace("redis://localhost:6379", redis_url.removesuffix("/0"))


@pytest.mark.parametrize("heading", ["With asyncio", "With threads", "With plain arq"])
def test_an_example_prints_the_answer(worker: WorkerProcess, redis_url: str, heading: str) -> None:
    (source,) = code(heading)
    command = [sys.executable, "-c", on(redis_url, source)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5 6 7 8 9 10 11 12"), ran.stderr


def test_the_starlette_backend_submits_resumes_and_cancels(worker: WorkerProcess, redis_url: str) -> None:
    names: dict[str, Any] = {}
    exec(on(redis_url, code("Server-sent events, and resuming")[0]), names)
    with TestClient(names["app"]) as http:
        job = http.post("/chats", json={"messages": [{"role": "user", "content": "Count to 5."}]}).json()
        body = http.get(f"/chats/{job['id']}/events", headers={"Last-Event-ID": "0"}).text
        assert http.delete(f"/chats/{job['id']}").json() == {"outcome": "ended"}
        http.portal.call(names["client"].aclose)
    check_stream_after_first_event(body)


def test_the_synchronous_view_streams_a_job(worker: WorkerProcess, redis_url: str) -> None:
    """With a stand-in for Django's response."""
    with SyncClient(redis_url) as client:
        names: dict[str, Any] = {"client": client, "sse": sse, "StreamingHttpResponse": Response}
        exec(code("Server-sent events, and resuming")[1], names)
        job = client.submit([{"role": "user", "content": "Count to 5."}])
        answer = names["events"](Request({"last-event-id": "0"}), job.id)
        check_stream_after_first_event(b"".join(answer.frames).decode())


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
