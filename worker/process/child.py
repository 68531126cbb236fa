"""Child processes, for work that a thread could not stop, or that would hold the interpreter's lock there."""

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
class Ended:
    status: int  # negative: the signal that ended it
    output: bytes
    errors: bytes


async def run_child(module: str, given: bytes) -> Ended:
    """Run `python -m module` once, with `given` on its standard input. If the caller is cancelled, the process ends.

    A thread of its own starts it and waits for it, so that the event loop is not blocked.
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
        self._unwanted = Event()

    def run(self) -> Ended:
        with start(self._module) as process:
            self._process = process
            if self._unwanted.is_set():  # in this order: `kill` sets it before it checks for a process
                process.kill()
            output, errors = process.communicate(self._given)
        return Ended(process.returncode, output, errors)

    def kill(self) -> None:
        self._unwanted.set()
        if self._process is not None:
            self._process.kill()


def start(module: str) -> subprocess.Popen[bytes]:
    """Start it without a fork, which takes long when the caller has many gigabytes in memory and holds the
    interpreter's lock. The caller's thread receives no more interrupts."""
    # The process inherits this: an interrupt from the terminal is meant for the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        # So, and with neither a session nor a working directory of its own, it is posix_spawn. What Python opens is
        # closed in the new process anyway.
        close_fds=False,
    )  # fmt: skip
