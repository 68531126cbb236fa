"""The supervisor of several models: starts the worker of a model when jobs wait for it, ends it when the model is idle
or another needs its memory, and starts it again when it dies."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys, models
from sluice.contract.refusals import reason_of
from sluice.log_lines import set_up_logging
from sluice.service_status import serving
from sluice.transport import connect
from worker.engine.memory import format_bytes
from worker.errors import CannotStart
from worker.process.child import environment_with
from worker.queue.scripts import JOB_LIFE_MS, script
from worker.supervisor.decision import Plan, PlannedModel, Situation, decide
from worker.supervisor.locks import WorkerLocks

logger = logging.getLogger("sluice.supervisor")

_LEASE_S = 10.0  # of what it publishes
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def plan_models(config: Mapping[str, Any]) -> Plan:
    """Return the plan for a configuration, made by a process of its own: see `worker.supervisor.plan`. Blocks. Raises
    `CannotStart`."""
    command = [sys.executable, "-m", "worker.supervisor.plan"]
    try:
        text = json.dumps(config)
    except TypeError:  # TOML has dates
        raise CannotStart("a value is a date; no setting takes one.") from None
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise CannotStart(f"the models could not be examined (exit code {done.returncode}); the lines above say why.")
    found = json.loads(done.stdout)
    if "error" in found:
        raise CannotStart(found["error"])
    return Plan.read(found)


@dataclass(slots=True)
class _Model:
    """A model and its process. Times are Unix seconds of the server's clock."""

    planned: PlannedModel
    state: models.State = "unloaded"
    since: float = 0.0
    process: asyncio.subprocess.Process | None = None
    worker: str = ""
    starts: int = 0
    failures: int = 0  # since it last served for a minute
    ready_at: float = 0.0
    problem: str = ""
    wanted: bool = False
    asked_at: float | None = None  # of a command to load it that is not carried out yet
    waits_since: float | None = None
    busy: bool = False
    used_at: float = 0.0
    loaded_at: float = 0.0
    loaded_bytes: int = 0  # of its weights, while it is loading
    queues: list[str] = field(default_factory=list)

    def enter(self, state: models.State, now: float) -> None:
        self.state, self.since = state, now
        self.loaded_bytes = 0

    def report(self, until: float) -> str:
        """Return the supervisor's field in the hash of the model's workers."""
        loads = f" {self.loaded_bytes} {self.planned.weights}" if self.state == "loading" else ""
        return f"{self.planned.queue_limit} 0 {until:.0f} 0 0{loads}"

    def situation(self) -> Situation:
        waits = [at for at in (self.waits_since, self.asked_at) if at is not None]
        return Situation(
            name=self.planned.name,
            nbytes=self.planned.nbytes,
            in_memory=self.process is not None,
            loaded=self.state == "loaded",
            leaving=self.state == "unloading",
            # A job that was requeued when the model left is older than those that it left for.
            waits_since=max(min(waits), self.since) if waits else None,
            wanted=self.wanted,
            ready_at=self.ready_at,
            busy=self.busy,
            used_at=self.used_at,
            loaded_at=self.loaded_at,
            idle_unload_s=self.planned.idle_unload_s,
        )

    def published(self) -> str:
        """Return the model's field in the hash of the supervisor."""
        planned = self.planned
        return json.dumps(
            models.Model(
                path=planned.path,
                bytes=planned.nbytes,
                state=self.state,
                since=round(self.since, 3),
                weights=planned.weights,
                loaded_bytes=self.loaded_bytes,
                worker=self.worker,
                problem=self.problem,
            )
        )


