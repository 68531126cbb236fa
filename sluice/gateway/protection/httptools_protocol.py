"""The HTTP protocol on httptools, with the limit of the headers that h11 has by itself."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sluice.gateway.protection.client_limits import HEADERS_TOO_LARGE, MAX_HEADER_BYTES, ClientLimits


class _HeadersTooLarge(Exception):
    """Ends the parsing of a request."""


class HttptoolsClient(ClientLimits, HttpToolsProtocol):
    """The protocol on httptools."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_body = False
        self._received = 0  # bytes since the end of the last request
        self._is_too_large = False

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if not self._in_body and self._received > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._is_too_large = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """Refuse headers that came at once, too. httptools makes any exception one of its own."""
        length = len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        if length > MAX_HEADER_BYTES:
            self._is_too_large = True
            raise _HeadersTooLarge
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body, self._received = False, 0
        super().on_message_complete()

    def refused_status(self) -> int:
        """Return 431 for headers that are too large."""
        return HEADERS_TOO_LARGE if self._is_too_large else super().refused_status()
