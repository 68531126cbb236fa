"""A rolling restart costs no answer: rows end on the worker that began them, while another takes the new jobs."""

import asyncio
import os
import pty
import signal
import sys
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client, Finished
from tests.end_to_end.test_shutdown import HANGS_S, ended, endless, until_decoding, until_said
from tests.support.stack import WorkerProcess, free_port
from tests.waiting import until


def request(i: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"Count to {20 + i % 7}."}], "temperature": 0, "max_tokens": 200}


async def answer(client: Client, i: int) -> tuple[str, set[int]]:
    """Return the text and the attempts of its events."""
    job = await client.submit(request(i))
    events = [event async for event in client.stream(job.id)]
    assert isinstance(events[-1], Finished), events[-1]
    text: str = (await client.result(job.id))["choices"][0]["message"]["content"]
    return text, {event.attempt for event in events}


async def started_at(db: Redis, worker: WorkerProcess) -> bytes | None:
    value: bytes | None = await db.hget(f"sluice:worker:{worker.name}", "started_at")
    return value


@pytest.mark.slow
@pytest.mark.parametrize("by", ["command", "signal"])
async def test_a_rolling_restart_under_load_loses_and_repeats_nothing(
    redis_url: str, client: Client, db: Redis, by: str
) -> None:
    workers = [WorkerProcess(redis_url, max_rows=4, grace_s=60) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        alone = [(await answer(client, i))[0] for i in range(7)]
        before = [await started_at(db, worker) for worker in workers]
        pids = [worker.pid for worker in workers]
        all_back, served = False, set[int]()

        async def chat(i: int) -> list[tuple[int, str, set[int]]]:
            """Ask one question after the other until all workers are back, and two more."""
            given, more = list[tuple[int, str, set[int]]](), 2
            while not all_back or more:
                more -= all_back
                given.append((i % 7, *await answer(client, i)))
                i += 1
            return given

        async def are_back() -> bool:
            now = [await started_at(db, worker) for worker in workers]
            served.add(sum(each is not None for each in now))
            return all(each not in (None, was) for each, was in zip(now, before, strict=True))

        chats = [asyncio.create_task(chat(i)) for i in range(6)]
        await asyncio.sleep(0.5)
        for worker in workers:
            if by == "signal":
                worker.signal(signal.SIGHUP)
            else:
                (shown,) = [each for each in await client.workers() if each["name"] == worker.name]
                assert await client.ask_worker(shown, "restart")
        await until(are_back, within_s=120)
        all_back = True
        answers = [each for done in await asyncio.gather(*chats) for each in done]
        assert {attempts == {1} for _, _, attempts in answers} == {True}
        assert [text for _, text, _ in answers] == [alone[i] for i, _, _ in answers]
        assert (len(answers) >= 18, min(served)) == (True, 1), "one of both is always there"
        assert [worker.pid for worker in workers] == pids
        assert [worker.process.poll() for worker in workers if worker.process] == [None, None]
        assert await db.exists("sluice:restart:default") == 0
    finally:
        for worker in workers:
            worker.stop()


async def test_a_worker_restarts_with_its_port_and_then_stops(redis_url: str, client: Client, db: Redis) -> None:
    with WorkerProcess(redis_url, metrics_port=free_port()) as worker:
        before = await started_at(db, worker)
        worker.signal(signal.SIGHUP)

        async def is_back() -> bool:
            return await started_at(db, worker) not in (None, before)

        await until(is_back, within_s=60)
        assert (await answer(client, 0))[1] == {1}
        worker.signal(signal.SIGTERM)
        assert await ended(worker) == 0


@pytest.mark.slow
async def test_sigterm_ends_a_worker_that_drains_to_restart(redis_url: str, client: Client) -> None:
    with WorkerProcess(redis_url, grace_s=HANGS_S) as worker:
        job = await client.submit(endless(20_000))
        await until_decoding(client, job.id)
        worker.signal(signal.SIGHUP)
        await until_said(worker, "restarting;")
        worker.signal(signal.SIGTERM)
        await until_said(worker, "SIGTERM: stopping;")
        await client.cancel(job.id)
        assert await ended(worker) == 0


@pytest.mark.slow
async def test_a_worker_whose_terminal_is_closed_stops_instead_of_restarting(redis_url: str) -> None:
    pid, terminal = pty.fork()
    if not pid:
        others = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
        worker = WorkerProcess(redis_url)
        os.chdir(worker._root)
        os.execve("/usr/bin/env", ["env", sys.executable, "-m", "worker"], {**others, **worker._env})
    shown = b""
    while b" serves " not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    deadline = time.monotonic() + 60
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline, shown
        await asyncio.sleep(0.05)
