"""A worker and a gateway that are started in one folder, with one `.env`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.test_start import until
from tests.end_to_end.test_up import ENV, START_S
from tests.support.stack import TINY_CHAT, free_port


class Command:
    """A command of `sluice` that runs in a folder, where it leaves what it has printed."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.txt"
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "sluice.cli", name]
            self._process = subprocess.Popen(command, cwd=folder, env=ENV, stdout=log, stderr=log)

    def check_runs(self) -> None:
        assert self._process.poll() is None, self._log.read_text()

    def stop(self) -> int:
        """End the command as a service manager does, and return its exit code."""
        self._process.terminate()
        return self._process.wait(START_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(folder: Path, *names: str) -> Iterator[list[Command]]:
    commands = [Command(folder, name) for name in names]
    try:
        yield commands
    finally:
        for command in commands:
            command.kill()


@pytest.fixture
def port(redis_url: str, tmp_path: Path) -> int:
    """The port of the gateway that `.env` names."""
    port = free_port()
    settings = {
        "REDIS_URL": redis_url,
        "MODEL": TINY_CHAT,
        "SERVE_PORT": port,
        "SERVE_MODELS": "gpt-4o=default",
    }
    (tmp_path / ".env").write_text("".join(f"SLUICE_{name}={value}\n" for name, value in settings.items()))
    return port


def test_a_worker_and_a_gateway_of_one_env_file_answer_a_chat_under_the_mapped_name(port: int, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Count to 3."}]
    with (
        running(tmp_path, "worker", "serve") as commands,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=START_S) as http,
    ):

        def is_served() -> bool:
            for command in commands:
                command.check_runs()
            with suppress(httpx.ConnectError):
                return bool(http.get("/models").json()["data"])
            return False

        until(is_served, within_s=START_S)
        answer = http.post("/chat/completions", json={"model": "gpt-4o", "messages": messages})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "1 2 3"
        assert [command.stop() for command in commands] == [0, 0]
