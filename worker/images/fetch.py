"""Images by their address, where a worker's operator lets it fetch any."""

import asyncio
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import SOCK_STREAM, getaddrinfo
from urllib.parse import urljoin

from worker.errors import Refusal
from worker.images.addresses import is_public
from worker.images.http import HEAD_BYTES, Redirected, Target, read_answer

_MOST_REDIRECTS = 3
_FETCH_S = 10.0  # from the first look-up of a name to the last byte, all redirects included
_CONNECT_S = 3.0  # with one of a name's addresses, for the next may answer
_MOST_LOOK_UPS = 8  # of names, at once

Resolve = Callable[[str, int], Awaitable[list[str]]]
Connect = Callable[[str, Target, ssl.SSLContext | None], Awaitable[tuple[StreamReader, StreamWriter]]]


async def _connect(address: str, target: Target, tls: ssl.SSLContext | None) -> tuple[StreamReader, StreamWriter]:
    name = target.host if tls else None  # whose certificate it must be
    return await asyncio.open_connection(address, target.port, ssl=tls, server_hostname=name, limit=HEAD_BYTES)


class Fetcher:
    def __init__(
        self, max_bytes: int, *, seconds: float = _FETCH_S, resolve: Resolve | None = None, connect: Connect = _connect
    ) -> None:
        self._max_bytes, self._seconds, self._connect = max_bytes, seconds, connect
        # A look-up cannot be stopped, and a name whose server is silent takes half a minute: no thread of others'.
        self._names = ThreadPoolExecutor(_MOST_LOOK_UPS, "names")
        self._resolve = resolve or self._look_up
        self._tls = ssl.create_default_context()

    async def fetch(self, url: str) -> bytes:
        """The file behind it. Raises `Refusal`. A machine's settings for proxies are not looked at."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url)
        except TimeoutError:
            late = f"the image did not come within {self._seconds:g} s."
            raise Refusal("invalid_request", late, retryable=True) from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(1 + _MOST_REDIRECTS):
            answer = await self._ask(Target.of(url))
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer.location)
        raise Refusal("invalid_request", f"the URL leads on to others more than {_MOST_REDIRECTS} times.")

    async def _ask(self, target: Target) -> bytes | Redirected:
        try:
            reader, writer = await self._opened(target)
            try:
                writer.write(target.request())
                return await read_answer(reader, self._max_bytes)
            finally:
                writer.transport.abort()  # what else would come is of no use
        except ssl.SSLCertVerificationError:
            raise Refusal("invalid_request", "the server's certificate does not show that it is this host.") from None
        except TimeoutError:
            raise
        except OSError:
            raise Refusal("invalid_request", "the server cannot be reached.", retryable=True) from None

    async def _opened(self, target: Target) -> tuple[StreamReader, StreamWriter]:
        """Connected to an address that was looked at: a name is looked up once, and may mean another one the next
        time."""
        addresses = await self._resolve(target.host, target.port)
        if not all(map(is_public, addresses)):
            raise Refusal("invalid_request", "the URL leads to an address that is not public.")
        tls = self._tls if target.secure else None
        *others, last = addresses
        for address in others:
            try:
                return await asyncio.wait_for(self._connect(address, target, tls), _CONNECT_S)
            except OSError:  # a TimeoutError is one
                continue
        return await self._connect(last, target, tls)

    async def _look_up(self, host: str, port: int) -> list[str]:
        """A name's addresses. Also of what is one, in any of the ways in which one can be written."""
        look_up = partial(getaddrinfo, host, port, type=SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._names, look_up)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def close(self) -> None:
        self._names.shutdown(wait=False, cancel_futures=True)
