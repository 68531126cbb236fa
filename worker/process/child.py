"""Runs child processes, for work that could not be stopped on a thread, or would hold the interpreter's lock."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

_ROOT = Path(__file__).parents[2]  # the folder of the package `worker`


@dataclass(frozen=True, slots=True)
class CompletedChild:
    """A process that has ended."""

    status: int  # exit status; minus the number of the signal if one ended it
    output: bytes
    errors: bytes


async def run_child(module: str, given: bytes) -> CompletedChild:
    """Run `python -m module` once, with `given` on its standard input. If the caller is cancelled, it is killed.

    A new thread starts the process and waits for it, so that the event loop is not blocked.
    """
    child, thread = _Child(module, given), ThreadPoolExecutor(1, "child")
    running = asyncio.get_running_loop().run_in_executor(thread, child.run)
    thread.shutdown(wait=False)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        child.kill()
        await asyncio.wait([running])
        raise


class _Child:
    """A process that one thread starts and waits for, and another may kill."""

    def __init__(self, module: str, given: bytes) -> None:
        self._module, self._given = module, given
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = Event()

    def run(self) -> CompletedChild:
        with start(self._module) as process:
            self._process = process
            if self._killed.is_set():  # checked after `_process` is set: `kill` uses the opposite order
                process.kill()
            output, errors = process.communicate(self._given)
        return CompletedChild(process.returncode, output, errors)

    def kill(self) -> None:
        self._killed.set()
        if self._process is not None:
            self._process.kill()


def start(module: str, *, errors: int | None = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start `python -m module` with pipes for its standard input and output; `errors` as for `Popen`'s stderr.

    Does not fork: a fork takes long when the caller has many gigabytes in memory, and holds the interpreter's lock.
    """
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    # The process inherits this: Ctrl-C in the terminal is meant for the worker.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            # With this, and without a new session or working directory, Popen uses posix_spawn. Files that Python
            # opens are closed in the new process anyway.
            close_fds=False,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
