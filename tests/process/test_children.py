"""Child processes are started and awaited beside the event loop, and end with their caller."""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from worker.errors import JobFailure
from worker.process import child as module
from worker.process.child import ChildFailed, Children
from worker.process.frames import FrameLimits

LIMITS = FrameLimits(cpu_s=20, address_bytes=1 << 40, wall_s=60.0)
OBEDIENT = "tests.process.obedient"
Process = subprocess.Popen[bytes]


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes in the order of their start."""
    start, processes = module.start, list[Process]()

    def watched(name: str) -> Process:
        assert threading.current_thread() is not threading.main_thread()
        processes.append(start(name))
        return processes[-1]

    monkeypatch.setattr(module, "start", watched)
    return processes


@pytest.fixture(params=[False, True], ids=["once", "reused"])
async def children(request: pytest.FixtureRequest) -> AsyncIterator[Children]:
    children = Children(OBEDIENT, 2, reused=request.param)
    yield children
    children.close()


async def test_requests_at_once_get_their_own_answers_from_no_more_than_two_processes(
    children: Children, started: list[Process]
) -> None:
    most = 0

    async def asked(number: int) -> bytes:
        nonlocal most
        body = (await children.ask("echo", b"%d" % number, LIMITS)).body
        most = max(most, sum(process.poll() is None for process in started))
        return body

    assert await asyncio.gather(*map(asked, range(6))) == [b"%d" % number for number in range(6)]
    assert most <= 2


async def test_a_process_is_reused_only_if_it_may_be(started: list[Process]) -> None:
    for reused, expected in ((False, 3), (True, 1)):
        started.clear()
        children = Children(OBEDIENT, 2, reused=reused)
        for task in ("echo", "refuse", "echo"):
            try:
                await children.ask(task, b"", LIMITS)
            except JobFailure:
                assert task == "refuse"
        children.close()
        assert len(started) == expected
        assert all(process.returncode is not None for process in started)


async def test_a_process_that_was_killed_while_idle_is_replaced(started: list[Process]) -> None:
    children = Children(OBEDIENT, 1, reused=True)
    await children.ask("echo", b"", LIMITS)
    started[0].send_signal(signal.SIGKILL)
    while started[0].poll() is None:
        await asyncio.sleep(0.001)
    assert (await children.ask("echo", b"x", LIMITS)).body == b"x"
    assert len(started) == 2
    children.close()


async def test_a_failure_harms_no_other_request(children: Children) -> None:
    tasks: list[Any] = [["signal", signal.SIGKILL], "echo", "fail", "echo", "echo"]
    ended = await asyncio.gather(*(children.ask(task, b"", LIMITS) for task in tasks), return_exceptions=True)
    assert [isinstance(each, ChildFailed) for each in ended] == [True, False, True, False, False]


async def test_a_process_that_takes_too_long_is_ended(children: Children, started: list[Process]) -> None:
    with pytest.raises(TimeoutError):
        await children.ask("sleep", b"", FrameLimits(cpu_s=20, address_bytes=1 << 40, wall_s=0.2))
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert (await children.ask("echo", b"x", LIMITS)).body == b"x"


async def test_a_process_ends_with_its_caller(children: Children, started: list[Process]) -> None:
    asking = asyncio.ensure_future(children.ask("sleep", b"", LIMITS))
    while not started:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert started[0].returncode == -signal.SIGKILL
    assert (await children.ask("echo", b"x", LIMITS)).body == b"x"


async def test_a_process_that_is_still_starting_ends_with_its_caller(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun, go_on = module.start, threading.Event(), threading.Event()
    processes = list[Process]()

    def slow(name: str) -> Process:
        begun.set()
        go_on.wait()
        processes.append(start(name))
        return processes[-1]

    monkeypatch.setattr(module, "start", slow)
    asking = asyncio.ensure_future(children.ask("echo", b"", LIMITS))
    await asyncio.to_thread(begun.wait)  # the event loop goes on meanwhile
    asking.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert processes[0].returncode == -signal.SIGKILL


async def test_a_caller_that_waits_for_a_process_can_be_cancelled(started: list[Process]) -> None:
    children = Children(OBEDIENT, 1)
    first, second = (asyncio.ensure_future(children.ask("sleep", b"", LIMITS)) for _ in range(2))
    while not started:
        await asyncio.sleep(0.001)
    for asking in (second, first):
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert len(started) == 1


async def test_no_idle_process_is_left_after_the_end(children: Children, started: list[Process]) -> None:
    await asyncio.gather(*(children.ask("echo", b"", LIMITS) for _ in range(4)))
    children.close()
    for process in started:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_one_process_is_started_ahead_of_each_request(started: list[Process]) -> None:
    children = Children(OBEDIENT, 2, ahead=True)
    for requests in range(1, 4):
        while not children._idle:
            await asyncio.sleep(0.001)
        assert children._idle[0]._process is started[-1]
        await children.ask("echo", b"", LIMITS)
        assert len(started) <= requests + 1
        assert started[requests - 1].poll() is not None  # it has answered
    children.close()


async def test_requests_beside_the_one_ahead_start_processes_of_their_own(started: list[Process]) -> None:
    children = Children(OBEDIENT, 2, ahead=True)
    bodies = await asyncio.gather(*(children.ask("echo", b"%d" % number, LIMITS) for number in range(6)))
    assert [answer.body for answer in bodies] == [b"%d" % number for number in range(6)]
    children.close()
    children._threads.shutdown(wait=True)
    assert all(process.poll() is not None for process in started)


async def test_a_process_that_cannot_be_started_ahead_fails_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str) -> Process:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(module, "start", full)
        children = Children(OBEDIENT, 2, ahead=True)
        with pytest.raises(ChildFailed):
            await children.ask("echo", b"", LIMITS)
    assert (await children.ask("echo", b"a", LIMITS)).body == b"a"
    children.close()