class Supervisor:
    """Runs the workers of the models of a plan, on the event loop.

    It reads the queues when a submission wakes it, and twice a second, and outlives its workers. A job waits in its
    queue until a worker takes it, so nothing is lost if the supervisor ends."""

    def __init__(self, plan: Plan, *, sweep_s: float = 0.5) -> None:
        self._plan, self._sweep_s = plan, sweep_s
        self._locks = WorkerLocks()
        self.id = f"{socket.gethostname()}-{os.getpid()}"
        self._models = {each.name: _Model(each) for each in plan.models}
        self._woken, self._stopping = asyncio.Event(), asyncio.Event()
        self._ahead_s = 0.0  # of the server's clock
        self._published_at = float("-inf")  # monotonic
        self._silent_since: float | None = None  # monotonic: since Redis does not answer
        self._followers = set[asyncio.Task[None]]()
        self._worst = 0
        free = plan.budget
        for each in self._models.values():
            each.queues = [keys.queue(each.planned.name, lane) for lane in keys.LANES]
            each.wanted = each.planned.nbytes <= free  # at the start as many are loaded as fit, in their order
            free -= each.planned.nbytes if each.wanted else 0

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, drain the workers, and return the exit code: the worst of a worker that was
        asked to end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up, any(map(os.isatty, range(3))))
        logger.info(
            "%s serves %s, with %s for all together", self.id, ", ".join(self._models), format_bytes(self._plan.budget)
        )
        async with connect(self._plan.redis_url) as redis, serving():
            listening = asyncio.create_task(self._listen(redis))
            try:
                while not self._stopping.is_set() or any(each.process for each in self._models.values()):
                    await self._turn(redis)
                    await self._until_woken()
            finally:
                listening.cancel()
                for each in self._models.values():
                    if each.process is not None:
                        each.process.kill()
            await self._answered(self._withdraw(redis))
        return self._worst

    async def _turn(self, redis: Redis) -> None:
        await self._answered(self._look(redis))
        if not self._stopping.is_set():
            now = self._now()
            left = self._locks.left()
            decision = decide([*(each.situation() for each in self._models.values()), *left], self._plan.budget, now)
            for name in decision.unload:
                self._unload(self._models[name])
            for name in decision.load:
                await self._load(self._models[name])
            for each in self._models.values():
                if each.process is None and now >= each.ready_at and not left:
                    each.wanted = False  # another has its room, until a job asks for it
        await self._answered(self._publish(redis))

    async def _until_woken(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1 if self._loads() else self._sweep_s):
                await self._woken.wait()
            await asyncio.sleep(0.02)  # of a burst of submissions, all that come meanwhile are one
        self._woken.clear()

    def _loads(self) -> bool:
        return any(each.state == "loading" for each in self._models.values())

    def _now(self) -> float:
        return time.time() + self._ahead_s

    # Redis

    async def _answered(self, call: Any) -> None:
        """Await a call of Redis. An outage is logged when it begins and ends; the workers meet it themselves."""
        try:
            async with asyncio.timeout(2.0):
                await call
        except (RedisError, OSError, TimeoutError) as error:
            if self._silent_since is None:
                self._silent_since = time.monotonic()
                reason = reason_of(error) if isinstance(error, RedisError) else None
                logger.warning("waiting for redis: %s", reason or error or "no answer")
        else:
            if self._silent_since is not None:
                logger.warning("redis is back after %.0f s", time.monotonic() - self._silent_since)
                self._silent_since = None

    async def _listen(self, redis: Redis) -> None:
        """Be woken by submissions, until this task is cancelled."""
        by_channel = {keys.wake(name).encode(): each for name, each in self._models.items()}
        while True:
            with suppress(RedisError, OSError):
                async with redis.pubsub() as pubsub:
                    await pubsub.subscribe(*by_channel)
                    async for message in pubsub.listen():
                        if message["type"] == "message":
                            by_channel[message["channel"]].used_at = self._now()
                            self._woken.set()
            await asyncio.sleep(0.5)

    async def _look(self, redis: Redis) -> None:
        """Read the queues, which workers serve, and the commands. First move the jobs under an alias of a model without
        a worker, which would do it."""
        forward = script(redis, "forward")
        for name in (each.planned.name for each in self._models.values() if each.process is None):
            await forward(args=[name, JOB_LIFE_MS, 1])
        commands, now_ms = keys.model_commands(self.id), int(self._now() * 1000)
        async with redis.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.lrange(commands, 0, 99)
            pipe.delete(commands)
            for each in self._models.values():
                pipe.exists(keys.worker(each.worker))
                for queue in each.queues:
                    pipe.zrangebyscore(queue, "-inf", now_ms, start=0, num=32, withscores=True)
                    # A running job may have its lease's end as its score, and one that is put off is due soon.
                    pipe.zcount(queue, "-inf", now_ms + 60_000)
            (seconds, microseconds), asked, _, *found = await pipe.execute(raise_on_error=False)
        read_at = seconds + microseconds / 1e6
        self._ahead_s = read_at - time.time()
        for command in filter(None, map(models.read_command, asked if isinstance(asked, list) else [])):
            self._obey(command)
        for each in self._models.values():
            serves, *queues = found[: 1 + 2 * len(each.queues)]
            del found[: 1 + 2 * len(each.queues)]
            jobs = sum(n for n in queues[1::2] if isinstance(n, int))
            self._note(each, read_at, serves=serves == 1, busy=jobs > 0)
            due = [job for page in queues[::2] if isinstance(page, list) for job in page]
            each.waits_since = await self._oldest_waiting(redis, due) if each.process is None else None

    def _note(self, model: _Model, now: float, *, serves: bool, busy: bool) -> None:
        """Note what the queues said at `now`. A job that is submitted later makes its model the one used last."""
        model.busy = busy
        if busy:
            model.used_at = max(model.used_at, now)
        if model.state == "loading" and serves:
            model.enter("loaded", now)
            model.loaded_at, model.problem = now, ""
            logger.info("%s is loaded", model.planned.name)
            self._published_at = float("-inf")
        if model.state == "loaded" and model.failures and now - model.loaded_at >= 60.0:
            model.failures = 0

    async def _oldest_waiting(self, redis: Redis, due: list[tuple[bytes, float]]) -> float | None:
        """Return since when the oldest of the jobs waits that no worker has, in Unix seconds."""
        if not due:
            return None
        async with redis.pipeline(transaction=False) as pipe:
            for job_id, _ in due:
                pipe.exists(b"arq:in-progress:" + job_id)
            leased = await pipe.execute()
        return min((ms / 1000 for (_, ms), lease in zip(due, leased, strict=True) if not lease), default=None)

    def _obey(self, command: models.Command) -> None:
        model = self._models.get(command["model"])
        if model is None:
            logger.warning("asked to %s %r, which is none of its models", command["do"], command["model"][:80])
        elif command["do"] == "load":
            away = model.process is None or model.state == "unloading"
            model.asked_at = model.asked_at or (self._now() if away else None)
            model.ready_at = 0.0
        else:
            model.asked_at = None
            self._unload(model)

    async def _publish(self, redis: Redis) -> None:
        """Publish the models, when one changes, three times a lease, and during a load four times a second. All but
        those whose process died count as served: their jobs wait for their load alone."""
        if time.monotonic() - self._published_at < (0.25 if self._loads() else _LEASE_S / 3):
            return
        until = self._now() + _LEASE_S + 1
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.models(self.id), mapping={name: each.published() for name, each in self._models.items()})
            pipe.pexpire(keys.models(self.id), int(_LEASE_S * 1000))
            for name, each in self._models.items():
                if each.problem or self._stopping.is_set():
                    pipe.hdel(keys.model(name), self.id)
                    continue
                pipe.hset(keys.model(name), self.id, each.report(until))
                for longer_only in ({"nx": True}, {"gt": True}):
                    pipe.pexpire(keys.model(name), int(_LEASE_S * 1000), **longer_only)
            await pipe.execute()
        self._published_at = time.monotonic()

    async def _withdraw(self, redis: Redis) -> None:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.models(self.id), keys.model_commands(self.id))
            for name in self._models:
                pipe.hdel(keys.model(name), self.id)
            await pipe.execute()

    # Processes

    async def _load(self, model: _Model) -> None:
        """Start the model's worker, which ends with this process, even if that is killed."""
        if self._stopping.is_set():
            return
        model.starts += 1
        model.worker = f"{self.id}-{model.planned.name}" + (f".{model.starts}" if model.starts > 1 else "")
        env = environment_with({**model.planned.env, "SLUICE_WORKER_NAME": model.worker})
        command = [sys.executable, "-m", "sluice.cli", "worker", "--until-stdin-closes"]
        model.asked_at, model.wanted = None, True
        ours, theirs = socket.socketpair()  # closed if this process ends, in whatever way
        lock = self._locks.lock_worker(model.planned.nbytes)
        try:
            # Without its own session Ctrl-C would reach it twice, from the terminal and from here.
            model.process = await asyncio.create_subprocess_exec(
                *command,
                start_new_session=True,
                stdin=theirs.fileno(),
                pass_fds=[] if lock is None else [lock],
                env=env,
            )
        except OSError as error:
            ours.close()
            self._fail(model, f"its process cannot be started: {error.strerror}")
            return
        finally:
            theirs.close()
            if lock is not None:
                os.close(lock)
        model.used_at = self._now()
        model.enter("loading", model.used_at)
        logger.info("loading %s, which may take %s", model.planned.name, format_bytes(model.planned.nbytes))
        for task in (self._follow(model, model.process), _follow_load(model, ours)):
            follower = asyncio.create_task(task)
            self._followers.add(follower)
            follower.add_done_callback(self._followers.discard)
        self._published_at = float("-inf")
        if self._stopping.is_set():  # meanwhile: `_stop` did not have the process yet
            self._unload(model)

    def _unload(self, model: _Model) -> None:
        """Ask the model's worker to end its jobs and leave."""
        model.wanted = False
        if model.process is not None and model.state != "unloading":
            logger.info("unloading %s", model.planned.name)
            model.enter("unloading", self._now())
            _signal(model.process, signal.SIGTERM)
            self._published_at = float("-inf")

    async def _follow(self, model: _Model, process: asyncio.subprocess.Process) -> None:
        """Wait until the worker has ended, and note what follows."""
        code = await process.wait()
        asked = model.state == "unloading"
        model.process, model.worker = None, ""
        model.enter("unloaded", self._now())
        if self._stopping.is_set() and code not in (0, -signal.SIGTERM, -signal.SIGINT):
            self._worst = max(self._worst, code if code > 0 else 1)
        if asked or code == 0:
            model.wanted, model.problem = False, ""
            logger.info("%s is unloaded", model.planned.name)
        else:
            self._fail(model, f"its worker ended with exit code {code}")
        self._published_at = float("-inf")
        self._woken.set()

    def _fail(self, model: _Model, problem: str) -> None:
        model.failures, model.problem = model.failures + 1, problem
        delay_s = min(60.0, 2.0 ** (model.failures - 1))
        model.ready_at = self._now() + delay_s
        logger.error("%s: %s; it is started again in %.0f s", model.planned.name, problem, delay_s)

    def _stop(self, number: signal.Signals) -> None:
        """Let the workers end their jobs and leave; called again, end those jobs early, as in a worker."""
        if not self._stopping.is_set():
            logger.info("%s: stopping", signal.Signals(number).name)
        self._stopping.set()
        for each in self._models.values():
            if each.process is not None:
                if each.state != "unloading":
                    each.enter("unloading", self._now())
                _signal(each.process, number)
        self._published_at = float("-inf")
        self._woken.set()

    def _hang_up(self, on_terminal: bool) -> None:
        """Have the workers restart; or stop, if SIGHUP says that the terminal was closed."""
        if on_terminal and not any(map(os.isatty, range(3))):
            return self._stop(signal.SIGTERM)
        for each in self._models.values():
            if each.process is not None and each.state == "loaded":
                _signal(each.process, signal.SIGHUP)
        return None


async def _follow_load(model: _Model, worker: socket.socket) -> None:
    """Note how many bytes of the weights the model's worker has loaded, as it tells, until it ends."""
    reader, writer = await asyncio.open_connection(sock=worker)
    with closing(writer), suppress(OSError):
        while line := await reader.readline():
            if model.state == "loading":
                model.loaded_bytes = min(int(line), model.planned.weights)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(number)


def run_supervisor(plan: Plan) -> int:
    """Serve the models of a plan until the supervisor is stopped, and return the exit code. Blocks."""
    set_up_logging("sluice", plan.log_level, plan.log_format)
    return asyncio.run(_supervise(plan))


async def _supervise(plan: Plan) -> int:
    return await Supervisor(plan).run()
