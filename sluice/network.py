"""HTTP to the public internet alone: URLs, and connections whose address is checked when they are made."""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from socket import SOCK_STREAM, getaddrinfo
from typing import Any
from urllib.parse import quote, urlsplit

from httpcore2 import (
    SOCKET_OPTION,
    URL,
    AnyIOBackend,
    AsyncNetworkBackend,
    AsyncNetworkStream,
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
)

_HOST = re.compile(r"[a-z0-9_.-]{1,253}", re.ASCII)
_IN_PATHS = "/%:@!$&'()*+,;=~?[]|"  # not escaped: allowed in a URL, or accepted by servers
_PORTS = {"http": 80, "https": 443}


class BadUrl(Exception):
    """A URL that cannot be used, with the reason as a sentence."""


class NotPublic(Exception):
    """A host has an address that is not public."""


def parse_url(url: str, kinds: str = "https: or http:") -> URL:
    """Parse an http: or https: URL. Its host is a name in ASCII, or an address without brackets; its target is path and
    query. `kinds`: of URL, for the error. Raises `BadUrl`."""
    if len(url) > 8_192:
        raise BadUrl("the URL is longer than 8,192 characters.")
    try:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS:
            raise BadUrl(f"the URL must begin with {kinds}.")
        host, port = _host(parts.hostname or ""), _PORTS[parts.scheme] if parts.port is None else parts.port
        if port == 0:
            raise BadUrl("the URL has port 0, which no server has; leave the port out.")
    except ValueError:  # an invalid port, an unclosed bracket, a host that IDNA rejects
        raise BadUrl("the URL is invalid.") from None
    if parts.username is not None:
        raise BadUrl("the URL contains a user name; remove it, since requests are sent without credentials.")
    path = quote((parts.path or "/") + (parts.query and f"?{parts.query}"), safe=_IN_PATHS)
    return URL(scheme=parts.scheme, host=host, port=port, target=path)


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


class PublicNetwork(AsyncNetworkBackend):
    """Connects to addresses that were checked: a name is resolved once for each connection, since a second lookup may
    yield another address. For the event loop's thread."""

    def __init__(
        self, resolve: Resolve | None, network: AsyncNetworkBackend | None, *, lookups: int, allow_private: bool = False
    ) -> None:
        """`resolve` replaces the DNS, and `network` all addresses, for tests. `lookups`: of names at once."""
        # Own threads: a lookup cannot be stopped, and takes half a minute if the name server does not answer.
        self._names = ThreadPoolExecutor(max_workers=lookups, thread_name_prefix="names")
        self._resolve = resolve or self._look_up
        self._network = network or AnyIOBackend()
        self._allow_private = allow_private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Connect to the first address of the host that accepts it. Raises `NotPublic` if any address is not public,
        `ConnectError`, and OSError if the name has none. `timeout`: of the last address; the others have less."""
        *others, last = addresses = await self._resolve(host, port)
        if not self._allow_private and not all(map(is_public, addresses)):
            raise NotPublic
        for address in others:
            try:
                return LimitedStream(await self._network.connect_tcp(address, port, timeout=3.0))
            except (ConnectError, ConnectTimeout):
                continue
        return LimitedStream(await self._network.connect_tcp(last, port, timeout))

    async def _look_up(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name, or of an address in any notation."""
        look_up = partial(getaddrinfo, host, port, type=SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._names, look_up)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def close(self) -> None:
        """Release the threads, without waiting for lookups."""
        self._names.shutdown(wait=False, cancel_futures=True)


class LimitedStream(AsyncNetworkStream):
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
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.aclose)  # httpcore closes only connections that are complete
            encrypted = LimitedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
            undo.pop_all()
        return encrypted

    async def aclose(self) -> None:
        """Close the connection. What was not read is lost."""
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        """Return httpcore's information about the connection."""
        return self._stream.get_extra_info(info)
