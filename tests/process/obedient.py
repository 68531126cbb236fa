"""A child process that does what its task says."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from typing import Any

from worker.errors import JobFailure
from worker.process.frames import LimitExceeded, Send, handle_frames


def answer(task: Any, body: bytes, send: Send) -> None:
    match task:
        case "echo":
            send(task, body)
        case "twice":
            send("first", b"")
            send("second", body)
        case "nothing":
            pass
        case ["print", length]:
            with suppress(BlockingIOError):  # nobody reads it
                print("x" * length, flush=True)
            send(None, body)
        case "refuse":
            raise JobFailure("unsupported", "this is not supported.")
        case "fail":
            raise RuntimeError("it failed")
        case "too expensive":
            raise LimitExceeded
        case "no memory":
            raise MemoryError
        case "fill":
            send(None, b"x" * (1 << 30))
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "priority":
            send(os.nice(0), b"")
        case "fault":
            ctypes.string_at(0)
        case ["signal", number]:
            os.kill(os.getpid(), number)
            time.sleep(60)
        case ["first, then signal", number]:
            send("first", b"")
            os.kill(os.getpid(), number)
            time.sleep(60)


if __name__ == "__main__":
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= {signal.SIGINT, signal.SIGTERM}
    handle_frames(answer)
