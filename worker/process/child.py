"""Child processes, for work that could not be stopped on a thread, or would hold the interpreter's lock."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from worker.errors import JobFailure
from worker.process.frames import BadFrame, Frame, FrameKind, FrameLimits, LimitExceeded, read_frame, write_frame

_ROOT = Path(__file__).parents[2]  # the folder of the package `worker`
_CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


class ChildFailed(Exception):
    """The process has ended, or was ended, without an answer. The message is for the log."""


class ChildCrashed(ChildFailed):
    """A fault in native code ended the process, such as an overflow of the stack."""


class Children:
    """Child processes of one module. They are started when they are needed, or one ahead. For the event loop's
    thread."""

    def __init__(self, module: str, most: int, *, reused: bool = False, ahead: bool = False) -> None:
        """`most`: processes at once. `reused`: a process serves further requests; otherwise it ends after one.
        `ahead`: one is started now, and after each request, so that the next request does not wait for its start."""
        self._module, self._reused = module, reused
        self._free = asyncio.Semaphore(most)
        # Threads of their own, which start, await and end processes, so that other work does not wait for them.
        self._threads = ThreadPoolExecutor(most, module)
        self._idle: list[Child] = []
        self._ahead = self._threads.submit(self._start_ahead) if ahead else None
        self._closed = False

    async def ask(self, task: Any, body: bytes, limits: FrameLimits) -> Frame:
        """Return the answer of a process to a request; waits for a free one. `task`: a JSON value.

        Raises `JobFailure` if the process refuses the request, `LimitExceeded`, `ChildFailed` and TimeoutError. If it
        takes too long or the caller is cancelled, the process is killed, and has ended when this returns.
        """
        async with self._free:
            if self._ahead is not None and not self._ahead.done():
                await asyncio.shield(asyncio.wrap_future(self._ahead))  # a few milliseconds, on a free thread
            child = self._next()
            run = asyncio.get_running_loop().run_in_executor
            running = run(self._threads, self._ask, child, task, body, limits)
            try:
                async with asyncio.timeout(limits.wall_s):
                    return await asyncio.shield(running)
            except (asyncio.CancelledError, TimeoutError):
                child.kill()
                await asyncio.wait([running])
                raise
            finally:
                if child.alive:
                    self._idle.append(child)
                self._ahead = self._next_ahead()

    def _next_ahead(self) -> "Future[None] | None":
        """Start a process for a later request, unless one is idle or starts now."""
        if self._ahead is None or self._closed or self._idle or not self._ahead.done():
            return self._ahead
        return self._threads.submit(self._start_ahead)

    def _start_ahead(self) -> None:
        """Start a process that then is idle. Blocks."""
        child = Child(self._module)
        try:
            child.start()
        except OSError:  # the next request tries again, and raises the error
            return
        self._idle.append(child)
        if self._closed:
            self._end_idle()

    def _ask(self, child: "Child", task: Any, body: bytes, limits: FrameLimits) -> Frame:
        """Ask a process, and end it unless it is reused. Blocks."""
        try:
            return child.ask(task, body, limits)
        finally:
            if not self._reused:
                child.close()

    def _next(self) -> "Child":
        """Return an idle process, or one that starts with its first request."""
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
            child.close()  # it has ended, so this does not block
        return Child(self._module)

    def close(self) -> None:
        """End idle processes and release the threads. Blocks until the processes have ended. None may be in use."""
        self._closed = True
        self._threads.shutdown(wait=False)
        self._end_idle()

    def _end_idle(self) -> None:
        while True:
            try:
                child = self._idle.pop()
            except IndexError:  # not asked before: a process that was started ahead is ended by either of two threads
                return
            child.close()


class Child:
    """A process `python -m module`, which serves one request at a time by the protocol of `frames`. It starts with the
    first request, or before it by `start`. One thread uses it, and others may kill it."""

    def __init__(self, module: str) -> None:
        self._module, self._killed = module, Event()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """True if the process runs and was not killed."""
        return self._process is not None and not self._killed.is_set() and self._process.poll() is None

    def start(self) -> None:
        """Start the process, without waiting until it can serve. Raises OSError."""
        self._process = start(self._module)

    def ask(self, task: Any, body: bytes, limits: FrameLimits) -> Frame:
        """Return the answer to a request. `task`: a JSON value. Blocks for long, so it belongs in a thread.

        Raises `JobFailure` if the process refuses the request. Raises `LimitExceeded` and `ChildFailed`; then it has
        ended.
        """
        answers = list[Frame]()
        try:
            self._exchange(Frame(FrameKind.REQUEST, [limits, task], body), answers)
        except (OSError, BadFrame, LimitExceeded) as error:
            failure = self._failure(error)
            if not answers:
                raise failure from None
        return answers[-1]

    def _exchange(self, request: Frame, answers: list[Frame]) -> None:
        """Send a request and collect its answers, of which there is at least one."""
        self._process = process = self._process or start(self._module)
        if self._killed.is_set():  # checked after `_process` is set: `kill` uses the opposite order
            process.kill()
        assert process.stdin
        assert process.stdout
        write_frame(process.stdin, request)
        while (frame := read_frame(process.stdout)).kind is FrameKind.ANSWER:
            answers.append(frame)
        match frame.kind:
            case FrameKind.REFUSED:
                type, message, param = frame.head
                raise JobFailure(type, message, param=param)
            case FrameKind.EXCEEDED:
                raise LimitExceeded
        if not answers:
            raise BadFrame

    def _failure(self, error: Exception) -> Exception:
        """End the process, and return the exception that an error stands for."""
        errors = self.close()
        if self._process is None:
            return ChildFailed(f"a process of {self._module} did not start: {error}")
        status = self._process.returncode
        message = f"process {self._process.pid} of {self._module} ended with status {status}: {errors}"
        if status == -signal.SIGXCPU or isinstance(error, LimitExceeded):
            return LimitExceeded(message)
        return ChildCrashed(message) if status in _CRASHES else ChildFailed(message)

    def kill(self) -> None:
        """Kill the process, also while it starts or serves a request: that call then raises `ChildFailed`. Does not
        block; call `close` afterwards."""
        self._killed.set()
        if self._process is not None:
            self._process.kill()

    def close(self) -> str:
        """Kill the process, wait until it has ended, and close its pipes. Blocks. May be repeated. Returns the last
        500 bytes of its stderr."""
        self.kill()
        if self._process is None:
            return ""
        _, errors = self._process.communicate()
        return errors[-500:].decode(errors="replace")


def start(module: str) -> "subprocess.Popen[bytes]":
    """Start `python -m module` with pipes for its standard input, output and errors.

    Does not fork: a fork takes long when the caller has many gigabytes in memory, and holds the interpreter's lock.
    """
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    # The process inherits this: a signal to the process group, as by Ctrl-C in the terminal, is meant for the worker,
    # which may need the process while it drains.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            # With this, and without a new session or working directory, Popen uses posix_spawn. Files that Python
            # opens are closed in the new process anyway.
            close_fds=False,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with these variables, for a child process."""
    return {**os.environ, **variables}
