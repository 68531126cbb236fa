"""Child processes are started beside the event loop, and end with their caller."""

import asyncio
import os
import signal
import subprocess
import threading
from typing import Any

import pytest

from worker.process import child
from worker.process.child import run_child

READING = "worker.bounded_json"


async def test_a_process_starts_and_is_fed_off_the_event_loop_s_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, threads = child.start, list[threading.Thread]()

    def watched(module: str) -> "subprocess.Popen[bytes]":
        threads.append(threading.current_thread())
        return start(module)

    monkeypatch.setattr(child, "start", watched)
    ended = await run_child(READING, b"[1]")
    assert (ended.status, ended.errors) == (0, b"")
    assert threads
    assert threading.current_thread() not in threads


async def test_a_process_is_started_without_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, spawned = os.posix_spawn, list[int]()

    def watched(*args: Any, **how: Any) -> int:
        spawned.append(spawn(*args, **how))
        return spawned[-1]

    monkeypatch.setattr(os, "posix_spawn", watched)
    await run_child(READING, b"[1]")
    assert len(spawned) == 1


async def test_an_interrupt_from_the_terminal_does_not_end_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start = child.start

    def interrupted(module: str) -> "subprocess.Popen[bytes]":
        process = start(module)
        process.send_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(child, "start", interrupted)
    assert (await run_child(READING, b"[1]")).status == 0
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


async def test_a_process_that_was_still_starting_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun, go_on = child.start, threading.Event(), threading.Event()
    started = list["subprocess.Popen[bytes]"]()

    def slow(module: str) -> "subprocess.Popen[bytes]":
        begun.set()
        go_on.wait()
        started.append(start(module))
        return started[0]

    monkeypatch.setattr(child, "start", slow)
    running = asyncio.ensure_future(run_child(READING, b"[1]"))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert started[0].returncode == -signal.SIGKILL
