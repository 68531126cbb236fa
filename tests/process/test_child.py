"""A child process answers, refuses or fails, and its caller can tell which."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import ROOT
from worker.errors import JobFailure
from worker.process.child import Child, ChildCrashed, ChildFailed
from worker.process.frames import Frame, FrameKind, FrameLimits, LimitExceeded

LIMITS = FrameLimits(cpu_s=20, address_bytes=1 << 40, wall_s=60.0)


def pid(child: Child) -> int:
    assert child._process
    return child._process.pid


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child("tests.process.obedient")
    yield child
    child.close()


def test_a_process_answers_one_request_after_the_other(child: Child) -> None:
    assert child.ask("echo", b"\x00\n\xff", LIMITS) == Frame(FrameKind.ANSWER, "echo", b"\x00\n\xff")
    first = pid(child)
    large = b"x" * 10_000_000
    assert child.ask("echo", large, LIMITS).body == large
    assert (pid(child), child.alive) == (first, True)


def test_the_last_of_several_answers_counts(child: Child) -> None:
    assert child.ask("twice", b"x", LIMITS) == Frame(FrameKind.ANSWER, "second", b"x")


def test_a_refusal_is_raised_as_the_child_raised_it(child: Child) -> None:
    with pytest.raises(JobFailure) as raised:
        child.ask("refuse", b"", LIMITS)
    assert (raised.value.type, raised.value.message) == ("unsupported", "this is not supported.")
    assert child.ask("echo", b"x", LIMITS).body == b"x"


@pytest.mark.parametrize(
    ("task", "failure"),
    [
        (["signal", signal.SIGKILL], ChildFailed),
        (["signal", signal.SIGHUP], ChildFailed),
        (["signal", signal.SIGABRT], ChildCrashed),
        ("fault", ChildCrashed),
        ("fail", ChildFailed),
        ("nothing", ChildFailed),
        ("too expensive", LimitExceeded),
    ],
    ids=str,
)
def test_a_process_that_ends_without_an_answer_is_a_failure(child: Child, task: Any, failure: type) -> None:
    with pytest.raises((ChildFailed, LimitExceeded)) as raised:
        child.ask(task, b"", LIMITS)
    assert type(raised.value) is failure
    assert f"process {pid(child)} of tests.process.obedient" in str(raised.value)
    assert not child.alive


def test_the_error_of_a_process_is_part_of_its_failure(child: Child) -> None:
    with pytest.raises(ChildFailed, match="it failed"):
        child.ask("fail", b"", LIMITS)


def test_an_answer_counts_if_the_process_ends_while_it_looks_for_a_better_one(child: Child) -> None:
    assert child.ask(["first, then signal", signal.SIGKILL], b"", LIMITS).head == "first"
    assert not child.alive


def test_a_process_that_takes_too_much_cpu_time_exceeds_its_limit(child: Child) -> None:
    with pytest.raises(LimitExceeded):
        child.ask("spin", b"", FrameLimits(cpu_s=1, address_bytes=1 << 40, wall_s=60.0))


MEMORY = ["no memory", *(["fill"] if sys.platform == "linux" else [])]  # macOS does not limit address space


@pytest.mark.parametrize("task", MEMORY)
def test_a_process_that_takes_too_much_memory_exceeds_its_limit(child: Child, task: str) -> None:
    with pytest.raises(LimitExceeded):
        child.ask(task, b"", FrameLimits(cpu_s=20, address_bytes=1 << 29, wall_s=60.0))


def test_each_request_has_its_own_limits(child: Child) -> None:
    for limit in (1 << 30, 1 << 40, 1 << 31):
        assert child.ask("echo", b"", FrameLimits(cpu_s=1, address_bytes=limit, wall_s=60.0)).head == "echo"


def test_a_process_that_sends_something_else_is_ended() -> None:
    child = Child("tests.process.babbling")
    with pytest.raises(ChildFailed):
        child.ask("echo", b"", LIMITS)
    assert not child.alive


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(ChildFailed, match=r"No module named tests\.process\.missing"):
        Child("tests.process.missing").ask("echo", b"", LIMITS)


def test_a_process_that_cannot_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing/python")
    with pytest.raises(ChildFailed, match="did not start"):
        Child("tests.process.obedient").ask("echo", b"", LIMITS)


def test_other_output_neither_mixes_with_the_answers_nor_blocks_the_process(child: Child) -> None:
    for length in (10, 1_000_000, 1_000_000):  # more than fits into a pipe that nobody reads
        assert child.ask(["print", length], b"x", LIMITS).body == b"x"


def test_a_process_gives_way_to_the_worker_and_is_started_without_a_fork(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, spawned = os.posix_spawn, list[int]()

    def watched(*args: Any, **how: Any) -> int:
        spawned.append(spawn(*args, **how))
        return spawned[-1]

    monkeypatch.setattr(os, "posix_spawn", watched)
    assert child.ask("priority", b"", LIMITS).head > os.nice(0)
    assert spawned == [pid(child)]


def test_signals_that_tell_the_worker_to_stop_do_not_end_a_process(child: Child) -> None:
    child.ask("echo", b"", LIMITS)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid(child), number)
    assert child.ask("echo", b"x", LIMITS).body == b"x"
    assert not {signal.SIGTERM, signal.SIGINT} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_ends_when_its_pipe_does() -> None:
    command = [sys.executable, "-m", "worker.bounded_json.strict"]
    for said in (b"", b"\x01\x00\x00\x00\x09\x00\x00"):
        ran = subprocess.run(command, cwd=ROOT, input=said, capture_output=True, timeout=20)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


WORKER = """
import threading, time
from worker.process.child import Child
from worker.process.frames import FrameLimits
child = Child("tests.process.obedient")
threading.Thread(target=child.ask, args=("sleep", b"", FrameLimits(50, 1 << 40, 50.0)), daemon=True).start()
while not child._process:
    time.sleep(0.001)
print(child._process.pid, flush=True)
time.sleep(50)
"""


def test_a_process_ends_soon_after_a_worker_that_was_killed_even_within_a_request() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        served = int(worker.stdout.readline())
        time.sleep(0.5)  # it serves the request now, or begins to
        os.kill(served, 0)
        worker.kill()
    deadline = time.monotonic() + 10
    while running(served):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running(number: int) -> bool:
    """False for a zombie too: nobody in a container may collect it."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")
