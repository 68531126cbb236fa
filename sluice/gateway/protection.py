"""Bounds what one client can cost: slow connections, bytes held in memory, pages of other sites."""

import asyncio
import ipaddress
import json
import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.gateway.errors import RETRY_S, openai_response
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError, openai_body


def at_end(request: Request) -> ExitStack:
    """Return what releases, at the end of a request, what it holds. The middleware around every request closes it."""
    stack: ExitStack = request.scope.setdefault("state", {}).setdefault("at_end", ExitStack())
    return stack


# uvicorn 0.54 has a time limit for idle connections only. Until a release limits the rest, `_ClientProtocol` holds two
# timers: one while a request's headers are incomplete, one while the client does not read what was sent.

MAX_HEADER_BYTES = 65_536  # request line and headers; more is refused: 431
MIN_BYTES_PER_S = 10_000  # of a client that sends a long body or reads a long answer


def protocol(timeout_s: float) -> type[H11Protocol]:
    """Return the class to pass to uvicorn as `http`."""
    return type("_ClientProtocol", (_ClientProtocol,), {"timeout_s": timeout_s})


class _ClientProtocol(H11Protocol):
    """Aborts the connection of a client that takes longer than `timeout_s` seconds to complete its headers, or to read
    until the send buffer has room again, unless it reads at least 10 kB/s. Up to 64 KiB are buffered for a client."""

    timeout_s: float = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_header_timer()
        self._stop_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._time_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def _should_upgrade(self) -> bool:
        """Answer in HTTP/1.1 whatever a client offers, as a server may. Java's HttpClient offers HTTP/2 with every
        request, and uvicorn would log two warnings for each, about WebSockets."""
        return False

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has headers that are too long, in OpenAI's form."""
        status = getattr(sys.exception(), "error_status_hint", 400)
        error = ApiError(ErrorForm.NOT_HTTP, _REFUSALS.get(status, msg))
        body = json.dumps(openai_body(error)).encode()
        head = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}"
        )
        self.transport.write(head.encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def _time_headers(self) -> None:
        """Hold the timer exactly while a request's headers are awaited. uvicorn has its own for idle connections."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def _time_reading(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.timeout_s, self._check_reading, unread)

    def _check_reading(self, unread: int) -> None:
        """Abort the connection unless the client has read enough of the `unread` bytes since the timer was set."""
        read = unread - self.transport.get_write_buffer_size()
        if read < MIN_BYTES_PER_S * self.timeout_s:
            self.transport.abort()
        else:
            self._time_reading()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


_REFUSALS = {
    400: "The request is not valid HTTP.",
    431: f"The request line and the headers have more than {MAX_HEADER_BYTES:,} bytes; send less.",
}


class Memory:
    """Counts the bytes that the requests of a gateway hold, in all and by key."""

    def __init__(self, limit: int, longest: int) -> None:
        """`limit`: of all requests. `longest`: the longest body, which every key may hold."""
        self._limit = limit
        self._key_limit = max(limit // 4, longest)  # a quarter of all, so that one key cannot fill the gateway
        self._by_key = Counter[str | None]()

    def hold(self, key_id: str | None) -> "HeldBytes":
        """Return what a request holds: nothing yet."""
        return HeldBytes(self, key_id)

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return self._by_key.total()

    def check(self, key_id: str | None, length: int) -> None:
        """Check that `length` more bytes may be held. Raises `ApiError`: 429 for the key's limit, 503 for the
        gateway's."""
        if key_id is not None and self._by_key[key_id] + length > self._key_limit:
            message = f"This key's bodies and answers exceed {self._key_limit:,} bytes at once; send fewer of them."
            raise ApiError(ErrorForm.TOO_MANY_BYTES, message, retry_after_s=RETRY_S)
        if self.total + length > self._limit:
            message = "The gateway holds as many bytes of bodies and answers as it may; try again later."
            raise ApiError(ErrorForm.OVERLOADED, message, retry_after_s=RETRY_S)

    def is_too_long(self, key_id: str | None, length: int) -> bool:
        """Return True if so many bytes may not be held, whatever else is."""
        return length > (self._limit if key_id is None else min(self._limit, self._key_limit))

    def add(self, key_id: str | None, length: int) -> None:
        """Count bytes; negative ones are no longer held."""
        self._by_key[key_id] += length
        if not self._by_key[key_id]:
            del self._by_key[key_id]


class HeldBytes:
    """The bytes that one request holds, until `release`."""

    def __init__(self, memory: Memory, key_id: str | None) -> None:
        self._memory, self._key_id = memory, key_id
        self._length = 0

    def check(self, length: int) -> None:
        """Check that `length` more bytes may be held. Raises `ApiError`, as `Memory.check`."""
        self._memory.check(self._key_id, length)

    def add(self, length: int) -> None:
        """Hold more bytes. Raises as `check`."""
        self.check(length)
        self._memory.add(self._key_id, length)
        self._length += length

    def is_too_long(self, length: int) -> bool:
        """Return True if this request can never hold so many bytes."""
        return self._memory.is_too_long(self._key_id, length)

    def release(self) -> None:
        """Hold nothing any more."""
        self._memory.add(self._key_id, -self._length)
        self._length = 0


_REMEDY = "make a key with `sluice keys create` and set SLUICE_SERVE_KEYS."


def is_loopback(host: str) -> bool:
    """Return True for an address, or a name, that leads to this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LocalOnly:
    """Refuses requests for other host names and from other sites' pages: a web page on the internet can make a browser
    send requests to 127.0.0.1, under a name of its own as well."""

    def __init__(self, app: ASGIApp, allowed_origins: frozenset[str] = frozenset()) -> None:
        self._app, self._allowed_origins = app, allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (openai_response(error) if error else self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if not is_loopback(_host(f"//{headers.get('host', '')}")):
            return ApiError(
                ErrorForm.NOT_ALLOWED, f"Host: this gateway has no keys and answers only to its own machine; {_REMEDY}"
            )
        origin = headers.get("origin")
        if origin is None or is_loopback(_host(origin)) or {"*", origin} & self._allowed_origins:
            return None
        problem = "Origin: this gateway has no keys and answers no pages of other sites; set SLUICE_SERVE_CORS_ORIGINS."
        return ApiError(ErrorForm.NOT_ALLOWED, problem)


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
