"""Checks the bytes of a body: how expensive it is to parse, and what JSON forbids or UTF-8 cannot contain. Run as a
child process, it parses expensive bodies: see `reader`."""

import json
import marshal
import re
import sys
from collections.abc import Iterator
from math import isfinite
from typing import Any, NoReturn

from worker.errors import JobFailure
from worker.process.frames import FrameLimits, Send, handle_frames

_NOT_JSON = (
    "The job's body is not JSON: give arq's create_pool a JSON job_serializer, for example "
    "lambda job: json.dumps(job).encode()."
)
TOO_DEEP = "The job's body is nested too deeply to be read; nest its lists and objects at most 64 levels deep."


class NotJson(ValueError):
    """The body is not valid JSON. The message is for the client."""


def loads(raw: bytes) -> Any:
    """Parse UTF-8 JSON with finite numbers. Raises `NotJson`."""
    try:
        return json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole_number
        )
    except NotJson:
        raise
    except RecursionError:
        raise NotJson(TOO_DEEP) from None
    except ValueError:  # not UTF-8 is one too
        raise NotJson(_NOT_JSON) from None


def _refuse_constant(name: str) -> NoReturn:
    raise NotJson(f"The request holds {name}, which is not JSON; send a number or null instead.")


def _finite(digits: str) -> float:
    """Parse a finite number: 1e999 would become infinity, which JSON cannot represent."""
    number = float(digits)
    if not isfinite(number):
        raise NotJson(f"The request holds the number {_short(digits)}; numbers go up to 1.8e308.")
    return number


def _whole_number(digits: str) -> int:
    most = sys.int_info.default_max_str_digits  # 4,300
    if len(digits) > most:
        raise NotJson(
            f"The request holds a whole number of {len(digits):,} digits; send one of at most {most:,}, or a string."
        )
    return int(digits)


def _short(digits: str) -> str:
    """Return the digits; of a long number, the beginning and the exponent."""
    if len(digits) <= 20:
        return digits
    exponent = re.search(r"[eE][+-]?\d{1,6}$", digits)
    return f"{digits[:10]}...{exponent[0] if exponent else ''}"


# The commas and opening brackets outside of strings are counted: at least as many as values. 10,000 tool calls, the
# default limit of a conversation, are 60,000. Parsing this many takes about 50 ms.
MAX_BODY_VALUES = 100_000
_STRING = re.compile(rb'"[^"]*"?')


def is_expensive(body: bytes) -> bool:
    """True if parsing could hold the interpreter's lock for more than about 50 ms. Takes 30 ms for 16 MB, in slices, so
    that other threads run between them. Counts characters inside strings too."""
    if len(body) > 4_000_000 and not body.isascii():  # up to four bytes a character in memory, and copied twice
        return True
    values = escapes = 0
    for part in _slices(body):
        values += _values(part)
        escapes += part.count(b"\\")
        if values > MAX_BODY_VALUES or escapes > 1_000_000:  # decoding a million escapes takes 20 ms
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


def limits(length: int) -> FrameLimits:
    """Return the limits of the child process for a body of `length` bytes."""
    cpu_s = 5 + length // 2_000_000
    return FrameLimits(cpu_s, (1 << 30) + 40 * length, wall_s=10.0 * cpu_s)  # its priority is low, and others may run


def _values(part: bytes) -> int:
    return part.count(b",") + part.count(b"[") + part.count(b"{")


def _slices(body: bytes) -> Iterator[bytes]:
    size = 65_536
    return (body[start : start + size] for start in range(0, len(body), size))


_PLAIN_NAME = re.compile(r"[\w$-]{1,40}", re.ASCII)


def is_text(value: str) -> bool:
    """True if the string has no lone surrogates, so that UTF-8 can represent it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_lone_surrogate(value: Any) -> str | None:
    """Return the path of the first string or name with a lone surrogate, such as `messages[0].content`, or None."""
    return next(_places(value, ""), None)


def _places(value: Any, path: str) -> Iterator[str]:
    match value:
        case str():
            if not is_text(value):
                yield path
        case list():
            for index, item in enumerate(value):
                yield from _places(item, f"{path}[{index}]")
        case dict():
            for name, item in value.items():
                inside = _longer(path, name)
                yield from _places(name, inside)
                yield from _places(item, inside)


def _longer(path: str, name: str) -> str:
    """Append a name to the path, unless it is not a plain word."""
    if not _PLAIN_NAME.fullmatch(name):
        return path
    return f"{path}.{name}" if path else name


def send_value(task: None, body: bytes, send: Send) -> None:
    """Send the value of a body, marshalled. Raises `JobFailure`."""
    value = parse_body(body)
    try:
        marshalled = marshal.dumps(value)
    except ValueError:  # its limit is 2,000 levels; it accepts all other values of JSON
        raise JobFailure("invalid_request", TOO_DEEP) from None
    send(None, marshalled)


def parse_body(body: bytes) -> Any:
    """Return the JSON value of a body. Raises `JobFailure`."""
    values = count_values(body)
    if values > MAX_BODY_VALUES:
        raise JobFailure(
            "too_large",
            f"The request holds {values:,} JSON values; this worker accepts {MAX_BODY_VALUES:,}. "
            "Shorten its lists and objects, or send them as text.",
        )
    try:
        value = loads(body)
    except NotJson as error:
        raise JobFailure("invalid_request", str(error)) from None
    # Checked here, since it would take the worker a second for two million strings.
    try:
        place = first_lone_surrogate(_request(value))
    except RecursionError:  # its limit is lower than that of `json`, from Python 3.13 on much lower
        raise JobFailure("invalid_request", TOO_DEEP) from None
    if place is not None:
        half = f"{place or 'The request'} holds half of a surrogate pair, which is no character."
        raise JobFailure("invalid_request", half)
    return value


def _request(envelope: Any) -> Any:
    match envelope:
        case {"a": [request]}:
            return request
    return envelope


if __name__ == "__main__":
    handle_frames(send_value)
