"""Workers that are killed, stopped, suspended, blocked, or crashed by a job."""

import asyncio
import signal
import time
from contextlib import ExitStack

import redis.asyncio

from sluice import Client
from tests.support.chaos.harness import (
    Figure,
    at_each,
    at_some,
    chat_request,
    corrupt_logs,
    count_running,
    leaks,
    paced_worker,
    record,
    record_all,
    running,
    submit_all,
    until_decoding,
    until_taken_over,
)

LEASE_S = 2.0


async def signalled(url: str, number: signal.Signals, *, streams: int, tokens: int) -> list[Figure]:
    """Send a signal to a worker while all its streams run, and start another one to take them over."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        settings: dict[str, float] = {"lease_s": LEASE_S, "grace_s": 0, "max_rows": streams, "reserved_rows": 0}
        with paced_worker(url, **settings) as first:
            ids = await submit_all(client, streams, chat_request(tokens))
            watching = asyncio.create_task(record_all(client, ids))
            await until_decoding(client, ids)
            at_signals = [await count_running(db, ids)]
            first.signal(number)  # before the second one starts, which may take longer than the streams
            signalled_at = time.monotonic()
            async with running(paced_worker(url, **settings)) as second:
                start_s = time.monotonic() - signalled_at
                if number == signal.SIGSTOP:
                    await until_taken_over(db, ids)
                    at_signals.append(await count_running(db, ids))
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
    limit_s = 1.0 + max(start_s, 0.0 if number == signal.SIGTERM else LEASE_S)
    return [
        at_each(f"{label}, SIGCONT" if number == signal.SIGSTOP else label, at_signals, streams),
        Figure(f"{label}: wrong streams", "0", str(wrong), wrong == 0),
        Figure(f"{label}: corrupt logs, leaked keys, crashes counted", "0", f"{corrupt}, {len(left)}, {burned}",
               not (corrupt or left or burned)),
        Figure(f"{label}: longest gap, lease {LEASE_S:g} s, second worker ready after {start_s:.1f} s",
               f"≤ {limit_s:.1f} s", f"{gap_s:.2f} s", gap_s <= limit_s),
    ] + ([] if "Traceback" not in log else [Figure(f"{label}: tracebacks", "0", "some", False)])  # fmt: skip


async def blocked_loop(url: str) -> list[Figure]:
    """Block the event loop of a worker for three leases, while another worker is ready to take over."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        async with running(paced_worker(url, lease_s=1)) as one, running(paced_worker(url, lease_s=1)) as other:
            job_id = (await client.submit(chat_request(30, "block 3"), id="blocked")).id
            await until_decoding(client, [job_id], 3)
            at_block = [await count_running(db, [job_id])]
            recordings = await asyncio.wait_for(record(client, job_id), 30)
            alive = sum(each.process is not None and each.process.poll() is None for each in (one, other))
        attempts = int(await db.hget(f"sluice:job:{job_id}", "attempt") or 0)
    right = recordings.is_right(30) and attempts == 1
    label = "event loop blocked for 3 leases"
    return [
        at_each(label, at_block, 1),
        Figure(f"{label}: longest gap, workers", "≥ 2 s, 2", f"{recordings.gap_s:.1f} s, {alive}",
               recordings.gap_s >= 2 and alive == 2),
        Figure(f"{label}: runs", "1", str(attempts), right),
    ]  # fmt: skip


async def poison(url: str, *, neighbours: int, tokens: int) -> list[Figure]:
    """Run a job that kills its worker in a full batch, and restart the worker each time."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        ids = await submit_all(client, neighbours, chat_request(tokens), prefix="good")
        await client.submit(chat_request(tokens, "poison 8"), id="poison")
        at_deaths = list[int]()
        with ExitStack() as stack:
            worker = paced_worker(url, lease_s=1, max_rows=neighbours + 1, reserved_rows=0)
            stack.callback(worker.stop)
            worker.start()
            watching = asyncio.create_task(record_all(client, [*ids, "poison"]))
            while not watching.done():
                if worker.process is not None and worker.process.poll() is not None:
                    at_deaths.append(await count_running(db, ids))
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
        at_some(f"{label}: deaths", at_deaths),
        Figure(f"{label}: number of counted crashes until it is parked ({len(at_deaths)} deaths in all)", "3",
               str(letters[0].crashes if letters else "not parked"), parked and letters[0].crashes == 3),
        Figure(f"{label}: neighbours wrong, neighbours counted", "0, 0", f"{wrong}, {counted}", not (wrong or counted)),
    ]  # fmt: skip
