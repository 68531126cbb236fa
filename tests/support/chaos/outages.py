"""Redis restarts, cuts connections, loses replies, or is out of memory."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import redis.asyncio

from sluice import Client, UnknownJob
from tests.support.chaos.harness import (
    Figure,
    Recording,
    at_each,
    at_some,
    chat_request,
    corrupt_logs,
    count_running,
    killing_connections,
    leaks,
    paced_worker,
    record_all,
    running,
    submit_all,
    until_decoding,
)
from tests.support.sentinels import Sentinels, is_copied, replica_of
from tests.support.stack import Server

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


async def figures_of(db: redis.asyncio.Redis, label: str, recordings: list[Recording], tokens: int) -> list[Figure]:
    """Check the recorded streams and the keys on the server."""
    wrong = sum(not stream.is_right(tokens) for stream in recordings)
    corrupt = await corrupt_logs(db, [stream.job_id for stream in recordings])
    left = await leaks(db)
    return [
        Figure(f"{label}: streams with lost or repeated tokens", "0", str(wrong), wrong == 0),
        Figure(f"{label}: corrupt logs, leaked keys", "0, 0", f"{corrupt}, {len(left)}", not (corrupt or left)),
    ]


async def restarted(*, away_s: float, streams: int, tokens: int) -> list[Figure]:
    """Stop the server while all streams run, and start it again with its append-only file."""
    with Server(args=DURABLE) as server:
        async with Client(server.url) as client, redis.asyncio.Redis.from_url(server.url) as db:
            with paced_worker(server.url, max_rows=streams, reserved_rows=0) as worker:
                ids = await submit_all(client, streams, chat_request(tokens))
                watching = asyncio.create_task(record_all(client, ids, timeout_s=120 + away_s))
                await until_decoding(client, ids)
                at_leaving = [await count_running(db, ids)]
                await asyncio.to_thread(server.leave)
                await asyncio.sleep(away_s)
                await asyncio.to_thread(server.start)
                recordings = await watching
                alive = worker.process is not None and worker.process.poll() is None
                figures = await figures_of(db, f"server away for {away_s:g} s, {streams} streams", recordings, tokens)
    return [
        at_each(f"server away for {away_s:g} s", at_leaving, streams),
        *figures,
        Figure(f"server away for {away_s:g} s: worker alive", "yes", "yes" if alive else "no", alive),
    ]


async def failed_over(*, streams: int, tokens: int) -> list[Figure]:
    """Kill the primary while all streams run. The replica that three sentinels promote lacks the last half second: ends
    of the logs, and a job that was submitted then."""
    with (
        Server(args=("--repl-diskless-sync-delay", "0")) as primary,
        replica_of(primary) as replica,
        Sentinels(primary) as sentinels,
    ):
        async with Client(sentinels.url) as client, redis.asyncio.Redis.from_url(replica.url) as db:
            await asyncio.to_thread(sentinels.until, partial(is_copied, replica))
            with paced_worker(sentinels.url, max_rows=streams + 1, reserved_rows=0):
                ids = await submit_all(client, streams, chat_request(tokens))
                watching = asyncio.create_task(record_all(client, ids))
                await until_decoding(client, ids)
                await _cut_off_replicas(primary)
                await client.submit(chat_request(tokens), id="lost")
                await until_decoding(client, ["lost"])
                running_then = await count_running(db, ids)
                began = time.monotonic()
                primary.kill()
                await asyncio.to_thread(sentinels.until, lambda: sentinels.primary_port() == replica.port)
                failover_s = time.monotonic() - began
                recordings = await watching
                figures = await figures_of(db, f"failover, {streams} streams", recordings, tokens)
                is_told = await _is_unknown(client, "lost")
    gap_s = max(stream.gap_s for stream in recordings)
    return [
        at_each("failover", [running_then], streams),
        *figures,
        Figure("failover: longest gap", f"≤ {failover_s:.1f} + 5 s", f"{gap_s:.1f} s", gap_s <= failover_s + 5),
        Figure("failover: a lost job is told", "yes", "yes" if is_told else "no", is_told),
    ]


async def _cut_off_replicas(primary: Server) -> None:
    """Have replicas miss all that is written from now on."""
    async with redis.asyncio.Redis.from_url(primary.url) as db:
        await db.execute_command("ACL SETUSER", "default", "-psync", "-sync")
        await db.execute_command("CLIENT KILL", "TYPE", "replica")


async def _is_unknown(client: Client, job_id: str) -> bool:
    try:
        async for _ in client.stream(job_id, unknown_s=1):
            pass
    except UnknownJob:
        return True
    return False


async def connections_killed(url: str, *, streams: int, tokens: int) -> list[Figure]:
    """Kill all other connections to the server four times a second, including the worker's."""
    label = "all connections killed every 250 ms"
    return await while_killing(url, ("normal", "pubsub"), label, streams=streams, tokens=tokens)


