"""Servers that refuse commands, for a reason of their own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.support.stack import Server
from tests.waiting import until


@dataclass
class Disk:
    """The disk of a server on which snapshots fail, as if it were full."""

    admin: Redis
    obstacle: Path

    async def fill(self) -> None:
        """Make snapshots fail; the server refuses writes from then on."""
        self.obstacle.mkdir(parents=True)
        (self.obstacle / "in the way").touch()  # a file cannot replace a folder
        await self.admin.config_set("save", "3600 1000000")
        await self.admin.bgsave()

        async def refuses() -> bool:
            try:
                await self.admin.ping()
            except ResponseError as error:
                return str(error).startswith("MISCONF")
            return False

        await until(refuses)

    async def free(self) -> None:
        """Let the server write again."""
        (self.obstacle / "in the way").unlink()
        self.obstacle.rmdir()
        await self.admin.bgsave()

        async def accepts() -> bool:
            try:
                return bool(await self.admin.ping())
            except ResponseError:
                return False

        await until(accepts)


@asynccontextmanager
async def disk_full(server: Server) -> AsyncIterator[Disk]:
    """Fill the disk of a server, and yield it."""
    async with Redis.from_url(server.url) as admin:
        config = await admin.config_get("dir", "dbfilename")
        disk = Disk(admin, Path(config["dir"]) / config["dbfilename"])
        await disk.fill()
        try:
            yield disk
        finally:
            await admin.config_set("save", "")  # or the server would not end before it is killed
