"""Fetch images by URL, if the worker's operator allows it."""

import asyncio
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import SOCK_STREAM, getaddrinfo
from urllib.parse import urljoin

from worker.errors import JobFailure
from worker.images.addresses import is_public
from worker.images.http import HEAD_BYTES, Redirected, Target, read_answer

_MAX_REDIRECTS = 3
_FETCH_S = 10.0  # from the first DNS lookup to the last byte, redirects included
_CONNECT_S = 3.0  # per address of a name, before the next one is tried
_MAX_LOOK_UPS = 8  # DNS lookups at once

Resolve = Callable[[str, int], Awaitable[list[str]]]
Connect = Callable[[str, Target, ssl.SSLContext | None], Awaitable[tuple[StreamReader, StreamWriter]]]


async def _connect(address: str, target: Target, tls: ssl.SSLContext | None) -> tuple[StreamReader, StreamWriter]:
    name = target.host if tls else None  # the host that the certificate must name
    return await asyncio.open_connection(address, target.port, ssl=tls, server_hostname=name, limit=HEAD_BYTES)


class Fetcher:
    """Fetches files over HTTP from public addresses only. For the event loop's thread."""

    def __init__(
        self, max_bytes: int, *, seconds: float = _FETCH_S, resolve: Resolve | None = None, connect: Connect = _connect
    ) -> None:
        """`seconds`: time limit per image. `resolve` and `connect` replace the network, for tests."""
        self._max_bytes, self._seconds, self._connect = max_bytes, seconds, connect
        # Own threads: a lookup cannot be stopped, and takes half a minute if the name server does not answer.
        self._names = ThreadPoolExecutor(_MAX_LOOK_UPS, "names")
        self._resolve = resolve or self._look_up
        self._tls = ssl.create_default_context()

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
            answer = await self._request(Target.of(url))
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer.location)
        raise JobFailure("invalid_request", f"the URL redirects more than {_MAX_REDIRECTS} times.")

    async def _request(self, target: Target) -> bytes | Redirected:
        try:
            reader, writer = await self._opened(target)
            try:
                writer.write(target.request())
                return await read_answer(reader, self._max_bytes)
            finally:
                writer.transport.abort()  # the rest of the answer is not needed
        except ssl.SSLCertVerificationError:
            raise JobFailure("invalid_request", "the server's certificate is not valid for this host.") from None
        except TimeoutError:
            raise
        except OSError:
            raise JobFailure("invalid_request", "the server cannot be reached.", retryable=True) from None

    async def _opened(self, target: Target) -> tuple[StreamReader, StreamWriter]:
        """Connect to an address that was checked: the name is resolved once, since a second lookup may yield another
        address."""
        addresses = await self._resolve(target.host, target.port)
        if not all(map(is_public, addresses)):
            raise JobFailure("invalid_request", "the URL leads to an address that is not public.")
        tls = self._tls if target.secure else None
        *others, last = addresses
        for address in others:
            try:
                return await asyncio.wait_for(self._connect(address, target, tls), _CONNECT_S)
            except OSError:  # includes TimeoutError
                continue
        return await self._connect(last, target, tls)

    async def _look_up(self, host: str, port: int) -> list[str]:
        """Return the addresses of a name, or of an address in any notation."""
        look_up = partial(getaddrinfo, host, port, type=SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._names, look_up)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def close(self) -> None:
        """Release the threads, without waiting for lookups."""
        self._names.shutdown(wait=False, cancel_futures=True)
