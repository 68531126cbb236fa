"""An offline run through HTTP whose gateway, feeder, workers and command are killed."""

import asyncio
import queue
import random
import signal
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis.asyncio
from openai import OpenAI

from sluice import Client
from sluice.contract import keys
from tests.support.chaos.batch_run import BatchRun, number_of
from tests.support.chaos.harness import Figure, at_some, count_leases, leaks
from tests.support.chaos.offline import Body, Workers, comparable_parts, output_figures, some_bodies
from tests.support.chaos.outages import DURABLE
from tests.support.receiver import Received, receiver
from tests.support.stack import Feeder, GatewayProcess, Server, WorkerProcess, add_webhook, free_port


class _HttpRun(BatchRun):
    """`sluice batch run --url`. Its lines are counted in the folder of runs, since answers are fetched at the end."""

    def __init__(self, url: str, folder: Path, bodies: list[Body], runs: Path) -> None:
        super().__init__(url, folder, bodies, option="--url")
        self._runs = runs

    def answered(self) -> int:
        lines = 0
        for output in self._runs.glob("running/*/output.jsonl"):
            with suppress(FileNotFoundError):  # it has ended meanwhile
                lines += output.read_bytes().count(b"\n")
        return lines

    def revive(self) -> None:
        """Start the command again if it has found no gateway when it began."""
        if self.process is not None and self.process.poll() == 2:
            self.start()


@dataclass(frozen=True, slots=True)
class _Scene:
    server: Server
    workers: list[WorkerProcess]
    gateway: GatewayProcess
    feeder: Feeder
    run: _HttpRun
    dice: random.Random
    at_kills: list[int] = field(default_factory=list)  # lines that ran on a worker when it was killed

    async def kill(self, victim: str) -> None:
        """Kill a process, and see that it is started again."""
        match victim:
            case "gateway":
                self.gateway.kill()
                await asyncio.sleep(self.dice.uniform(0, 2))
                await asyncio.to_thread(self.gateway.start)
            case "feeder":
                self.feeder.kill()
            case "command":
                await asyncio.to_thread(self.run.kill)
                self.run.start()
            case _:
                worker = self.dice.choice(self.workers)
                async with redis.asyncio.Redis.from_url(self.server.url) as db:
                    self.at_kills.append(await count_leases(db, worker.name))
                worker.signal(signal.SIGKILL)
                await asyncio.to_thread(worker.wait)
                worker.start(wait=False)


async def killed(workers_of: Workers, *, lines: int, distinct: int, kills: int, seed: int) -> list[Figure]:
    """Kill the gateway, the feeder, a worker and the command `kills` times each, at random, and compare the answers
    with those of a run that nothing disturbs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-batch-")))
        runs = folder / "runs"
        runs.mkdir()
        server = stack.enter_context(Server(args=DURABLE))
        workers = workers_of(server.url, folder)
        for each in workers:
            stack.callback(each.stop)
            await asyncio.to_thread(each.start)
        gateway = stack.enter_context(GatewayProcess(server.url, batch_dir=runs))
        feeder = stack.enter_context(Feeder(server.url, runs))
        port, bodies = free_port(), some_bodies(distinct)
        secret, received = add_webhook(server.url, port), stack.enter_context(receiver(port))
        unbroken = _HttpRun(gateway.url, folder / "unbroken", bodies, runs).start()
        stack.callback(unbroken.kill)
        codes = [await asyncio.to_thread(unbroken.wait)]
        expected = {number_of(line): comparable_parts(line["response"]["body"]) for line in unbroken.answers()}
        run = _HttpRun(gateway.url, folder / "run", [bodies[number % distinct] for number in range(lines)], runs)
        scene = _Scene(server, workers, gateway, feeder, run.start(), random.Random(seed))
        stack.callback(run.kill)
        done = await _kill_at_random(scene, lines, kills)
        await asyncio.to_thread(run.wait)
        run.revive()
        codes.append(await asyncio.to_thread(run.wait))
        label = f"{lines:,} lines through HTTP"
        outcome = ", ".join(f"{name} {done[name]}" for name in _VICTIMS)
        ended = {unbroken.report().id, run.report().id}
        return [
            Figure(f"{label}: kills", f"{kills} of each", outcome, all(done[name] == kills for name in _VICTIMS)),
            at_some(f"{label}: kills of a worker", scene.at_kills),
            Figure(f"{label}: exit codes, unbroken and killed", "0, 0", ", ".join(map(str, codes)), codes == [0, 0]),
            *output_figures(label, run, [expected[number % distinct] for number in range(lines)]),
            await asyncio.to_thread(_webhook_figure, label, received, secret, ended),
            *await _server_figures(label, server, run, lines),
        ]


def _webhook_figure(label: str, received: Received, secret: str, ended: set[str]) -> Figure:
    """Wait a minute for a webhook of each run."""
    client, told = OpenAI(api_key="none"), Counter[str]()
    with suppress(queue.Empty):
        while told.keys() != ended:
            event = client.webhooks.unwrap(*received.get(timeout=60), secret=secret)
            assert event.type == "batch.completed", event
            told[event.data.id] += 1
    outcome = ", ".join(f"{told[run_id]}" for run_id in ended)
    return Figure(f"{label}: webhooks of the two runs", "at least one of each", outcome, told.keys() == ended)


_VICTIMS = ("gateway", "feeder", "worker", "command")


async def _kill_at_random(scene: _Scene, lines: int, kills: int) -> Counter[str]:
    """Return the number of kills by victim; fewer than `kills` if the run ends first."""
    victims = list(_VICTIMS) * kills
    scene.dice.shuffle(victims)
    moments = sorted(scene.dice.sample(range(lines * 3 // 4), len(victims)))
    done = Counter[str]()
    for moment, victim in zip(moments, victims, strict=True):
        await asyncio.to_thread(scene.run.wait_for, moment)
        await asyncio.sleep(scene.dice.uniform(0, 0.5))  # at any time, not just after a write
        scene.run.revive()
        if not scene.run.running:
            break
        await scene.kill(victim)
        done[victim] += 1
    return done


async def _server_figures(label: str, server: Server, run: _HttpRun, lines: int) -> list[Figure]:
    async with Client(server.url) as client, redis.asyncio.Redis.from_url(server.url) as db:
        started = await client.batches()
        left = [key for key in await leaks(db) if not key.startswith(("sluice:batch:", keys.WEBHOOKS))]
    report = run.report()
    counts = report.request_counts
    outcome = f"{report.status}, {counts.completed:,} + {counts.failed:,} of {counts.total:,}"
    right = report.status == "completed" and (counts.completed, counts.failed, counts.total) == (lines, 0, lines)
    return [
        Figure(f"{label}: status", f"completed, {lines:,} + 0 of {lines:,}", outcome, right),
        Figure(f"{label}: runs that were started", "2", str(len(started)), len(started) == 2),
        Figure(f"{label}: leaked keys", "0", str(len(left)), not left),
    ]
