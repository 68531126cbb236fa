"""The two ways of a streamed chat to a worker, the queue alone and the gateway, with clients that cost little."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sluice import Client, Delta, Finished


@dataclass(slots=True)
class Arrivals:
    """When a request was sent, and when each piece of its text arrived, in seconds of one clock."""

    sent: float = field(default_factory=time.perf_counter)
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, text: str | None) -> None:
        """Note a piece, if there is one."""
        if text:
            self.pieces.append(time.perf_counter())


Body = dict[str, Any]
Way = Callable[[Body], Awaitable[Arrivals]]


def queue(client: Client) -> Way:
    """Return the way through `sluice.Client` alone."""

    async def answered(body: Body) -> Arrivals:
        arrivals = Arrivals()
        job = await client.submit(body)
        async for event in client.stream(job.id):
            if isinstance(event, Delta):
                arrivals.add(event.content)
            if isinstance(event, Finished):
                arrivals.tokens = event.usage.completion_tokens
        return arrivals

    return answered


def front(url: str) -> Way:
    """Return the way through the gateway at `url`, with a connection for each request."""
    address = urlsplit(url)

    async def answered(body: Body) -> Arrivals:
        arrivals = Arrivals()
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(post(body))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the gateway answered {head[:200]!r}")
            while size := int(await reader.readline(), 16):
                _read(await reader.readexactly(size + 2), arrivals)
        finally:
            writer.close()
        return arrivals

    return answered


def post(body: Body) -> bytes:
    """Return the bytes of a request for a streamed chat completion with its usage."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def _read(chunk: bytes, arrivals: Arrivals) -> None:
    """Read the complete frames of a chunk: the gateway never divides one."""
    for line in chunk.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        for choice in event["choices"]:
            arrivals.add(choice["delta"].get("content"))
        if event.get("usage"):
            arrivals.tokens = event["usage"]["completion_tokens"]
