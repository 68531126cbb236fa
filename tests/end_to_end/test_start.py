"""How a worker starts, and how it says that it cannot."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.scenarios.harness import ask, paced, running, watch
from scripts.stack import ROOT, Server
from sluice import Client


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--max-rows", 2)])
def test_the_module_takes_no_arguments_and_says_so(argument: str, code: int) -> None:
    ran = subprocess.run([sys.executable, "-m", "worker", argument], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code
    assert "takes no arguments" in ran.stdout + ran.stderr


async def test_a_worker_serves_over_a_unix_socket(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    with Server(args=("--unixsocket", str(socket))):
        url = f"unix://{socket}"
        async with Client(url) as client, running(paced(url)):
            job = await client.submit(ask(5))
            assert (await watch(client, job.id)).is_right(5)
