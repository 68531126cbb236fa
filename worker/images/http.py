"""As much of HTTP as it takes to get one file, with nothing of unknown length ever read whole."""

import asyncio
import re
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException, parse_headers
from io import BytesIO
from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from worker import __version__
from worker.errors import Refusal
from worker.images.files import READ, too_long

HEAD_BYTES = 65_536  # the most that a status line and headers, or the line before a chunk, may have
_LONGEST_URL = 8_192
_MOST_HINTS = 10
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: .*)?\r\n", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?\r\n", re.ASCII)
_HOST = re.compile(r"[a-z0-9_.-]{1,253}", re.ASCII)
_IN_PATHS = "/%:@!$&'()*+,;=~?[]|"  # what a URL may hold as it stands, or that servers take
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads."""

    secure: bool
    host: str  # a name in ASCII, or an address without its brackets
    port: int
    path: str  # with the query

    @classmethod
    def of(cls, url: str) -> "Target":
        """Raises `Refusal`."""
        if len(url) > _LONGEST_URL:
            raise Refusal("invalid_request", f"the URL is longer than {_LONGEST_URL:,} characters.")
        try:
            parts = urlsplit(url)
            if parts.scheme not in _PORTS:
                raise Refusal("invalid_request", "the URL does not begin with https:, http: or data:.")
            host, port = _host(parts.hostname or ""), parts.port or _PORTS[parts.scheme]
        except ValueError:  # a port that is no number, a bracket that is not closed, a host that IDNA does not take
            raise Refusal("invalid_request", "the URL cannot be read.") from None
        if parts.username is not None:
            raise Refusal("invalid_request", "the URL has a user's name in it; images are fetched without.")
        path = quote((parts.path or "/") + (parts.query and f"?{parts.query}"), safe=_IN_PATHS)
        return cls(parts.scheme == "https", host, port, path)

    def request(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS["https" if self.secure else "http"] else f":{self.port}"
        lines = [
            f"GET {self.path} HTTP/1.1",
            f"Host: {host}{port}",
            f"User-Agent: sluice/{__version__}",
            f"Accept: {', '.join(READ.values())}",
            "Accept-Encoding: identity",  # else a small answer could be a large one
            "Connection: close",
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def _host(name: str) -> str:
    """Raises `ValueError`."""
    if ":" in name:
        return str(ip_address(name))
    ascii = name.encode("idna").decode()
    if not _HOST.fullmatch(ascii):
        raise ValueError(name)
    return ascii


@dataclass(frozen=True, slots=True)
class Redirected:
    location: str


async def read_answer(reader: StreamReader, max_bytes: int) -> bytes | Redirected:
    """The file, or where else it is. Raises `Refusal`."""
    try:
        status, headers = await _head(reader)
        if status in (301, 302, 303, 307, 308) and (location := headers["Location"]):
            return Redirected(location)
        if status != 200:
            raise Refusal("invalid_request", f"the server answered {status}.", retryable=status >= 500 or status == 429)
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refusal("invalid_request", "the server sent the image compressed, which it was asked not to do.")
        if "Transfer-Encoding" in headers:
            return await _chunks(reader, headers, max_bytes)
        if (length := headers["Content-Length"]) is not None:
            return await _counted(reader, length, max_bytes)
        return await _to_the_end(reader, max_bytes)
    except (IncompleteReadError, LimitOverrunError, HTTPException, _Nonsense):
        raise Refusal("invalid_request", "the server's answer is cut off, or is no HTTP.") from None


class _Nonsense(Exception):
    """Not HTTP."""


async def _head(reader: StreamReader) -> tuple[int, Message]:
    """Of the answer that counts: those that only say that one will come are read over."""
    for _ in range(_MOST_HINTS):
        head = await reader.readuntil(b"\r\n\r\n")
        found = _STATUS.match(head)
        if found is None:
            break
        status = int(found[1])
        if status == 101 or status >= 200:
            return status, parse_headers(BytesIO(head[found.end() :]))
    raise _Nonsense


async def _counted(reader: StreamReader, length: str, max_bytes: int) -> bytes:
    if not re.fullmatch(r"\d{1,15}", length, re.ASCII):
        raise _Nonsense
    if int(length) > max_bytes:
        raise too_long(max_bytes)
    return await reader.readexactly(int(length))


async def _chunks(reader: StreamReader, headers: Message, max_bytes: int) -> bytes:
    if headers["Transfer-Encoding"].lower() != "chunked":
        raise _Nonsense
    data = bytearray()
    while size := await _chunk_size(reader):
        if len(data) + size > max_bytes:
            raise too_long(max_bytes)
        data += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise _Nonsense
        await asyncio.sleep(0)  # thousands of small ones may be here already, and others have their turn between
    return bytes(data)  # what may follow are headers


async def _chunk_size(reader: StreamReader) -> int:
    found = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
    if found is None:
        raise _Nonsense
    return int(found[1], 16)


async def _to_the_end(reader: StreamReader, max_bytes: int) -> bytes:
    data = bytearray()
    while part := await reader.read(HEAD_BYTES):
        data += part
        if len(data) > max_bytes:
            raise too_long(max_bytes)
    return bytes(data)
