"""A server with a public address, as far as a fetcher can tell, that sends what a test wrote for each path."""

import asyncio
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from httpcore2 import AnyIOBackend, AsyncNetworkBackend, AsyncNetworkStream, ConnectError

from worker.errors import JobFailure
from worker.images.fetch import Fetcher

ADDRESS = "93.184.216.34"
ANOTHER = "93.184.216.35"
# A key and its own certificate, of pictures.example and `ADDRESS`.
CERTIFICATE = Path(__file__).with_name("pictures_example.pem")

Page = bytes | Callable[[StreamWriter], Awaitable[None]]


class Internet(AsyncNetworkBackend):
    def __init__(self, pages: dict[str, Page]) -> None:
        self._pages = pages
        self.port = 0
        self.names: dict[str, list[list[str]]] = {}  # what a name means at each look-up; the last stays
        self.dead = set[str]()  # addresses that nobody answers at
        self.asked: list[str] = []  # requests, as they came
        self.looked_up: list[str] = []
        self.connected: list[str] = []
        self.retryable = False

    async def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        meanings = self.names.get(host, [[ADDRESS]])
        return meanings.pop(0) if len(meanings) > 1 else meanings[0]

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> AsyncNetworkStream:
        self.connected.append(host)
        if host in self.dead:
            raise ConnectError
        return await AnyIOBackend().connect_tcp("127.0.0.1", self.port)

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(request)
        page = self._pages[request.split()[1]]
        try:
            if isinstance(page, bytes):
                writer.write(page)
            else:
                await page(writer)
            await writer.drain()
            writer.close()
        except ConnectionError:  # the fetcher has had enough
            pass

    @asynccontextmanager
    async def on(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    def fetcher(self, **given: Any) -> Fetcher:
        return Fetcher(**{"max_bytes": 1000, "seconds": 5.0, "resolve": self.resolve, "network": self, **given})

    async def fetch(
        self,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        trusted: ssl.SSLContext | None = None,
        **limits: float,
    ) -> bytes | tuple[str, str]:
        """The file, or the refusal's type and message. `tls`: the server's side; `trusted`: the client's."""
        async with self.on(tls):
            try:
                return await self.fetcher(tls=trusted, **limits).fetch(url)
            except JobFailure as refusal:
                self.retryable = refusal.retryable
                return refusal.type, refusal.message


async def fetched(page: Page, **limits: Any) -> bytes | tuple[str, str]:
    return await Internet({"/a.png": page}).fetch("http://pictures.example/a.png", **limits)


def certified() -> ssl.SSLContext:
    """The server's side of TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    return context


def trusting() -> ssl.SSLContext:
    """A client's side, as every client has it, that trusts the server's certificate."""
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in [f"HTTP/1.1 {status}", *headers, ""])
    return head.encode() + body


def leads_to(location: str) -> bytes:
    return answer(b"", f"Location: {location}", "Content-Length: 0", status="302 Found")
