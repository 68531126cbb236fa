"""The side of a child process in the protocol of `frames`."""

import os
import resource
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import IO, Any

from worker.errors import JobFailure
from worker.process.frames import BadFrame, Frame, Kind, LimitExceeded, Limits, read_frame, write_frame

Send = Callable[[Any, bytes], None]  # sends an answer: its head, a JSON value, and its body
Handler = Callable[[Any, bytes, Send], None]

_NICENESS = 10  # a decode step comes first when all cores are busy
_WATCH_S = 0.5  # interval of the check that the worker still runs


def serve(handle: Handler) -> None:
    """Call the handler with the task and body of each request, until the worker closes the pipe. It sends one answer or
    more, of which the last counts, or raises `JobFailure`, `LimitExceeded` or MemoryError. Ends the process soon after
    the worker has ended, also within a request. Other output goes to stderr."""
    os.nice(_NICENESS)
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    os.set_blocking(2, False)  # the worker reads it only when the process has ended; a full pipe must not block
    try:
        while True:
            write_frame(answers, _reply(handle, read_frame(sys.stdin.buffer), answers))
    except (BadFrame, BrokenPipeError):  # the worker has closed the pipe
        pass


def _reply(handle: Handler, request: Frame, answers: IO[bytes]) -> Frame:
    """Handle a request, and return the frame that ends the answer."""
    limits, task = request.head
    _limit_resources(Limits(*limits))
    try:
        handle(task, request.body, lambda head, body: write_frame(answers, Frame(Kind.ANSWER, head, body)))
    except JobFailure as refusal:
        return Frame(Kind.REFUSED, [refusal.type, refusal.message, refusal.param])
    except (MemoryError, LimitExceeded):
        return Frame(Kind.EXCEEDED)
    return Frame(Kind.DONE)


def _limit_resources(limits: Limits) -> None:
    """Limit the process for one request."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + limits.cpu_s)
    if sys.platform == "linux":
        _limit(resource.RLIMIT_AS, limits.address_bytes)


def _limit(kind: int, value: int) -> None:
    """Set a soft limit, which the next request may raise again, within the hard limit."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _end_with(worker: int) -> None:
    while os.getppid() == worker:
        time.sleep(_WATCH_S)
    os._exit(1)
