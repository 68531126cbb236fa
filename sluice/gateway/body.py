"""Reads the JSON object of a request's body, within limits of size, of values and of depth."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from sluice.gateway.disconnect import ClientDisconnected
from sluice.gateway.errors import ApiError
from sluice.gateway.protection.memory import HeldBytes
from sluice.gateway.threads import in_thread_if_long
from sluice.openai import BadRequest, read_object

_MAX_VALUES = 100_000  # of the contract; parsing this many takes about 50 ms
_MAX_LEVELS = 100  # far more than a JSON schema has, far fewer than a JSON writer can nest
_SLICE = 65_536
_STRING = re.compile(rb'"[^"]*"?')


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body: its JSON object, its length in bytes, and the hash of these bytes."""

    content: dict[str, Any]
    length: int
    digest: str


async def read_body(request: Request, max_bytes: int, held: HeldBytes) -> Body:
    """Return the body; its bytes count as held as they arrive. Raises `ApiError`: 413 beyond `max_bytes` or 100,000
    values, 429 or 503 if more bytes are held already, 400 for anything but an object and for one that is nested more
    than 100 levels deep."""
    raw = await _read_bytes(request, max_bytes, held)
    return await in_thread_if_long(len(raw), _parse, raw)


async def _read_bytes(request: Request, max_bytes: int, held: HeldBytes) -> bytes:
    """Return the body's bytes. Raises `ApiError` as soon as the body is known to be too long."""
    announced = int(request.headers.get("content-length") or 0)
    _refuse_long(announced, max_bytes)
    held.check(announced)
    raw = bytearray()
    try:
        async for part in request.stream():
            _refuse_long(len(raw) + len(part), max_bytes)
            held.add(len(part))
            raw += part
    except ClientDisconnect:
        raise ClientDisconnected from None
    return bytes(raw)


def _refuse_long(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise ApiError(413, f"The body has more than {max_bytes:,} bytes; send less.", code="too_large")


def _parse(raw: bytes) -> Body:
    values = _count_values(raw)
    if values > _MAX_VALUES:
        raise ApiError(413, f"The body holds {values:,} JSON values; send at most {_MAX_VALUES:,}.", code="too_large")
    try:
        content = read_object(raw)
    except BadRequest as error:
        raise ApiError(400, str(error), code="invalid_request", param=error.param) from None
    _check_depth(content)
    return Body(content, len(raw), hashlib.sha256(raw).hexdigest())


def _check_depth(content: Mapping[str, Any]) -> None:
    """Refuse an object that JSON cannot be written from. Raises `ApiError`."""
    level: list[Any] = [content]
    for _ in range(_MAX_LEVELS):
        values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ApiError(
        400, f"The body is nested more than {_MAX_LEVELS} levels deep; nest it less.", code="invalid_request"
    )


def _count_values(text: bytes) -> int:
    """Count the commas and opening brackets outside of strings, in slices: other threads run between them."""
    count = 0
    carried = b""
    inside = False
    for part in _slices(text):
        plain = (carried + part).replace(b"\\\\", b"")
        carried = b"\\" if plain.endswith(b"\\") else b""  # it escapes the first character of the next slice
        quoted = b'"' * inside + plain.replace(b'\\"', b"")  # now each quotation mark begins or ends a string
        outside = _STRING.sub(b"", quoted)
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        inside = quoted.count(b'"') % 2 == 1
    return count


def _slices(body: bytes) -> Iterator[bytes]:
    return (body[start : start + _SLICE] for start in range(0, len(body), _SLICE))
