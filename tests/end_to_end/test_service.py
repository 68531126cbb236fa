"""A worker and a gateway as services: what systemd hears of them, and how launchd runs them."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sluice import SyncClient
from tests.end_to_end.test_cli import environment, run_here
from tests.end_to_end.test_start import until
from tests.support.stack import ROOT, TINY_CHAT, free_port

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
    assert not serves(int(port))
    assert os.path.exists(log)


def serves(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def test_what_launchd_runs_does_not_outlive_it(redis_url: str, tmp_path: Path) -> None:
    """launchd ends the process group of a job that has ended, as launchd.plist(5) says under AbandonProcessGroup."""
    log, port = tmp_path / "log.txt", free_port()
    command = [sys.executable, "-m", "sluice.cli", "service", "exec", str(log), "serve", "--port", str(port)]
    with subprocess.Popen(command, env=environment(redis_url), cwd=tmp_path, start_new_session=True) as process:
        until(lambda: serves(port))
        process.kill()
        process.wait()
        os.killpg(process.pid, signal.SIGKILL)
        until(lambda: not serves(port))


class Machine:
    """A home, and a stand-in for systemd which runs the units that `sluice service` enables there."""

    def __init__(self, home: Path) -> None:
        self._home, self._processes = home, dict[str, Process]()
        self.folder = home / "mac"
        programs = home / "bin"
        for made in (self.folder, programs, home / "tmp"):
            made.mkdir(parents=True)
        self._asked = programs / "asked"
        self._asked.touch()
        (programs / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {self._asked}\n')
        (programs / "systemctl").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "XDG_"))}
        self._env = {
            **kept, "HOME": str(home), "TMPDIR": str(home / "tmp"), "PYTHONPATH": str(ROOT),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }  # fmt: skip
        self._units = home / ".config" / "systemd" / "user"

    def sluice(self, *args: str) -> None:
        """Run `sluice service`, and do what it asks of systemd."""
        self._asked.write_text("")
        code, _, err = run_here("service", *args, env=self._env, folder=self.folder)
        assert code == 0, err
        for line in self._asked.read_text().splitlines():
            match line.split()[1:]:
                case ["enable", unit]:
                    self._wanted.mkdir(exist_ok=True)
                    with suppress(FileExistsError):
                        (self._wanted / unit).symlink_to(self._units / unit)
                case ["restart", *_, unit]:
                    self._stop(unit)
                    self._start(unit)
                case ["disable", "--now", unit]:
                    self._stop(unit)
                    (self._wanted / unit).unlink()
                    self._wanted.rmdir()

    @property
    def _wanted(self) -> Path:
        return self._units / "default.target.wants"

    def _start(self, unit: str) -> None:
        (command,) = self._entries(unit, "ExecStart")
        (folder,) = self._entries(unit, "WorkingDirectory")
        with (self._home / "log").open("a") as log:
            self._processes[unit] = subprocess.Popen(
                shlex.split(command), cwd=folder, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    def _entries(self, unit: str, name: str) -> list[str]:
        return re.findall(rf"^{name}=(.*)$", (self._units / unit).read_text(), re.MULTILINE)

    def _stop(self, unit: str) -> None:
        if process := self._processes.pop(unit, None):
            process.terminate()
            process.wait(60)

    def restart_what_died(self) -> int:
        """Do what the units say of processes that have ended; return how many were started again."""
        ended = [unit for unit, process in self._processes.items() if process.poll() is not None]
        for unit in ended:
            code = self._processes.pop(unit).returncode
            never = ["0", *self._entries(unit, "RestartPreventExitStatus")]
            if self._entries(unit, "Restart") == ["on-failure"] and str(code) not in never:
                self._start(unit)
        return len(self._processes)

    def kill(self) -> None:
        """Kill all processes of all services."""
        for process in self._processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def reboot(self) -> None:
        """End all at once, and start what is enabled."""
        self.kill()
        self._processes.clear()
        for link in self._wanted.iterdir():
            self._start(link.name)

    def left(self) -> list[str]:
        """Return the files and services that are there, but MLX's kernels, which all workers share."""
        files = [str(file.relative_to(self._home)) for file in self._home.rglob("*") if not file.is_dir()]
        kernels = f"tmp/sluice-{os.getuid()}/"  # and what a killed compiler has left there
        return sorted([*(file for file in files if not file.startswith(kernels)), *self._processes])

    def log(self) -> str:
        return (self._home / "log").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if sys.platform != "linux":
        pytest.skip("systemd is Linux's")
    machine = Machine(tmp_path / "home")
    yield machine
    machine.kill()


def test_a_service_is_killed_rebooted_upgraded_and_uninstalled_and_leaves_its_log(
    machine: Machine, redis_url: str
) -> None:
    ports = [free_port() for _ in range(2)]
    (machine.folder / ".env").write_text(f"SLUICE_REDIS_URL={redis_url}\n")
    before = machine.left()
    machine.sluice("install", "gateway", "--port", str(ports[0]))
    until(lambda: serves(ports[0]))
    machine.kill()
    assert (serves(ports[0]), machine.restart_what_died()) == (False, 1)
    until(lambda: serves(ports[0]))
    machine.reboot()
    until(lambda: serves(ports[0]))
    machine.sluice("install", "gateway", "--port", str(ports[1]))
    until(lambda: serves(ports[1]))
    assert not serves(ports[0])
    machine.sluice("uninstall", "gateway")
    assert not serves(ports[1])
    assert machine.left() == sorted([*before, "log"])


def test_a_service_whose_settings_are_wrong_is_not_started_again(machine: Machine) -> None:
    (machine.folder / ".env").write_text("SLUICE_MAX_ROWS=no\n")
    machine.sluice("install", "worker", "--model", "none")
    until(lambda: machine.restart_what_died() == 0)
    assert machine.log().count("SLUICE_MAX_ROWS=no") == 1


@pytest.mark.slow
def test_jobs_outlast_a_worker_s_service_that_is_killed_rebooted_upgraded_and_uninstalled(
    machine: Machine, redis_url: str
) -> None:
    settings = {"REDIS_URL": redis_url, "MODEL": str(TINY_CHAT), "MODEL_NAME": "served", "LEASE_S": "1", "GRACE_S": "1"}
    (machine.folder / ".env").write_text("".join(f"SLUICE_{name}={value}\n" for name, value in settings.items()))
    before = machine.left()
    endless = {
        "messages": [{"role": "user", "content": "Count to 40."}],
        "max_tokens": 20_000,
        "logit_bias": {"2": -100},
    }
    hello = {"messages": [{"role": "user", "content": "Count to 3."}]}
    with SyncClient(redis_url) as client:

        def answers() -> bool:
            text = client.result(client.submit(hello, model="served").id)["choices"][0]["message"]["content"]
            return bool(text == "1 2 3")

        job = client.submit(endless, model="served").id
        machine.sluice("install", "worker")
        for break_off in (lambda: (machine.kill(), machine.restart_what_died()), machine.reboot):
            assert answers(), machine.log()
            assert client.state(job) == "running"
            break_off()
        assert answers()
        machine.sluice("install", "worker", "--max-rows", "2")
        assert answers()
        assert "2 rows" in machine.log()
        assert client.state(job) == "running"
        machine.sluice("uninstall", "worker")
        assert client.state(job) == "queued"
        client.cancel(job)
    assert machine.left() == sorted([*before, "log"])
