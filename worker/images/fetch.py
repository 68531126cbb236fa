"""Fetches images: reads their URLs, and connects to public addresses only."""

import asyncio
import ssl
from contextlib import aclosing
from urllib.parse import urljoin

from httpcore2 import (
    URL,
    AsyncHTTPConnection,
    AsyncNetworkBackend,
    NetworkError,
    ProtocolError,
    Response,
    TimeoutException,
)

from sluice.network import BadUrl, LimitedStream, NotPublic, PublicNetwork, Resolve, host_header
from sluice.network import parse_url as parse_http_url
from worker import __version__
from worker.errors import JobFailure
from worker.images.image import MEDIA_TYPES, too_long


def parse_url(url: str) -> URL:
    """Parse an http: or https: URL. Raises `JobFailure`."""
    try:
        return parse_http_url(url, "https:, http: or data:")
    except BadUrl as bad:
        raise JobFailure("invalid_request", str(bad)) from None


def redirected(url: str, location: str) -> str:
    """Return the URL of a redirect, which may be relative to `url`. Raises `JobFailure`."""
    try:
        return urljoin(url, location)
    except ValueError:  # an unclosed bracket
        raise JobFailure("invalid_request", "the URL redirects to an invalid one.") from None


_HEADERS = {
    "User-Agent": f"sluice/{__version__}",
    "Accept": ", ".join(MEDIA_TYPES.values()),
    "Accept-Encoding": "identity",  # a compressed answer could expand without bound
    "Connection": "close",
}


class Fetcher:
    """Fetches files over HTTP from public addresses only. For the event loop's thread."""

    def __init__(
        self,
        max_bytes: int,
        *,
        seconds: float = 10.0,
        resolve: Resolve | None = None,
        network: AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`seconds`: time limit per image, redirects included. For tests, `resolve` replaces the DNS,
        `network` all addresses, and `tls` the certificates of the internet."""
        self._max_bytes, self._seconds = max_bytes, seconds
        self._network = PublicNetwork(resolve, network, lookups=8)
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
        for _ in range(1 + 3):  # the first request, and its redirects
            answer = await self._request(parse_url(url))
            if isinstance(answer, bytes):
                return answer
            url = redirected(url, location=answer)
        raise JobFailure("invalid_request", "the URL redirects more than 3 times.")

    async def _request(self, url: URL) -> bytes | str:
        """Send one request on a connection of its own. Returns the file, or the location that the answer redirects
        to."""
        connection = AsyncHTTPConnection(url.origin, self._tls, network_backend=self._network)
        headers = [("Host", host_header(url)), *_HEADERS.items()]
        try:
            async with connection, connection.stream("GET", url, headers=headers) as response:
                return await _read(response, self._max_bytes)
        except NotPublic:
            raise JobFailure("invalid_request", "the URL leads to an address that is not public.") from None
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


async def _read(response: Response, max_bytes: int) -> bytes | str:
    """Return the file of an answer, or the location that it redirects to. Raises `JobFailure`."""
    status, headers = response.status, {name.lower(): value for name, value in reversed(response.headers)}
    if status in (301, 302, 303, 307, 308) and (location := headers.get(b"location")):
        return location.decode("latin-1")
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
