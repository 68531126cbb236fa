"""The Redis server of a worker, as its parts share it."""

from arq.connections import ArqRedis

from worker.queue.server.check import ServerCheck, uptime_s
from worker.queue.server.clock import ServerClock
from worker.settings import Settings


class RedisServer:
    """A client of the server, an estimate of the server's clock, and the check that workers can use the server."""

    def __init__(self, client: ArqRedis, settings: Settings, clock: ServerClock | None = None) -> None:
        self.client = client
        self.clock = clock or ServerClock()
        self._check = ServerCheck(client, settings)

    async def check_early(self) -> None:
        """Check the server if it answers within seconds; if not, it is checked later. Raises `CannotStart`."""
        await self._check.run_early()

    async def connect(self) -> float:
        """Check the server unless it has passed, and measure its clock. Returns its uptime in seconds. Raises
        `CannotStart` for problems that waiting does not solve, and RedisError or OSError for others."""
        await self._check.run()
        await self.clock.sync(self.client)
        return await uptime_s(self.client)