async def subscribers_killed(url: str, *, streams: int, tokens: int) -> list[Figure]:
    """Kill all pub/sub connections four times a second."""
    label = "pub/sub connections killed every 250 ms"
    return await while_killing(url, ("pubsub",), label, streams=streams, tokens=tokens)


async def while_killing(url: str, kinds: tuple[str, ...], label: str, *, streams: int, tokens: int) -> list[Figure]:
    """Run streams while connections of these kinds are killed every 250 ms."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, max_rows=streams, reserved_rows=0):
            ids = await submit_all(client, streams, chat_request(tokens))
            async with AsyncExitStack() as killing:
                at_kills = [
                    await killing.enter_async_context(killing_connections(url, 0.25, kind, ids)) for kind in kinds
                ]
                recordings = await record_all(client, ids)
            await asyncio.sleep(0.5)
            figures = await figures_of(db, f"{label}, {streams} streams", recordings, tokens)
    return [at_some(label, [count for counts in at_kills for count in counts]), *figures]


async def scripts_forgotten(url: str, *, streams: int, tokens: int) -> list[Figure]:
    """Flush the server's script cache ten times a second, as after a failover."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, max_rows=streams, reserved_rows=0):
            ids = await submit_all(client, streams, chat_request(tokens))
            watching = asyncio.create_task(record_all(client, ids))
            at_flushes = list[int]()
            while not watching.done():
                at_flushes.append(await count_running(db, ids))
                await db.script_flush()
                await asyncio.sleep(0.1)
            label = "scripts flushed every 100 ms"
            figures = await figures_of(db, f"{label}, {streams} streams", watching.result(), tokens)
    return [at_some(label, at_flushes), *figures]


async def full_server(url: str, *, streams: int, tokens: int, full_s: float) -> list[Figure]:
    """Make the server refuse all writes for `full_s` seconds."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, max_rows=streams, reserved_rows=0) as worker:
            ids = await submit_all(client, streams, chat_request(tokens))
            watching = asyncio.create_task(record_all(client, ids))
            await until_decoding(client, ids)
            at_full = [await count_running(db, ids)]
            await db.config_set("maxmemory", "1mb")
            await asyncio.sleep(full_s)
            await db.config_set("maxmemory", "0")
            figures = await figures_of(db, f"server full for {full_s:g} s, {streams} streams", await watching, tokens)
            is_logged = "maxmemory" in worker.log()
    return [
        at_each("server full", at_full, streams),
        *figures,
        Figure("server full: the worker says what it waits for", "yes", "yes" if is_logged else "no", is_logged),
    ]


async def answers_lost(server_port: int, *, cuts: int, streams: int, tokens: int) -> list[Figure]:
    """Cut the worker's connection after the server has run a command and before the reply arrives."""
    url = f"redis://127.0.0.1:{server_port}/0"
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        async with (
            lossy_proxy(server_port, max_cuts=cuts) as proxy,
            running(paced_worker(f"redis://127.0.0.1:{proxy.port}/0", max_rows=streams, reserved_rows=0, step_ms=5)),
        ):
            recordings, round_ = [], 0
            while proxy.cuts < cuts:
                round_ += 1
                ids = await submit_all(client, streams, chat_request(tokens), prefix=f"round-{round_}")
                recordings += await record_all(client, ids)
            await asyncio.sleep(0.5)
        figures = await figures_of(db, f"{proxy.cuts} replies lost", recordings, tokens)
    return figures


class Proxy:
    """Forwards bytes to the server, and sometimes drops a reply and cuts the connection, up to `max_cuts` times."""

    def __init__(self, target: int, max_cuts: int) -> None:
        self.cuts, self.port = 0, 0
        self._target = target
        self._max_cuts = max_cuts
        self._dice = random.Random(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection."""
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.create_task(self._forward(reader, up_writer))
        down = asyncio.create_task(self._forward(up_reader, writer, lossy=True))
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        writer.close()
        up_writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lossy: bool = False
    ) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                if lossy and self.cuts < self._max_cuts and self._dice.random() < 0.05:
                    self.cuts += 1
                    return
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass  # one side has closed; `serve` closes the other


@asynccontextmanager
async def lossy_proxy(target: int, *, max_cuts: int) -> AsyncIterator[Proxy]:
    """Run a proxy on a free port while the context is open."""
    proxy = Proxy(target, max_cuts)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy
