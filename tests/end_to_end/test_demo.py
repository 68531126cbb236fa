"""The demo, as a person starts it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.stack import ROOT

DEMO = [sys.executable, "-m", "scripts.demo"]
ENV = {**os.environ, "COLUMNS": "160", "TERM": "dumb"}


def children(pid: int) -> list[int]:
    if Path("/proc/self/stat").exists():
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
        return [int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == pid]
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = [line.split() for line in found.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").is_dir() else True


def test_eight_chats_stream_and_a_table_closes() -> None:
    ran = subprocess.run(DEMO, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for said in ("37 38 39 40", "🚀日本", "Your name is Petra.", "(NWP58)", "4 6 8", '"Norway"', "batch"):
        assert said in ran.stdout
    for column in ("in queue", "first token", "tokens/s", "rows in batch"):
        assert column in ran.stdout


def test_an_interrupt_ends_everything_that_was_started() -> None:
    demo = subprocess.Popen(DEMO, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    demo.stdout.readline()  # the server runs, the worker loads
    started = children(demo.pid)
    assert len(started) == 2
    demo.send_signal(signal.SIGINT)
    assert demo.wait(20) == 130
    demo.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in started):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.05)
