"""The protocol between the worker and its child processes, on a child's standard input and output, and the child's side
of it.

Every message is a frame: a kind, a head in JSON, and a body of bytes. The worker sends one request at a time. The child
replies with answers, of which the last one counts, and `DONE`; or with `REFUSED` or `EXCEEDED`. If it ends before that,
its last answer counts, if there is one.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from threading import Thread
from typing import IO, Any, NamedTuple

from worker.errors import JobFailure

_LENGTHS = Struct("!BII")  # kind, bytes of the head, bytes of the body


class FrameKind(IntEnum):
    """Kind of a frame, with the content of its head."""

    REQUEST = 1  # the fields of `Limits`, and the task
    ANSWER = 2
    DONE = 3  # null
    REFUSED = 4  # type, message and param of a `JobFailure`
    EXCEEDED = 5  # null, for `LimitExceeded`


class Frame(NamedTuple):
    """A message of the protocol."""

    kind: FrameKind
    head: Any = None  # a JSON value
    body: bytes = b""


class FrameLimits(NamedTuple):
    """Limits of one request to a child process."""

    cpu_s: int  # SIGXCPU ends the process when it has used as much; for the first request, since its start
    address_bytes: int  # of address space, on Linux only: macOS does not enforce a limit
    wall_s: float  # for the worker, which then kills the process


class LimitExceeded(Exception):
    """The request takes too much CPU time or memory, or too deep a stack."""


class BadFrame(Exception):
    """The other end of the pipe is closed, or sends something else."""


def write_frame(pipe: IO[bytes], frame: Frame) -> None:
    """Write a frame. Blocks. Raises OSError."""
    head = json.dumps(frame.head).encode()
    pipe.write(_LENGTHS.pack(frame.kind, len(head), len(frame.body)) + head)
    pipe.write(frame.body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Frame:
    """Read a frame. Blocks. Raises OSError and `BadFrame`."""
    kind, head_bytes, body_bytes = _LENGTHS.unpack(_read(pipe, _LENGTHS.size))
    if head_bytes + body_bytes > 1 << 30:  # an image of 175 megapixels has half of it
        raise BadFrame
    try:
        return Frame(FrameKind(kind), json.loads(_read(pipe, head_bytes)), _read(pipe, body_bytes))
    except (ValueError, RecursionError):  # an unknown kind, or a head that is not JSON
        raise BadFrame from None


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise BadFrame
    return data


Send = Callable[[Any, bytes], None]  # sends an answer: its head, a JSON value, and its body
FrameHandler = Callable[[Any, bytes, Send], None]


def handle_frames(handle: FrameHandler) -> None:
    """Call the handler with the task and body of each request, until the worker closes the pipe. It sends one answer or
    more, of which the last counts, or raises `JobFailure`, `LimitExceeded` or MemoryError. Ends the process soon after
    the worker has ended, also within a request. Other output goes to stderr."""
    os.nice(10)  # a decode step comes first when all cores are busy
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    os.set_blocking(2, False)  # the worker reads it only when the process has ended; a full pipe must not block
    try:
        while True:
            write_frame(answers, _reply(handle, read_frame(sys.stdin.buffer), answers))
    except (BadFrame, BrokenPipeError):  # the worker has closed the pipe
        pass


def _reply(handle: FrameHandler, request: Frame, answers: IO[bytes]) -> Frame:
    """Handle a request, and return the frame that ends the answer."""
    limits, task = request.head
    _limit_resources(FrameLimits(*limits))
    try:
        handle(task, request.body, lambda head, body: write_frame(answers, Frame(FrameKind.ANSWER, head, body)))
    except JobFailure as refusal:
        return Frame(FrameKind.REFUSED, [refusal.type, refusal.message, refusal.param])
    except (MemoryError, LimitExceeded):
        return Frame(FrameKind.EXCEEDED)
    return Frame(FrameKind.DONE)


def _limit_resources(limits: FrameLimits) -> None:
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
        time.sleep(0.5)
    os._exit(1)
