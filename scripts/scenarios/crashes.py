"""Workers that are killed, stopped, suspended, blocked, or crashed by a job."""

import asyncio
import signal
from contextlib import ExitStack

import redis.asyncio

from scripts.scenarios.harness import (
    Figure,
    chat_request,
    corrupt_logs,
    leaks,
    paced_worker,
    record,
    record_all,
    running,
    submit_all,
    until_decoding,
)
from sluice import Client

LEASE_S = 2.0


async def signalled(url: str, number: signal.Signals, *, streams: int, tokens: int) -> list[Figure]:
    """Send a signal to one of two workers while all streams run on it."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        settings: dict[str, float] = {"lease_s": LEASE_S, "grace_s": 0, "max_rows": streams, "reserved_rows": 0}
        with paced_worker(url, **settings) as first:
            ids = await submit_all(client, streams, chat_request(tokens))
            watching = asyncio.create_task(record_all(client, ids))
            await until_decoding(client, ids)
            async with running(paced_worker(url, **settings)) as second:
                first.signal(number)
                if number == signal.SIGSTOP:
                    await asyncio.sleep(LEASE_S + 3)
                    first.signal(signal.SIGCONT)
                recordings = await watching
                await asyncio.sleep(0.5)
                log = second.log()
        wrong = sum(not stream.is_right(tokens) for stream in recordings)
        gap_s = max(stream.gap_s for stream in recordings)
        corrupt, left = await corrupt_logs(db, ids), await leaks(db)
        burned = 0
        for job_id in ids:
            burned += int(await db.hget(f"sluice:job:{job_id}", "crashes") or 0)
    label = f"{streams} streams × {tokens} tokens, {number.name}"
    limit_s = 1.0 if number == signal.SIGTERM else LEASE_S + 1
    return [
        Figure(f"{label}: wrong streams", "0", str(wrong), wrong == 0),
        Figure(f"{label}: corrupt logs, leaked keys, crashes counted", "0", f"{corrupt}, {len(left)}, {burned}",
               not (corrupt or left or burned)),
        Figure(f"{label}: longest gap, lease {LEASE_S:g} s", f"≤ {limit_s:g} s", f"{gap_s:.2f} s",
               gap_s <= limit_s or number == signal.SIGSTOP),
    ] + ([] if "Traceback" not in log else [Figure(f"{label}: tracebacks", "0", "some", False)])  # fmt: skip


async def blocked_loop(url: str) -> list[Figure]:
    """Block the event loop of a worker for three leases, while another worker is ready to take over."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, lease_s=1):
            job_id = (await client.submit(chat_request(30, "block 3"), id="blocked")).id
            await until_decoding(client, [job_id], 3)
            async with running(paced_worker(url, lease_s=1)):
                recordings = await asyncio.wait_for(record(client, job_id), 30)
        attempts = int(await db.hget(f"sluice:job:{job_id}", "attempt") or 0)
    right = recordings.is_right(30) and attempts == 1
    return [Figure("event loop blocked for 3 leases: runs", "1", str(attempts), right)]


async def poison(url: str, *, neighbours: int, tokens: int) -> list[Figure]:
    """Run a job that kills its worker in a full batch, and restart the worker each time."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        ids = await submit_all(client, neighbours, chat_request(tokens), prefix="good")
        await client.submit(chat_request(tokens, "poison 8"), id="poison")
        deaths = 0
        with ExitStack() as stack:
            worker = paced_worker(url, lease_s=1, max_rows=neighbours + 1, reserved_rows=0)
            stack.callback(worker.stop)
            worker.start()
            watching = asyncio.create_task(record_all(client, [*ids, "poison"]))
            while not watching.done():
                if worker.process is not None and worker.process.poll() is not None:
                    deaths += 1
                    await asyncio.to_thread(worker.start)
                await asyncio.sleep(0.05)
            *recordings, culprit = watching.result()
            letters = await client.dead_letters()
        counted = 0
        for job_id in ids:
            counted += int(await db.hget(f"sluice:job:{job_id}", "crashes") or 0)
    wrong = sum(not stream.is_right(tokens) for stream in recordings)
    parked = [letter.id for letter in letters] == ["poison"] and culprit.events[-1].type == "failed"
    label = f"poison among {neighbours}"
    return [
        Figure(f"{label}: counted crashes when parked ({deaths} deaths in all)", "3",
               str(letters[0].crashes if letters else "not parked"), parked and letters[0].crashes == 3),
        Figure(f"{label}: neighbours wrong, neighbours counted", "0, 0", f"{wrong}, {counted}", not (wrong or counted)),
    ]  # fmt: skip
