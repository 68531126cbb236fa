"""A server, two workers and a gateway, for as long as a block lasts: one worker has the tiny model, which takes text
alone, and the other a random model that takes images."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.conformance.environments import CHECKS
from tests.support.stack import ROOT, Feeder, Server, WorkerProcess, add_webhook, embedded_binary, free_port

_SEEING = json.loads((CHECKS / "requests.json").read_text("utf-8"))["seeing"]  # the name of the second worker's model
_FAMILY = "qwen3_vl"
_START_S = 30.0
# A fuzzed request ends soon, and the unending answers of the checks have the second limit themselves.
_DEFAULT_TOKENS, _MOST_TOKENS = 200, 2_000


@contextmanager
def gateway() -> Iterator[str]:
    """Yield the URL of a gateway, without /v1. Raises RuntimeError if one of the processes does not start."""
    limits: dict[str, Any] = {"default_max_tokens": _DEFAULT_TOKENS, "max_output_tokens": _MOST_TOKENS}
    with Server(embedded_binary()) as server, _seeing_model() as model, tempfile.TemporaryDirectory() as runs:
        port = free_port()
        os.environ["SLUICE_CONFORMANCE_HOOK"] = f"{port} {add_webhook(server.url, port)}"  # for the checks
        reading = WorkerProcess(server.url, **limits)
        seeing = WorkerProcess(server.url, model=model, model_name=_SEEING, **limits)
        with reading, seeing, Feeder(server.url, Path(runs)), _serving(server.url, runs) as url:
            yield url


@contextmanager
def _seeing_model() -> Iterator[Path]:
    """Yield the folder of a tiny model with random weights that takes images."""
    from models.tiny_vision import write_checkpoint  # loads mlx-vlm, which --help does not need

    with tempfile.TemporaryDirectory(prefix="sluice-seeing-") as folder:
        yield write_checkpoint(_FAMILY, Path(folder))


@contextmanager
def _serving(redis_url: str, runs: str) -> Iterator[str]:
    port = free_port()
    others = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    env = {**others, "SLUICE_REDIS_URL": redis_url, "SLUICE_SERVE_BATCH_DIR": runs, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "sluice.cli", "serve", "--port", str(port)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + _START_S
    while not _is_ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("The gateway did not start; run `sluice serve` to see why.")
        time.sleep(0.05)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
