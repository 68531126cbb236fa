"""An offline run whose feeder, workers and server are killed."""

import asyncio
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio

from models.random_checkpoints import tiny_chat_in_fp32
from sluice import Client
from tests.support.chaos.batch_run import BatchRun, custom_id, number_of
from tests.support.chaos.harness import Figure, at_some, chat_request, count_leases, leaks, paced_worker
from tests.support.chaos.outages import DURABLE
from tests.support.stack import Server, WorkerProcess

Body = dict[str, object]


def some_bodies(distinct: int) -> list[Body]:
    """Return different requests: greedy and sampled, with and without a system prompt, complete and cut off."""
    system = {"role": "system", "content": "You are a helpful assistant. Always mention NWP58."}
    countries = "France", "Italy", "Norway", "Japan", "Kenya", "Peru", "Cuba", "Ghana"
    bodies = list[Body]()
    for i in range(distinct):
        drawing = {"temperature": 1.2, "seed": i} if i % 3 == 0 else {"temperature": 0}
        if i % 2:
            body = chat_request(6 + i, f"Count to {3 + i % 20}.", **drawing)
        else:
            body = chat_request(40, f"What is the capital of {countries[i // 2 % len(countries)]}?", **drawing)
        messages: Any = body["messages"]
        bodies.append({**body, "messages": [system, *messages]} if i % 4 < 2 else body)
    return bodies


@dataclass(frozen=True, slots=True)
class Scene:
    """The processes of the scenario."""

    server: Server
    workers: list[WorkerProcess]
    run: BatchRun
    at_kills: list[int] = field(default_factory=list)  # lines that ran on a worker when it was killed

    async def kill(self, victim: str) -> None:
        """Kill the feeder, the server or a worker, and start it again."""
        if victim == "feeder":
            await asyncio.to_thread(self.run.kill)
            self.run.start()
        elif victim == "server":
            # Wait until the feeder runs: one that finds no server when it starts exits with an error.
            await asyncio.to_thread(self.run.wait_for, self.run.answered() + 1)
            await asyncio.to_thread(self.server.leave)
            await asyncio.sleep(2)
            await asyncio.to_thread(self.server.start)
        else:
            worker = self.workers[int(victim)]
            async with redis.asyncio.Redis.from_url(self.server.url) as db:
                self.at_kills.append(await count_leases(db, worker.name))
            worker.signal(signal.SIGKILL)
            await asyncio.to_thread(worker.wait)
            worker.start(wait=False)


Workers = Callable[[str, Path], list[WorkerProcess]]  # from the URL of the server and a folder to write to


def two_paced(url: str, _: Path) -> list[WorkerProcess]:
    """Return two workers without a model."""
    return [paced_worker(url, max_rows=16, lease_s=1) for _ in range(2)]


def two_tiny(url: str, folder: Path) -> list[WorkerProcess]:
    """Return two workers with the tiny model in fp32, in which an answer does not depend on the other rows."""
    model = tiny_chat_in_fp32(folder / "model")
    return [WorkerProcess(url, model=model, lease_s=2) for _ in range(2)]


