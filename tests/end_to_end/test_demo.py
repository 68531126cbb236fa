"""The demo as a process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.cells import cell_len

from tests.support.stack import ROOT

DEMO = [sys.executable, "-m", "scripts.demo"]

ENV = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}


def children(pid: int) -> list[int]:
    if Path("/proc/self/stat").exists():
        stats = filter(None, map(read_proc, Path("/proc").glob("[0-9]*/stat")))
        return [int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == pid]
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [line.split() for line in found.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def read_proc(path: Path) -> str:
    """Return a file of a process; "" if the process has ended, at any moment."""
    try:
        return path.read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/status").exists():
        return True
    return "zombie" not in (status := read_proc(Path(f"/proc/{pid}/status"))) and bool(status)


def test_eight_chats_stream_and_a_table_closes() -> None:
    ran = subprocess.run(DEMO, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for said in ("37 38 39 40", "🚀日本", "Your name is Petra.", "(NWP58)", "4 6 8", '"Norway"', "batch"):
        assert said in ran.stdout
    assert [line for line in ran.stdout.splitlines() if cell_len(line) > 80] == []
    first, second = (line.split() for line in ran.stdout.splitlines() if line.split()[-1:] in (["in"], ["batch"]))
    assert first == "tokens tokens in first tokens rows in".split()
    assert second == "chat lane in out queue token per s batch".split()
    assert "sluice up --model models/tiny-chat" in ran.stdout, "the next step"


def test_an_interrupt_ends_everything_that_was_started() -> None:
    demo = subprocess.Popen(DEMO, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    demo.stdout.readline()  # the server runs, the worker loads
    started = children(demo.pid)
    assert len(started) == 2
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == 130
    demo.stdout.close()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in started):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.05)
