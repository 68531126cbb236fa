"""A server with a public address, as far as a fetcher can tell, that sends what a test wrote for each path."""

import asyncio
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from worker.errors import JobFailure
from worker.images.fetch import Fetcher
from worker.images.http import HEAD_BYTES, Target

ADDRESS = "93.184.216.34"
ANOTHER = "93.184.216.35"

Page = bytes | Callable[[StreamWriter], Awaitable[None]]


class Internet:
    def __init__(self, pages: dict[str, Page]) -> None:
        self._pages = pages
        self.port = 0
        self.names: dict[str, list[list[str]]] = {}  # what a name means at each look-up; the last stays
        self.dead = set[str]()  # addresses that nobody answers at
        self.asked: list[str] = []  # requests, as they came
        self.looked_up: list[str] = []
        self.connected: list[str] = []
        self.contexts: list[ssl.SSLContext | None] = []
        self.sent = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        meanings = self.names.get(host, [[ADDRESS]])
        return meanings.pop(0) if len(meanings) > 1 else meanings[0]

    async def connect(
        self, address: str, target: Target, tls: ssl.SSLContext | None
    ) -> tuple[StreamReader, StreamWriter]:
        self.connected.append(address)
        self.contexts.append(tls)
        if address in self.dead:
            raise ConnectionRefusedError
        return await asyncio.open_connection("127.0.0.1", self.port, limit=HEAD_BYTES)

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
    async def on(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()

    async def fetch(self, url: str, *, max_bytes: int = 1000, seconds: float = 5.0) -> bytes | tuple[str, str]:
        """The file, or the refusal's type and message."""
        fetcher = Fetcher(max_bytes, seconds=seconds, resolve=self.resolve, connect=self.connect)
        async with self.on():
            try:
                return await fetcher.fetch(url)
            except JobFailure as refusal:
                self.retryable = refusal.retryable
                return refusal.type, refusal.message


async def fetched(page: Page, **limits: float) -> bytes | tuple[str, str]:
    return await Internet({"/a.png": page}).fetch("http://pictures.example/a.png", **limits)  # type: ignore[arg-type]


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in [f"HTTP/1.1 {status}", *headers, ""])
    return head.encode() + body


def leads_to(location: str) -> bytes:
    return answer(b"", f"Location: {location}", "Content-Length: 0", status="302 Found")
