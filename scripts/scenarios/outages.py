"""Redis goes away, cuts connections, loses answers, or is full."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import redis.asyncio

from scripts.scenarios.harness import (
    Figure,
    Seen,
    ask,
    corrupt_logs,
    killing_connections,
    leaks,
    paced,
    running,
    submit_all,
    until_decoding,
    watch_all,
)
from scripts.stack import Server, WorkerProcess
from sluice import Client

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


async def judge(db: redis.asyncio.Redis, what: str, seen: list[Seen], tokens: int) -> list[Figure]:
    wrong = sum(not stream.is_right(tokens) for stream in seen)
    corrupt, left = await corrupt_logs(db, [stream.job_id for stream in seen]), await leaks(db)
    return [
        Figure(f"{what}: streams with lost or repeated tokens", "0", str(wrong), wrong == 0),
        Figure(f"{what}: corrupt logs, leaked keys", "0, 0", f"{corrupt}, {len(left)}", not (corrupt or left)),
    ]


async def restarted(*, away_s: float, streams: int, tokens: int) -> list[Figure]:
    """The server is away in the middle of all streams, and comes back with its append-only file."""
    with Server(args=DURABLE) as server:
        async with Client(server.url) as client, redis.asyncio.Redis.from_url(server.url) as db:
            with paced(server.url, max_rows=streams, reserved_rows=0) as worker:
                ids = await submit_all(client, streams, ask(tokens))
                watching = asyncio.create_task(watch_all(client, ids, timeout_s=120 + away_s))
                await until_decoding(client, ids)
                await asyncio.to_thread(server.leave)
                await asyncio.sleep(away_s)
                await asyncio.to_thread(server.start)
                seen = await watching
                alive = worker.process is not None and worker.process.poll() is None
                figures = await judge(db, f"server away for {away_s:g} s, {streams} streams", seen, tokens)
    return [*figures, Figure(f"server away for {away_s:g} s: worker alive", "yes", "yes" if alive else "no", alive)]


async def connections_killed(url: str, *, streams: int, tokens: int) -> list[Figure]:
    """Every connection but the killer's is cut four times a second, the worker's among them."""
    what = "all connections killed every 250 ms"
    return await while_killing(url, ("normal", "pubsub"), what, streams=streams, tokens=tokens)


async def subscribers_killed(url: str, *, streams: int, tokens: int) -> list[Figure]:
    what = "pub/sub connections killed every 250 ms"
    return await while_killing(url, ("pubsub",), what, streams=streams, tokens=tokens)


async def while_killing(url: str, kinds: tuple[str, ...], what: str, *, streams: int, tokens: int) -> list[Figure]:
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced(url, max_rows=streams, reserved_rows=0):
            ids = await submit_all(client, streams, ask(tokens))
            async with AsyncExitStack() as killing:
                for kind in kinds:
                    await killing.enter_async_context(killing_connections(url, 0.25, kind))
                seen = await watch_all(client, ids)
            await asyncio.sleep(0.5)
            return await judge(db, f"{what}, {streams} streams", seen, tokens)


async def scripts_forgotten(url: str, *, streams: int, tokens: int) -> list[Figure]:
    """A failover to a server that has never seen our scripts."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced(url, max_rows=streams, reserved_rows=0):
            ids = await submit_all(client, streams, ask(tokens))
            watching = asyncio.create_task(watch_all(client, ids))
            while not watching.done():
                await db.script_flush()
                await asyncio.sleep(0.1)
            return await judge(db, f"scripts forgotten every 100 ms, {streams} streams", watching.result(), tokens)


async def full_server(url: str, *, streams: int, tokens: int, full_s: float) -> list[Figure]:
    """The server refuses every write for a while."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced(url, max_rows=streams, reserved_rows=0) as worker:
            ids = await submit_all(client, streams, ask(tokens))
            watching = asyncio.create_task(watch_all(client, ids))
            await until_decoding(client, ids)
            await db.config_set("maxmemory", "1mb")
            await asyncio.sleep(full_s)
            await db.config_set("maxmemory", "0")
            figures = await judge(db, f"server full for {full_s:g} s, {streams} streams", await watching, tokens)
            said = "maxmemory" in worker.log()
    return [*figures, Figure("server full: the worker says what it waits for", "yes", "yes" if said else "no", said)]


async def answers_lost(server_port: int, *, cuts: int, streams: int, tokens: int) -> list[Figure]:
    """The connection is cut after the server has run a script and before the worker hears of it."""
    url = f"redis://127.0.0.1:{server_port}/0"
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        async with (
            lossy_proxy(server_port, most=cuts) as proxy,
            running(paced(f"redis://127.0.0.1:{proxy.port}/0", max_rows=streams, reserved_rows=0, step_ms=5)),
        ):
            seen, round_ = [], 0
            while proxy.cuts < cuts:
                round_ += 1
                ids = await submit_all(client, streams, ask(tokens), prefix=f"round-{round_}")
                seen += await watch_all(client, ids)
            await asyncio.sleep(0.5)
        figures = await judge(db, f"{proxy.cuts} acknowledgements lost", seen, tokens)
    return figures


def behind(proxy: "Proxy", streams: int) -> WorkerProcess:
    return paced(f"redis://127.0.0.1:{proxy.port}/0", max_rows=streams, reserved_rows=0, step_ms=5)


class Proxy:
    """Passes bytes on, and once in a while keeps an answer and cuts the connection."""

    def __init__(self, target: int, most: int) -> None:
        self.cuts, self.port = 0, 0
        self._target, self._most, self._dice = target, most, random.Random(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.create_task(self._pass_on(reader, up_writer))
        down = asyncio.create_task(self._pass_on(up_reader, writer, lossy=True))
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        writer.close()
        up_writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lossy: bool = False
    ) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                if lossy and self.cuts < self._most and self._dice.random() < 0.05:
                    self.cuts += 1
                    return
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass  # one end has gone; the other is closed too


@asynccontextmanager
async def lossy_proxy(target: int, *, most: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target, most)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy
