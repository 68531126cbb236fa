"""Fetch images by URL, if the worker's operator allows it."""

import asyncio
import ssl
from contextlib import aclosing
from dataclasses import dataclass

from httpcore2 import URL, AsyncHTTPConnection, NetworkError, ProtocolError, Response, TimeoutException

from worker import __version__
from worker.errors import JobFailure
from worker.images.files import MEDIA_TYPES, too_long
from worker.images.network import LimitedStream, PublicNetwork
from worker.images.url import host_header, parse_url, redirected

_MAX_REDIRECTS = 3
_FETCH_S = 10.0  # from the first DNS lookup to the last byte, redirects included
_HEADERS = {
    "User-Agent": f"sluice/{__version__}",
    "Accept": ", ".join(MEDIA_TYPES.values()),
    "Accept-Encoding": "identity",  # a compressed answer could expand without bound
    "Connection": "close",
}


@dataclass(frozen=True, slots=True)
class Redirected:
    """An answer that refers to another URL, which may be relative."""

    location: str


class Fetcher:
    """Fetches files over HTTP from public addresses only. For the event loop's thread."""

    def __init__(
        self,
        max_bytes: int,
        *,
        seconds: float = _FETCH_S,
        network: PublicNetwork | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`seconds`: time limit per image. `network` and `tls` replace the internet and its certificates, for tests."""
        self._max_bytes, self._seconds = max_bytes, seconds
        self._network = network or PublicNetwork()
        self._tls = tls or ssl.create_default_context()

    async def fetch(self, url: str) -> bytes:
        """Return the file at the URL, following redirects. The machine's proxy settings are ignored. Raises
        `JobFailure`."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url)
        except TimeoutError:
            late = f"the image did not arrive within {self._seconds:g} s."
            raise JobFailure("invalid_request", late, retryable=True) from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            answer = await self._request(parse_url(url))
            if isinstance(answer, bytes):
                return answer
            url = redirected(url, answer.location)
        raise JobFailure("invalid_request", f"the URL redirects more than {_MAX_REDIRECTS} times.")

    async def _request(self, url: URL) -> bytes | Redirected:
        """Send one request on a connection of its own."""
        connection = AsyncHTTPConnection(url.origin, self._tls, network_backend=self._network)
        headers = [("Host", host_header(url)), *_HEADERS.items()]
        try:
            async with connection, connection.stream("GET", url, headers=headers) as response:
                return await _read(response, self._max_bytes)
        except ProtocolError:
            raise JobFailure("invalid_request", "the server's answer is truncated or not valid HTTP.") from None
        except (NetworkError, TimeoutException, OSError) as error:
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                wrong = "the server's certificate is not valid for this host."
                raise JobFailure("invalid_request", wrong) from None
            raise JobFailure("invalid_request", "the server cannot be reached.", retryable=True) from None

    def close(self) -> None:
        """Release the threads, without waiting for lookups."""
        self._network.close()


async def _read(response: Response, max_bytes: int) -> bytes | Redirected:
    """Return the file of an answer, or its redirect. Raises `JobFailure`."""
    status, headers = response.status, {name.lower(): value for name, value in reversed(response.headers)}
    if status in (301, 302, 303, 307, 308) and (location := headers.get(b"location")):
        return Redirected(location.decode("latin-1"))
    if status != 200:
        raise JobFailure("invalid_request", f"the server answered {status}.", retryable=status >= 500 or status == 429)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise JobFailure(
            "invalid_request", "the server sent the image compressed, although the request ruled that out."
        )
    if int(headers.get(b"content-length", 0)) > max_bytes:
        raise too_long(max_bytes)
    return await _body(response, max_bytes)


async def _body(response: Response, max_bytes: int) -> bytes:
    stream: LimitedStream = response.extensions["network_stream"]
    data = bytearray()
    stream.advance()
    async with aclosing(response.aiter_stream()) as parts:
        async for part in parts:
            stream.advance()
            data += part
            if len(data) > max_bytes:
                raise too_long(max_bytes)
            await asyncio.sleep(0)  # thousands of small chunks may be buffered already; let other tasks run
    return bytes(data)
