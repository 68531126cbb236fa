"""The line between a client and its server, to be broken in every way."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from tests.support.stack import free_port


@dataclass
class _Call:
    """One connection through the line, both ends."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    swallowed: bool = False  # both ends stay open, and nothing that either sends arrives

    def drop(self) -> None:
        for end in (self.near, self.far):
            end.transport.abort()


class Line:
    """The line to a server: it can go dead or mute and come back, and it can lose answers that were given."""

    def __init__(self, server_url: str) -> None:
        self._to = urlsplit(server_url)
        self._calls: list[_Call] = []
        self.loses: Callable[[], bool] = lambda: False  # asked for each piece of an answer
        self.lost = 0
        self.mute = False  # connections stay, and nothing comes through
        self._dead = False
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}{self._to.path}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.down()
        self._server.close()
        await self._server.wait_closed()

    def down(self) -> None:
        self._dead = True
        self.cut()

    def up(self) -> None:
        self._dead = False

    def swallow(self) -> None:
        """Drop all present connections without a word, as NAT and load balancers do."""
        for call in self._calls:
            call.swallowed = True

    def cut(self) -> None:
        for call in self._calls:
            call.drop()
        self._calls.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._dead:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        call = _Call(writer, far_writer)
        self._calls.append(call)
        there = asyncio.create_task(self._pass_on(reader, far_writer, call, loses=lambda: False))
        await self._pass_on(far_reader, writer, call, loses=lambda: self.loses())
        await there

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: _Call, loses: Callable[[], bool]
    ) -> None:
        try:
            while piece := await reader.read(65_536):
                if self.mute or call.swallowed:
                    continue
                if loses():
                    self.lost += 1
                    break
                writer.write(piece)
        except OSError:
            pass
        if not call.swallowed:  # the other end of a black hole is not even told that this one has left
            call.drop()
