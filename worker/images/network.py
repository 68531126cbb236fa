"""The network of a fetcher: connects to public addresses only."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import SOCK_STREAM, getaddrinfo
from typing import Any

from httpcore2 import (
    SOCKET_OPTION,
    AnyIOBackend,
    AsyncNetworkBackend,
    AsyncNetworkStream,
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
)

from worker.errors import JobFailure
from worker.images.addresses import is_public

# Limit for all that comes before the file, and before each part of it: status line, headers, interim answers, the line
# before a chunk, trailers. Parsing this much takes up to 10 ms.
HEAD_BYTES = 16_384
_CONNECT_S = 3.0  # per address of a name, before the next one is tried
_MAX_LOOK_UPS = 8  # DNS lookups at once

Resolve = Callable[[str, int], Awaitable[list[str]]]


class PublicNetwork(AsyncNetworkBackend):
    """Connects to addresses that were checked: a name is resolved once for each connection, since a second lookup may
    yield another address. For the event loop's thread."""

    def __init__(self, *, resolve: Resolve | None = None, network: AsyncNetworkBackend | None = None) -> None:
        """`resolve` replaces the DNS, and `network` all addresses, for tests."""
        # Own threads: a lookup cannot be stopped, and takes half a minute if the name server does not answer.
        self._names = ThreadPoolExecutor(_MAX_LOOK_UPS, "names")
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
                return LimitedStream(await self._network.connect_tcp(address, port, _CONNECT_S))
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
        try:
            return LimitedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:  # httpcore closes only connections that are complete
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the connection. What was not read is lost."""
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        """Return httpcore's information about the connection."""
        return self._stream.get_extra_info(info)
