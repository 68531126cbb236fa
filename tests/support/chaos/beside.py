"""Measures streams over HTTP beside uploads of large files, and beside an offline run: the gaps between tokens, and
the gateway's memory."""

import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.support.chaos.batch_run import BatchRun
from tests.support.chaos.gateway_clients import Chat
from tests.support.chaos.harness import Figure, chat_request, paced_worker, percentile, running
from tests.support.stack import Feeder, GatewayProcess

# In a process of its own: its work is not the gateway's.
_UPLOAD = """
import pathlib, sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
client.files.create(file=pathlib.Path(sys.argv[2]), purpose="batch")
"""


async def uploads(url: str, *, megabytes: int, count: int, streams: int, alone_s: float) -> list[Figure]:
    """Read streams alone, and then while `count` files are uploaded one after another."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "in.jsonl")
        file.write_bytes(b"x" * 1_000_000 * megabytes)

        async def upload(gateway: GatewayProcess) -> None:
            for _ in range(count):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _UPLOAD, gateway.base_url, str(file)
                )
                assert await process.wait() == 0

        async with running(paced_worker(url, max_rows=streams, reserved_rows=0)), _serving(url, folder) as gateway:
            return await _measured(gateway, f"{count} uploads", upload, streams, alone_s)


async def offline_run(url: str, *, lines: int, tokens: int, streams: int, alone_s: float) -> list[Figure]:
    """Read streams alone, and then while a run of `lines` lines, sent through the gateway, is answered."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        runs.mkdir()

        async def answer(gateway: GatewayProcess) -> None:
            bodies = [chat_request(tokens, f"go {number}") for number in range(lines)]
            with Feeder(url, runs):
                run = BatchRun(gateway.url, Path(folder, "run"), bodies, option="--url").start()
                assert await asyncio.to_thread(run.wait) == 0

        async with running(paced_worker(url)), _serving(url, str(runs)) as gateway:
            return await _measured(gateway, f"a run of {lines:,} lines", answer, streams, alone_s)


@asynccontextmanager
async def _serving(url: str, folder: str) -> AsyncIterator[GatewayProcess]:
    gateway = GatewayProcess(url, batch_dir=folder)
    try:
        yield await asyncio.to_thread(gateway.start)
    finally:
        gateway.kill()
        gateway.stop()


async def _measured(
    gateway: GatewayProcess,
    name: str,
    work: Callable[[GatewayProcess], Awaitable[None]],
    streams: int,
    alone_s: float,
) -> list[Figure]:
    """Return the gaps of `streams` streams alone for `alone_s` seconds, and then while `work` runs."""
    times = [list[float]() for _ in range(streams)]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http, asyncio.TaskGroup() as group:
        readers = [group.create_task(_read(http, gateway.url, each)) for each in times]
        while not all(times):
            await asyncio.sleep(0.05)
        began, memory = time.monotonic(), [_rss_mb(gateway.pid)]
        await asyncio.sleep(alone_s)
        working = time.monotonic()
        task = asyncio.ensure_future(work(gateway))
        while not task.done():
            memory.append(await asyncio.to_thread(_rss_mb, gateway.pid))
            await asyncio.sleep(0.05)
        await task
        ended = time.monotonic()
        for reader in readers:
            reader.cancel()
    alone, beside = _gaps(times, began, working), _gaps(times, working, ended)
    longest = max(0.1, 2 * max(alone))  # as beside greedy requests
    return [
        Figure("gaps alone: p99, longest", "", f"{percentile(alone, 0.99):.3f}, {max(alone):.3f} s", True),
        Figure(
            f"gaps beside {name}: p99, longest",
            f"{longest:.3f} s",
            f"{percentile(beside, 0.99):.3f}, {max(beside):.3f} s",
            max(beside) <= longest,
        ),
        Figure(f"seconds of {name}", "", f"{ended - working:.1f}", True),
        Figure("gateway's memory grew by", "20 MB", f"{max(memory) - memory[0]:.0f} MB", max(memory) < memory[0] + 20),
    ]


async def _read(http: httpx.AsyncClient, url: str, times: list[float]) -> None:
    """Read streams, and note the time of each part that arrives."""
    body = {**Chat().body(1_000_000), "temperature": 0, "stream": True}
    async with http.stream("POST", f"{url}{Chat.path}", json=body) as answer:
        async for _ in answer.aiter_text():
            times.append(time.monotonic())  # noqa: PERF401 - the list is read meanwhile


def _gaps(times: Sequence[Sequence[float]], began: float, ended: float) -> list[float]:
    """Return the seconds between two parts of a stream, for those that end within the period."""
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, times))
    return [after - before for before, after in pairs if began < after <= ended]


def _rss_mb(pid: int) -> float:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(shown.stdout) / 1024
