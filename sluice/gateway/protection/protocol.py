"""The HTTP protocol of the server, with time limits for clients that send or read too slowly.

uvicorn 0.54 has a time limit for idle connections only. Until a release limits the rest, this subclass holds two
timers: one while a request's headers are incomplete, one while the client does not read what was sent.
"""

import asyncio
import json
import sys
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.gateway.errors import ApiError, openai_body
from sluice.http_errors import ErrorForm

MAX_HEADER_BYTES = 65_536  # request line and headers; more is refused: 431
_MIN_BYTES_PER_S = 10_000  # a client that reads a long answer this fast keeps its connection
_BAD_REQUEST = 400


def protocol(timeout_s: float) -> type[H11Protocol]:
    """Return the class to pass to uvicorn as `http`."""
    return type("ClientProtocol", (ClientProtocol,), {"timeout_s": timeout_s})


class ClientProtocol(H11Protocol):
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
        status = getattr(sys.exception(), "error_status_hint", _BAD_REQUEST)
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
        if read < _MIN_BYTES_PER_S * self.timeout_s:
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
