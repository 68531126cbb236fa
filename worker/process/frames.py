"""The protocol between the worker and its child processes, on a child's standard input and output.

Every message is a frame: a kind, a head in JSON, and a body of bytes. The worker sends one request at a time. The child
replies with answers, of which the last one counts, and `DONE`; or with `REFUSED` or `EXCEEDED`. If it ends before that,
its last answer counts, if there is one.
"""

import json
from enum import IntEnum
from struct import Struct
from typing import IO, Any, NamedTuple

_LENGTHS = Struct("!BII")  # kind, bytes of the head, bytes of the body
_MAX_BYTES = 1 << 30  # an image of 175 megapixels has half of it


class Kind(IntEnum):
    """Kind of a frame, with the content of its head."""

    REQUEST = 1  # the fields of `Limits`, and the task
    ANSWER = 2
    DONE = 3  # null
    REFUSED = 4  # type, message and param of a `JobFailure`
    EXCEEDED = 5  # null, for `LimitExceeded`


class Frame(NamedTuple):
    """A message of the protocol."""

    kind: Kind
    head: Any = None  # a JSON value
    body: bytes = b""


class Limits(NamedTuple):
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
    if head_bytes + body_bytes > _MAX_BYTES:
        raise BadFrame
    try:
        return Frame(Kind(kind), json.loads(_read(pipe, head_bytes)), _read(pipe, body_bytes))
    except (ValueError, RecursionError):  # an unknown kind, or a head that is not JSON
        raise BadFrame from None


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = pipe.read(length)
    if len(data) < length:
        raise BadFrame
    return data
