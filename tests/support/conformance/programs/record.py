"""Passes connections on to the gateway, and keeps the bytes of both directions."""

import asyncio
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

_CHUNK = 65_536  # bytes
_LETTERS = 300  # of an error
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_TEXT = re.compile(rb'"(?:content|delta|text)":("(?:[^"\\]|\\.)*")')
_REQUEST = re.compile(rb"((?:GET|POST|HEAD|DELETE|PUT|PATCH|OPTIONS) \S+) HTTP/1\.1\r\n")


@dataclass(slots=True)
class Connection:
    """A connection of a program: the bytes that it sent and received."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def exchanges(self) -> list[tuple[str, int]]:
        """Return the requests with their statuses; 0 for one that got none."""
        asked = [found.decode() for found in _REQUEST.findall(self.sent)]
        statuses = [int(found) for found in _STATUS.findall(self.received) if found != b"100"]
        return [(line, statuses[at] if at < len(statuses) else 0) for at, line in enumerate(asked)]

    def text(self) -> str:
        """Return the pieces of text that answers streamed, of all three interfaces, one after the other."""
        pieces = _TEXT.findall(self.received)
        return "".join(json.loads(piece) for piece in pieces)

    def refusals(self) -> list[str]:
        """Return the requests that got a status of 400 or more, with it and the first letters of the answer's body."""
        answers = re.split(rb"(?=HTTP/1\.1 \d{3} )", bytes(self.received))[1:]
        told = [answer.partition(b"\r\n\r\n")[2][:_LETTERS].decode("utf-8", "replace") for answer in answers]
        return [
            f"{line} {status}: {' '.join(told[at].split())}"
            for at, (line, status) in enumerate(self.exchanges())
            if status >= 400
        ]


class Recorder:
    """Listens on a free port, and connects each connection to `target`, a port of this host."""

    def __init__(self, target: Callable[[], int]) -> None:
        self._target = target
        self.connections: list[Connection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="recorder", daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_CHUNK), self._loop
        ).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @property
    def url(self) -> str:
        """The URL that programs are given, without /v1."""
        return f"http://127.0.0.1:{self.port}"

    def take(self) -> list[Connection]:
        """Return the connections since the last call."""
        taken, self.connections = self.connections, []
        return taken

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = Connection()
        self.connections.append(kept)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target())
        except OSError:  # the gateway is being restarted
            writer.close()
            return
        both = [
            asyncio.ensure_future(_pass_on(reader, back, kept.sent)),
            asyncio.ensure_future(_pass_on(there, writer, kept.received)),
        ]
        with suppress(asyncio.CancelledError):  # at the end; Python 3.11 prints a traceback of it
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, back):
            end.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    try:
        while chunk := await reader.read(_CHUNK):
            kept += chunk
            writer.write(chunk)
            await writer.drain()
    except OSError:
        return
