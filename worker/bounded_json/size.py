"""Estimates from a body's bytes how expensive it is to parse."""

import re
from collections.abc import Iterator

from worker.process.frames import Limits

# The commas and opening brackets outside of strings are counted: at least as many as values. 10,000 tool calls, the
# default limit of a conversation, are 60,000. Parsing this many takes about 50 ms.
MAX_BODY_VALUES = 100_000
_MOST_ESCAPES = 1_000_000  # decoding a million takes 20 ms, during which the interpreter's lock is held
_WIDE_BYTES = 4_000_000  # of non-ASCII text: up to four bytes a character in memory, and copied twice
_SLICE = 65_536
_STRING = re.compile(rb'"[^"]*"?')


def is_expensive(body: bytes) -> bool:
    """True if parsing could hold the interpreter's lock for more than about 50 ms. Takes 30 ms for 16 MB, in slices, so
    that other threads run between them. Counts characters inside strings too."""
    if len(body) > _WIDE_BYTES and not body.isascii():
        return True
    values = escapes = 0
    for part in _slices(body):
        values += _values(part)
        escapes += part.count(b"\\")
        if values > MAX_BODY_VALUES or escapes > _MOST_ESCAPES:
            return True
    return False


def count_values(text: bytes) -> int:
    """Count the commas and opening brackets outside of strings. The count is exact for JSON; from other bytes, the
    parser never reads more values than it. Takes about 0.3 s for 16 MB, in slices."""
    count = 0
    carried = b""
    inside = False
    for part in _slices(text):
        plain = (carried + part).replace(b"\\\\", b"")
        carried = b"\\" if plain.endswith(b"\\") else b""  # it escapes the first character of the next slice
        quoted = b'"' * inside + plain.replace(b'\\"', b"")  # now each quotation mark begins or ends a string
        count += _values(_STRING.sub(b"", quoted))
        inside = quoted.count(b'"') % 2 == 1
    return count


def limits(length: int) -> Limits:
    """Return the limits of the child process for a body of `length` bytes."""
    cpu_s = 5 + length // 2_000_000
    return Limits(cpu_s, (1 << 30) + 40 * length, wall_s=10.0 * cpu_s)  # its priority is low, and others may run


def _values(part: bytes) -> int:
    return part.count(b",") + part.count(b"[") + part.count(b"{")


def _slices(body: bytes) -> Iterator[bytes]:
    return (body[start : start + _SLICE] for start in range(0, len(body), _SLICE))
