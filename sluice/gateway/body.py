"""Reads the JSON object of a request's body, decoded, within limits of size, of values and of depth."""

import asyncio
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sluice.gateway.protection import HeldBytes
from sluice.gateway.sse import ClientDisconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.openai import BadRequest, read_object

_INLINE_BYTES = 65_536  # converting this much takes about a millisecond
# Python's JSON holds the interpreter, so more threads convert no faster. Other work has threads of its own.
_pool = ThreadPoolExecutor(2, thread_name_prefix="sluice-text")

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work returns, done in one of the threads. Raises its errors."""
    return await asyncio.get_running_loop().run_in_executor(_pool, partial(work, *args, **kwargs))


async def in_thread_if_long(length: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work on `length` bytes returns. Raises its errors."""
    if length <= _INLINE_BYTES:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)


async def to_json(value: Any) -> bytes:
    """Return a value as JSON. Half a surrogate pair is written as an escape."""
    return await in_thread(_written, value) if is_long(value) else _written(value)


async def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as a JSON response. Half a surrogate pair from a request is written as an escape."""
    return Response(await to_json(value), media_type="application/json", headers=dict(headers or {}))


def is_long(value: Any) -> bool:
    """Return True if a JSON value has more than 64 KiB of text or 1,000 parts. Reads no more of it than that."""
    pending = [value]
    most_values = 1_000
    characters = values = 0
    while pending:
        match pending.pop():
            case str(text):
                characters += len(text)
            case dict(members):
                values += len(members)
                characters += sum(map(len, members)) if len(members) <= most_values else 0
                pending.extend(members.values() if values <= most_values else ())
            case list(items) | tuple(items):
                values += len(items)
                pending.extend(items if values <= most_values else ())
        if characters > _INLINE_BYTES or values > most_values:
            return True
    return False


def _written(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_STRING = re.compile(rb'"[^"]*"?')
# Makes the request of an interface of a JSON object, and returns it with the names of what it has left out.
Interface = Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body: its JSON object, its length in bytes, and the hash of these bytes."""

    content: dict[str, Any]
    length: int
    digest: str
    ignored: tuple[str, ...] = ()  # what was left out of the object, by its names


async def receive_body(request: Request, max_bytes: int, held: HeldBytes) -> Body:
    """Return the body; its bytes count as held as they arrive, and as they are decoded. Raises `ApiError`: 413 beyond
    `max_bytes` or 100,000 values, 429 or 503 if more bytes are held already, 415 for an unknown encoding, 400 for
    anything but an object and for one that is nested more than 100 levels deep."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in _DECODERS:
        message = f"Content-Encoding: {encoding[:40]!r} is not supported; send gzip, zstd, or the plain body."
        raise ApiError(ErrorForm.BODY_ENCODING, message, param="Content-Encoding")
    raw = await _read_bytes(request, max_bytes, held)
    if decoder := _DECODERS[encoding]:
        raw = await _decoded(raw, decoder(), max_bytes, held)
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


async def _decoded(raw: bytes, decoder: "_Decoder", max_bytes: int, held: HeldBytes) -> bytes:
    """Return a decoded body. Each part of it is held before the next is decoded, so that a small body that grows beyond
    all limits is refused in time. Raises `ApiError`: 400 for damaged data, and as `_read_bytes`."""
    decoded, rest = bytearray(), raw
    size = _INLINE_BYTES  # of the first part, on the event loop: most bodies have no more
    try:
        while not decoder.eof:
            part = await in_thread_if_long(max(size, len(rest)), decoder.decompress, rest, size)
            if not part and not decoder.eof:
                raise EOFError("its end is missing")
            _refuse_long(len(decoded) + len(part), max_bytes)
            held.add(len(part))
            decoded += part
            rest = getattr(decoder, "unconsumed_tail", b"")  # of gzip; zstd keeps it to itself
            size = 1_048_576  # in a thread, which takes about a millisecond for this many
        if decoder.unused_data:  # a million empty streams after the first would be work without a bound
            raise EOFError("there is data after its end")
    except (zlib.error, zstd.ZstdError, EOFError) as error:
        message = f"Content-Encoding: the body cannot be decoded: {error}."
        raise ApiError(ErrorForm.INVALID_VALUE, message, param="Content-Encoding") from None
    held.add(-len(raw))
    return bytes(decoded)


class _Decoder(Protocol):
    """The members that the decoders of zlib and of zstd share."""

    @property
    def eof(self) -> bool:
        """True once the end of the data has been decoded."""

    @property
    def unused_data(self) -> bytes:
        """What follows the end."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return at most `max_length` bytes."""


def _gzip() -> _Decoder:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # with the header of gzip


def _zstd() -> _Decoder:
    # 8 MiB, the window that RFC 9659 allows for the encoding of contents.
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 23})


_DECODERS: dict[str, Callable[[], _Decoder] | None] = {
    "": None,
    "identity": None,
    "gzip": _gzip,
    "x-gzip": _gzip,  # the same, by RFC 9110
    "zstd": _zstd,
}


def _refuse_long(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise ApiError(ErrorForm.BODY_TOO_LARGE, f"The body has more than {max_bytes:,} bytes; send less.")


def _parse(raw: bytes) -> Body:
    values = _count_values(raw)
    most_values = 100_000  # of the contract; parsing this many takes about 50 ms
    if values > most_values:
        message = f"The body holds {values:,} JSON values; send at most {most_values:,}."
        raise ApiError(ErrorForm.BODY_TOO_LARGE, message)
    try:
        content = read_object(raw)
    except BadRequest as error:
        raise ApiError(ErrorForm.INVALID_REQUEST, str(error), param=error.param) from None
    _check_depth(content)
    return Body(content, len(raw), hashlib.sha256(raw).hexdigest())


def _check_depth(content: Mapping[str, Any]) -> None:
    """Refuse an object that JSON cannot be written from. Raises `ApiError`."""
    level: list[Any] = [content]
    most_levels = 100  # far more than a JSON schema has, far fewer than a JSON writer can nest
    for _ in range(most_levels):
        values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    message = f"The body is nested more than {most_levels} levels deep; nest it less."
    raise ApiError(ErrorForm.INVALID_REQUEST, message)


def _count_values(text: bytes) -> int:
    """Count the commas and opening brackets outside of strings, in slices: other threads run between them."""
    count = 0
    carried = b""
    inside = False
    for part in (text[start : start + _INLINE_BYTES] for start in range(0, len(text), _INLINE_BYTES)):
        plain = (carried + part).replace(b"\\\\", b"")
        carried = b"\\" if plain.endswith(b"\\") else b""  # it escapes the first character of the next slice
        quoted = b'"' * inside + plain.replace(b'\\"', b"")  # now each quotation mark begins or ends a string
        outside = _STRING.sub(b"", quoted)
        count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        inside = quoted.count(b'"') % 2 == 1
    return count
