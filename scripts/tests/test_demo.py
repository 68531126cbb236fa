"""The demo as a process."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from scripts.demo import Chat, Grid, chats, closing_table, picture
from tests.support.stack import ROOT

DEMO = [sys.executable, "-m", "scripts.demo"]
pytestmark = pytest.mark.live

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


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 100)])
def test_all_chats_fit_on_the_screen_at_once_and_show_how_they_end(width: int, height: int) -> None:
    shown = [Chat(str(k), [], text=" ".join(map(str, range(100)))) for k in range(8)]
    console = Console(width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO())
    lines = ["".join(segment.text for segment in line) for line in console.render_lines(Grid(shown), pad=False)]
    assert len(lines) <= height
    assert sum(line.count("98 99") for line in lines) == 8


def ended(title: str, text: str = "", **timings: float) -> Chat:
    usage = {"prompt_tokens": 573, "completion_tokens": 110}
    return Chat(title, [], text=text, result={"usage": usage, "sluice": {"timings": timings, "rows_mean": 10.5}})


def closing_row(**timings: float) -> str:
    chat = ended("long text", **timings)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(closing_table([chat]))
    return console.export_text().splitlines()[-2]


def test_a_rate_that_was_not_measured_is_not_shown() -> None:
    assert closing_row(queue_s=0.0, ttft_s=0.1, tokens_per_s=0.0).split()[-2:] == ["–", "10.5"]


def test_the_table_of_a_slow_machine_fits_too() -> None:
    row = closing_row(queue_s=0.9999, ttft_s=99.94, tokens_per_s=1234.5)
    assert row.split() == "long text interactive 573 110 1.0 s 99.9 s 1234 10.5".split()


def words_of(svg: str) -> str:
    texts = (
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")
    )
    return " ".join(" ".join(texts).split())


def test_the_picture_shows_the_end_of_each_answer_and_the_table() -> None:
    shown = [ended(str(k), " ".join(map(str, range(100))), queue_s=0.1, ttft_s=1, tokens_per_s=9) for k in range(8)]
    words = words_of(picture(shown, "8 chats"))
    assert (words.count("98 99"), words.count("573 110 100 ms 1.0 s 9 10.5")) == (8, 8)


def test_the_picture_in_the_documents_is_of_these_chats_and_small() -> None:
    svg = (ROOT / "docs" / "demo.svg").read_text()
    assert len(svg) < 200_000
    assert "http" not in svg.replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
    words = words_of(svg)
    assert [chat.title for chat in chats() if f"{chat.title} stop" not in words] == []


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