async def killed(workers_of: Workers, *, lines: int, distinct: int, kills: int, seed: int) -> list[Figure]:
    """Kill the feeder or one of two workers `kills` times at random, and restart the server once in between."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-batch-")))
        server = stack.enter_context(Server(args=DURABLE))
        workers = workers_of(server.url, folder)
        for each in workers:
            stack.callback(each.stop)
            await asyncio.to_thread(each.start)
        bodies = some_bodies(distinct)
        expected = [await answer_directly(server.url, body) for body in bodies]
        run = BatchRun(server.url, folder / "run", [bodies[number % distinct] for number in range(lines)])
        scene = Scene(server, workers, run.start())
        stack.callback(run.kill)
        done = await kill_at_random(scene, lines, kills, random.Random(seed))
        exit_code = await asyncio.to_thread(run.wait)
        label = f"{lines:,} lines, two workers"
        outcome = f"{done.total() - done['server']} ({done['feeder']} of the feeder), {done['server']}, {exit_code}"
        all_done = done.total() == kills + 1 and exit_code == 0
        return [
            Figure(f"{label}: kills, restarts of the server, exit code", f"{kills}, 1, 0", outcome, all_done),
            at_some(f"{label}: kills of a worker", scene.at_kills),
            *output_figures(label, run, [expected[number % distinct] for number in range(lines)]),
            *await status_figures(label, scene, lines),
        ]


async def kill_at_random(scene: Scene, lines: int, kills: int, dice: random.Random) -> Counter[str]:
    """Return the number of kills by victim; fewer than `kills` if the run ends first."""
    victims = [("feeder", "0", "1")[i % 3] for i in range(kills)]
    dice.shuffle(victims)
    victims.insert(len(victims) // 2, "server")
    moments = sorted(dice.sample(range(lines * 3 // 4), len(victims)))
    done = Counter[str]()
    for moment, victim in zip(moments, victims, strict=True):
        await asyncio.to_thread(scene.run.wait_for, moment)
        await asyncio.sleep(dice.uniform(0, 0.5))  # at any time, not just after a write
        if not scene.run.running:
            break
        await scene.kill(victim)
        done[victim] += 1
    return done


async def answer_directly(url: str, body: Body) -> dict[str, Any]:
    """Submit a request as a job, and return the comparable parts of its result."""
    async with Client(url) as client:
        job = await client.submit(body)
        return comparable_parts(await client.result(job.id, timeout=60))


def comparable_parts(completion: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a completion that do not depend on the other rows of the worker."""
    usage = {name: tokens for name, tokens in completion["usage"].items() if name != "prompt_tokens_details"}
    return {"choices": completion["choices"], "usage": usage, "model": completion["model"]}


def output_figures(label: str, run: BatchRun, expected: list[dict[str, Any]]) -> list[Figure]:
    """Compare the output file with the answers to direct requests."""
    lines = list(run.answers())
    answers_by_id = Counter(line["custom_id"] for line in lines)
    missing = sum(answers_by_id[custom_id(number)] == 0 for number in range(len(expected)))
    more = sum(count - 1 for count in answers_by_id.values())
    wrong = 0
    for line in lines:
        answered = line["response"]["status_code"] == 200 and line["error"] is None
        wrong += not (answered and comparable_parts(line["response"]["body"]) == expected[number_of(line)])
    return [
        Figure(f"{label}: lines missing, repeated", "0, 0", f"{missing}, {more}", not (missing or more)),
        Figure(f"{label}: answers that differ from a direct request", "0", str(wrong), wrong == 0),
    ]


async def status_figures(label: str, scene: Scene, lines: int) -> list[Figure]:
    """Check the report of the run, its stored status, and the keys that are left."""
    report = scene.run.report()
    async with Client(scene.server.url) as client, redis.asyncio.Redis.from_url(scene.server.url) as db:
        stored = await client.batch_status(report.id)
        left = [key for key in await leaks(db) if not key.startswith("sluice:batch:")]
        kept = sum([1 async for _ in db.scan_iter(match=f"*{report.id}-*", count=1000)])
    tokens = sum(line["response"]["body"]["usage"]["total_tokens"] for line in scene.run.answers())
    counts = report.request_counts
    right = (
        report == stored
        and (report.status, report.errors, report.error_file_id) == ("completed", None, None)
        and (counts.total, counts.completed, counts.failed) == (lines, lines, 0)
        and report.usage.total_tokens == tokens
    )
    outcome = f"{report.status}, {counts.completed:,} + {counts.failed:,} of {counts.total:,}"
    return [
        Figure(f"{label}: status, in {report.sluice.seconds:.0f} s", f"completed, {lines:,} + 0 of {lines:,}", outcome,
               right),
        Figure(f"{label}: leaked keys (of lines, until they expire: {kept})", "0", str(len(left)), not left),
    ]  # fmt: skip
