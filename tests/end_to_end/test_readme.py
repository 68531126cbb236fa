"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from scripts.stack import ROOT, WorkerProcess
from sluice import Client, SyncClient, sse

README = (ROOT / "README.md").read_text()
# test_openai serves the fifth.
PLAIN_ARQ, OUR_CLIENT, SYNC_CLIENT, SSE, OPENAI_BACKEND, BATCH = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", [PLAIN_ARQ, OUR_CLIENT, SYNC_CLIENT], ids=["plain arq", "our client", "threads"])
def test_an_example_prints_the_answer(worker: WorkerProcess, redis_url: str, code: str) -> None:
    code = code.replace("redis://localhost:6379", redis_url.removesuffix("/0"))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, "1 2 3 4 5 6 7 8 9 10 11 12"), ran.stderr


def test_the_endpoint_of_server_sent_events_serves_a_job(worker: WorkerProcess, redis_url: str) -> None:
    names: dict[str, Any] = {"client": Client(redis_url), "sse": sse, "StreamingResponse": StreamingResponse}
    exec(SSE, names)
    with TestClient(Starlette(routes=[Route("/{id}", names["events"])])) as http, SyncClient(redis_url) as client:
        job = client.submit([{"role": "user", "content": "Count to 5."}])
        body = http.get(f"/{job.id}", headers={"Last-Event-ID": "0"}).text
        http.portal.call(names["client"].aclose)
    ids = [int(seq) for seq in re.findall(r"^id: (\d+)$", body, re.MULTILINE)]
    assert ids == list(range(1, len(ids) + 1))
    assert re.findall(r"^event: (\w+)$", body, re.MULTILINE)[-1] == "finished"


def test_the_offline_examples_run_in_any_folder(worker: WorkerProcess, redis_url: str, tmp_path: Path) -> None:
    worker.wait_ready()
    code = BATCH.replace("redis://localhost:6379", redis_url.removesuffix("/0"))
    given: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "timeout": 30}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **given)
    counts = "RequestCounts(total=1, completed=1, failed=0)"
    assert (ran.returncode, ran.stdout) == (0, f"completed {counts}\n"), ran.stderr
    command = [
        sys.executable,
        "-m",
        "sluice.cli",
        "batch",
        "run",
        str(ROOT / "examples" / "batch.jsonl"),
        "-o",
        "o.jsonl",
    ]
    subprocess.run([*command, "--redis-url", redis_url], check=True, capture_output=True, **given)
    (shown,) = re.findall(r"^(\{\"custom_id\".*\})$", README, re.MULTILINE)
    assert shown.removesuffix("}}") in (ROOT / "examples" / "batch.jsonl").read_text()


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
