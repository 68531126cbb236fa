"""A worker and a gateway as services: what systemd hears of them, and how launchd runs them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.end_to_end.test_cli import environment
from tests.support.stack import TINY_CHAT, free_port

Process = subprocess.Popen[bytes]

COMMANDS = {
    "a worker": ["worker", "--model", str(TINY_CHAT)],
    "several models": ["worker", "--model", f"a={TINY_CHAT}", "--model", f"b={TINY_CHAT}"],
    "a gateway": ["serve", "--port", "0"],
}


@contextmanager
def notified(folder: Path, command: list[str], redis_url: str) -> Iterator[tuple[Process, socket.socket]]:
    """Run a command as systemd does for a unit of `Type=notify` with a watchdog of two seconds."""
    address = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(address)
        heard.settimeout(60)
        env = {**environment(redis_url), "NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000"}
        # As systemd does: the process id is known only in the child.
        script = 'WATCHDOG_PID=$$ exec "$@"'
        started = ["sh", "-c", script, "sh", sys.executable, "-m", "sluice.cli", *command]
        with subprocess.Popen(started, env=env, cwd=folder, stderr=subprocess.DEVNULL) as process:
            try:
                yield process, heard
            finally:
                process.terminate()
                process.wait(60)


@pytest.mark.parametrize("what", COMMANDS)
def test_systemd_hears_that_it_serves_and_then_that_it_is_alive(what: str, redis_url: str, tmp_path: Path) -> None:
    with notified(tmp_path, COMMANDS[what], redis_url) as (_, heard):
        assert heard.recv(100) == b"READY=1"
        began = time.monotonic()
        assert [heard.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        assert time.monotonic() - began > 1.0


def test_a_process_that_hangs_is_heard_no_more(redis_url: str, tmp_path: Path) -> None:
    with notified(tmp_path, COMMANDS["a gateway"], redis_url) as (process, heard):
        assert heard.recv(100) == b"READY=1"
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        heard.setblocking(False)
        with suppress(BlockingIOError):
            heard.recv(100)  # what was on its way
        heard.settimeout(2.5)
        with pytest.raises(TimeoutError):
            heard.recv(100)
        process.send_signal(signal.SIGCONT)


def test_launchd_runs_it_with_a_log_that_rotates_and_not_again_with_wrong_settings(tmp_path: Path) -> None:
    env = {**environment("redis://127.0.0.1:1/0"), "SLUICE_MAX_ROWS": "no"}
    log = tmp_path / "log.txt"
    log.write_bytes(b"x" * 10_000_000)
    command = [sys.executable, "-m", "sluice.cli", "service", "exec", str(log), "worker", "--model", "none"]
    assert subprocess.run(command, env=env, cwd=tmp_path, check=False).returncode == 0
    assert "SLUICE_MAX_ROWS=no" in log.read_text()
    assert (tmp_path / "log.txt.1").stat().st_size == 10_000_000


def test_launchd_s_signal_reaches_the_command(redis_url: str, tmp_path: Path) -> None:
    log, port = tmp_path / "log.txt", str(free_port())
    command = [sys.executable, "-m", "sluice.cli", "service", "exec", str(log), "serve", "--port", port]
    with subprocess.Popen(command, env=environment(redis_url), cwd=tmp_path) as process:
        until = time.monotonic() + 60
        while not (log.exists() and "serving at" in log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)))
    assert os.path.exists(log)
