"""The part of HTTP/1.1 that fetching one file needs. Every read has a maximum length."""

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
from worker.errors import JobFailure
from worker.images.files import MEDIA_TYPES, too_long

HEAD_BYTES = 65_536  # limit for status line and headers, and for the line before a chunk
_MAX_URL_CHARACTERS = 8_192
_MAX_INFORMATIONAL = 10
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: .*)?\r\n", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?\r\n", re.ASCII)
_HOST = re.compile(r"[a-z0-9_.-]{1,253}", re.ASCII)
_IN_PATHS = "/%:@!$&'()*+,;=~?[]|"  # not escaped: allowed in a URL, or accepted by servers
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """The parsed destination of a URL."""

    secure: bool
    host: str  # a name in ASCII, or an address without brackets
    port: int
    path: str  # including the query

    @classmethod
    def of(cls, url: str) -> "Target":
        """Parse an http: or https: URL. Raises `JobFailure`."""
        if len(url) > _MAX_URL_CHARACTERS:
            raise JobFailure("invalid_request", f"the URL is longer than {_MAX_URL_CHARACTERS:,} characters.")
        try:
            parts = urlsplit(url)
            if parts.scheme not in _PORTS:
                raise JobFailure("invalid_request", "the URL must begin with https:, http: or data:.")
            host, port = _host(parts.hostname or ""), parts.port or _PORTS[parts.scheme]
        except ValueError:  # an invalid port, an unclosed bracket, a host that IDNA rejects
            raise JobFailure("invalid_request", "the URL is invalid.") from None
        if parts.username is not None:
            raise JobFailure(
                "invalid_request",
                "the URL contains a user name; remove it, since images are fetched without credentials.",
            )
        path = quote((parts.path or "/") + (parts.query and f"?{parts.query}"), safe=_IN_PATHS)
        return cls(parts.scheme == "https", host, port, path)

    def request(self) -> bytes:
        """Return the bytes of a GET request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS["https" if self.secure else "http"] else f":{self.port}"
        lines = [
            f"GET {self.path} HTTP/1.1",
            f"Host: {host}{port}",
            f"User-Agent: sluice/{__version__}",
            f"Accept: {', '.join(MEDIA_TYPES.values())}",
            "Accept-Encoding: identity",  # a compressed answer could expand without bound
            "Connection: close",
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def _host(name: str) -> str:
    """Return the host in ASCII, or an address in its usual notation. Raises ValueError."""
    if ":" in name:
        return str(ip_address(name))
    ascii = name.encode("idna").decode()
    if not _HOST.fullmatch(ascii):
        raise ValueError(name)
    return ascii


@dataclass(frozen=True, slots=True)
class Redirected:
    """An answer that refers to another URL, which may be relative."""

    location: str


async def read_answer(reader: StreamReader, max_bytes: int) -> bytes | Redirected:
    """Read an answer: the file's content, or a redirect. Raises `JobFailure`."""
    try:
        status, headers = await _head(reader)
        if status in (301, 302, 303, 307, 308) and (location := headers["Location"]):
            return Redirected(location)
        if status != 200:
            raise JobFailure(
                "invalid_request", f"the server answered {status}.", retryable=status >= 500 or status == 429
            )
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise JobFailure(
                "invalid_request", "the server sent the image compressed, although the request ruled that out."
            )
        if "Transfer-Encoding" in headers:
            return await _chunks(reader, headers, max_bytes)
        if (length := headers["Content-Length"]) is not None:
            return await _counted(reader, length, max_bytes)
        return await _to_the_end(reader, max_bytes)
    except (IncompleteReadError, LimitOverrunError, HTTPException, BadResponse):
        raise JobFailure("invalid_request", "the server's answer is truncated or not valid HTTP.") from None


class BadResponse(Exception):
    """The answer is not valid HTTP."""


async def _head(reader: StreamReader) -> tuple[int, Message]:
    """Return status and headers of the final answer, skipping informational ones (1xx)."""
    for _ in range(_MAX_INFORMATIONAL):
        head = await reader.readuntil(b"\r\n\r\n")
        found = _STATUS.match(head)
        if found is None:
            break
        status = int(found[1])
        if status == 101 or status >= 200:
            return status, parse_headers(BytesIO(head[found.end() :]))
    raise BadResponse


async def _counted(reader: StreamReader, length: str, max_bytes: int) -> bytes:
    if not re.fullmatch(r"\d{1,15}", length, re.ASCII):
        raise BadResponse
    if int(length) > max_bytes:
        raise too_long(max_bytes)
    return await reader.readexactly(int(length))


async def _chunks(reader: StreamReader, headers: Message, max_bytes: int) -> bytes:
    if headers["Transfer-Encoding"].lower() != "chunked":
        raise BadResponse
    data = bytearray()
    while size := await _chunk_size(reader):
        if len(data) + size > max_bytes:
            raise too_long(max_bytes)
        data += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise BadResponse
        await asyncio.sleep(0)  # thousands of small chunks may be buffered already; let other tasks run
    return bytes(data)  # only trailing headers may follow


async def _chunk_size(reader: StreamReader) -> int:
    found = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
    if found is None:
        raise BadResponse
    return int(found[1], 16)


async def _to_the_end(reader: StreamReader, max_bytes: int) -> bytes:
    data = bytearray()
    while part := await reader.read(HEAD_BYTES):
        data += part
        if len(data) > max_bytes:
            raise too_long(max_bytes)
    return bytes(data)
