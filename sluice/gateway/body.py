"""Reads the JSON object of a request's body, within limits of size, of values and of depth."""

import asyncio
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from sluice.gateway.disconnect import ClientLeft
from sluice.gateway.errors import ApiError
from sluice.openai import BadRequest, read_object

_MAX_VALUES = 100_000  # of the contract; parsing this many takes about 50 ms
_MAX_LEVELS = 100  # far more than a JSON schema has, far fewer than a JSON writer can nest
_INLINE_BYTES = 65_536  # a longer body is parsed in a thread
_SLICE = 65_536
_STRING = re.compile(rb'"[^"]*"?')


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body: its JSON object, its length in bytes, and the hash of these bytes."""

    content: dict[str, Any]
    length: int
    digest: str


async def read_body(request: Request, max_bytes: int) -> Body:
    """Return the body. Raises `ApiError`: 413 beyond `max_bytes` or 100,000 values, 400 for anything but an object
    and for one that is nested more than 100 levels deep."""
    raw = await read_bytes(request, max_bytes)
    return _parse(raw) if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(_parse, raw)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object of the body. Raises as `read_body`."""
    return (await read_body(request, max_bytes)).content


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Return the body's bytes. Raises `ApiError` 413 as soon as it is known to be longer than `max_bytes`."""
    _refuse_long(int(request.headers.get("content-length") or 0), max_bytes)
    parts, length = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            length += len(part)
            _refuse_long(length, max_bytes)
    except ClientDisconnect:
        raise ClientLeft from None
    return b"".join(parts)


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
