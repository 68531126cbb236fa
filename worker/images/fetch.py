"""Fetches images: reads their URLs, and connects to public addresses only."""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from socket import SOCK_STREAM, getaddrinfo
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from httpcore2 import (
    SOCKET_OPTION,
    URL,
    AnyIOBackend,
    AsyncHTTPConnection,
    AsyncNetworkBackend,
    AsyncNetworkStream,
    ConnectError,
    ConnectTimeout,
    NetworkError,
    ProtocolError,
    RemoteProtocolError,
    Response,
    TimeoutException,
)

from worker import __version__
from worker.errors import JobFailure
from worker.images.image import MEDIA_TYPES, too_long

_HOST = re.compile(r"[a-z0-9_.-]{1,253}", re.ASCII)
_IN_PATHS = "/%:@!$&'()*+,;=~?[]|"  # not escaped: allowed in a URL, or accepted by servers
_PORTS = {"http": 80, "https": 443}


def parse_url(url: str) -> URL:
    """Parse an http: or https: URL. Its host is a name in ASCII, or an address without brackets; its target is path and
    query. Raises `JobFailure`."""
    if len(url) > 8_192:
        raise JobFailure("invalid_request", "the URL is longer than 8,192 characters.")
    try:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS:
            raise JobFailure("invalid_request", "the URL must begin with https:, http: or data:.")
        host, port = _host(parts.hostname or ""), _PORTS[parts.scheme] if parts.port is None else parts.port
        if port == 0:
            raise JobFailure("invalid_request", "the URL has port 0, which no server has; leave the port out.")
    except ValueError:  # an invalid port, an unclosed bracket, a host that IDNA rejects
        raise JobFailure("invalid_request", "the URL is invalid.") from None
    if parts.username is not None:
        raise JobFailure(
            "invalid_request",
            "the URL contains a user name; remove it, since images are fetched without credentials.",
        )
    path = quote((parts.path or "/") + (parts.query and f"?{parts.query}"), safe=_IN_PATHS)
    return URL(scheme=parts.scheme, host=host, port=port, target=path)


def redirected(url: str, location: str) -> str:
    """Return the URL of a redirect, which may be relative to `url`. Raises `JobFailure`."""
    try:
        return urljoin(url, location)
    except ValueError:  # an unclosed bracket
        raise JobFailure("invalid_request", "the URL redirects to an invalid one.") from None


def host_header(url: URL) -> str:
    """Return the value of the header Host."""
    host = url.host.decode()
    name = f"[{host}]" if ":" in host else host
    return name if url.port == _PORTS[url.scheme.decode()] else f"{name}:{url.port}"


def _host(name: str) -> str:
    """Return the host in ASCII, or an address in its usual notation. Raises ValueError."""
    if ":" in name:
        return str(ip_address(name))
    ascii = name.encode("idna").decode()
    if not _HOST.fullmatch(ascii):
        raise ValueError(name)
    return ascii


# Not public, although `is_global` is True for them in older releases of Python, or in all.
_NOT_PUBLIC_4 = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments, RFC 6890: before Python 3.11.9 only two small parts of it
    IPv4Network("192.88.99.0/24"),  # relays from 6to4, withdrawn by RFC 7526
    IPv4Network("168.63.129.16/32"),  # Azure's host, which serves a machine its certificates and settings
)
_NOT_PUBLIC_6 = (IPv6Network("3fff::/20"),)  # documentation, RFC 9637

# The allocated part of IPv6. The rest is unassigned, or embeds an IPv4 address.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# RFC 6052: IPv4 addresses as written in a network without IPv4.
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """True if the address is on the public internet, by its number: not this machine, its network, or a cloud's
    metadata service. Raises ValueError for text that is not an address."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC_4)
    if inner := _within(ip):
        return is_public(str(inner))
    return ip in _GLOBAL_UNICAST and ip.is_global and not any(ip in network for network in _NOT_PUBLIC_6)


def _within(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address at which packets for this address end up, or None."""
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)


# Limit for all that comes before the file, and before each part of it: status line, headers, interim answers, the line
# before a chunk, trailers. Parsing this much takes up to 10 ms.
HEAD_BYTES = 16_384

Resolve = Callable[[str, int], Awaitable[list[str]]]


class _PublicNetwork(AsyncNetworkBackend):
    """Connects to addresses that were checked: a name is resolved once for each connection, since a second lookup may
    yield another address. For the event loop's thread."""

    def __init__(self, resolve: Resolve | None, network: AsyncNetworkBackend | None) -> None:
        """Both as for `Fetcher`."""
        # Own threads: a lookup cannot be stopped, and takes half a minute if the name server does not answer.
        self._names = ThreadPoolExecutor(max_workers=8, thread_name_prefix="names")
        self._resolve = resolve or self._look_up
        self._network = network or AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Connect to the first address of the host that accepts it. Raises `JobFailure` if any address is not public,
        `ConnectError`, and OSError if the name has none. `timeout`: of the last address; the others have less."""
        *others, last = addresses = await self._resolve(host, port)
        if not all(map(is_public, addresses)):
            raise JobFailure("invalid_request", "the URL leads to an address that is not public.")
        for address in others:
            try:
                return _LimitedStream(await self._network.connect_tcp(address, port, timeout=3.0))
            except (ConnectError, ConnectTimeout):
                continue
        return _LimitedStream(await self._network.connect_tcp(last, port, timeout))

    async def _look_up(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name, or of an address in any notation."""
        look_up = partial(getaddrinfo, host, port, type=SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._names, look_up)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def close(self) -> None:
        """Release the threads, without waiting for lookups."""
        self._names.shutdown(wait=False, cancel_futures=True)


class _LimitedStream(AsyncNetworkStream):
    """A connection on which at most `HEAD_BYTES` are read between two calls of `advance`. httpcore limits neither the
    number of interim answers nor the time that it takes to parse what it reads at once."""

    def __init__(self, stream: AsyncNetworkStream) -> None:
        self._stream, self._left = stream, HEAD_BYTES

    def advance(self) -> None:
        """Allow another `HEAD_BYTES`, because the headers or a part of the file have come."""
        self._left = HEAD_BYTES

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read some bytes; none at the end. Raises `RemoteProtocolError` at the limit."""
        if self._left == 0:
            raise RemoteProtocolError(f"more than {HEAD_BYTES} bytes beside the file")
        data = await self._stream.read(min(max_bytes, self._left), timeout)
        self._left -= len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all bytes."""
        await self._stream.write(buffer, timeout)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> AsyncNetworkStream:
        """Return the encrypted stream. If that fails or is cancelled, the connection is closed."""
        try:
            return _LimitedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:  # httpcore closes only connections that are complete
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the connection. What was not read is lost."""
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        """Return httpcore's information about the connection."""
        return self._stream.get_extra_info(info)


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
        self._network = _PublicNetwork(resolve, network)
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
    stream: _LimitedStream = response.extensions["network_stream"]
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
