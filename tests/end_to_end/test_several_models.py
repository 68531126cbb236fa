"""Several models on one machine: one supervisor, a process for each loaded model, one memory budget."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import redis

from sluice import Client
from sluice.contract import keys
from sluice.contract.events import Progress
from sluice.contract.models import Model, read_model
from tests.end_to_end.test_cli import run_here
from tests.end_to_end.test_up import ENV, running
from tests.support.chaos.outages import DURABLE
from tests.support.embedding import write_checkpoint
from tests.support.stack import TINY_CHAT, LoggingProcess, Server, free_port
from tests.waiting import until as until_within

BUDGET_GB = 0.15  # for two of the tiny model, which needs 57 MB for a row of 8192 tokens
COUNT = [{"role": "user", "content": "Count to 3."}]
ENDLESS = {"messages": [{"role": "user", "content": "Count to 40."}], "max_tokens": 20_000, "logit_bias": {"2": -100}}


until = partial(until_within, within_s=90)  # a load is an import of mlx, on a busy machine


class Supervisor(LoggingProcess):
    """`sluice worker` with models of these names, all of them the tiny one, in a folder without `.env`."""

    def __init__(self, redis_url: str, names: str = "abc", *, models: dict[str, Path] | None = None, **settings: Any):
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-several-")
        super().__init__(Path(self._folder.name) / "log.txt")
        paths = models or dict.fromkeys(names, TINY_CHAT)
        self._options = [part for name, path in paths.items() for part in ("--model", f"{name}={path}")]
        given = {"memory_gb": BUDGET_GB, "memory_headroom_gb": 0, "redis_url": redis_url, **settings}
        self._env = {**ENV, **{f"SLUICE_{key.upper()}": str(value) for key, value in given.items()}}
        self._db = redis.Redis.from_url(redis_url)

    def start(self) -> Self:
        with self.log_file.open("ab") as log:
            command = [sys.executable, "-m", "sluice.cli", "worker", *self._options]
            self.process = subprocess.Popen(
                command, env=self._env, cwd=self._folder.name, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def stop(self) -> None:
        assert self.process is not None
        for _ in range(2):
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                continue
        self.process.kill()
        self.process.wait()
        self._db.close()
        self._folder.cleanup()

    @property
    def id(self) -> str:
        return f"{os.uname().nodename}-{self.pid}"

    def models(self) -> dict[str, Model]:
        found = {name.decode(): read_model(value) for name, value in self._db.hgetall(keys.models(self.id)).items()}
        return {name: model for name, model in found.items() if model is not None}

    def states(self) -> str:
        return " ".join(model["state"] for _, model in sorted(self.models().items()))

    def worker_pids(self) -> dict[str, int]:
        """Return the process of each model that has one."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return {}  # it was killed just now
        return {name: int(pid) for pid in children if (name := _model_of(pid))}

    def loads(self) -> int:
        return self.log().count("sluice.supervisor: loading ")

    def ask(self, do: str, model: str) -> None:
        self._db.rpush(keys.model_commands(self.id), json.dumps({"do": do, "model": model}))


def _model_of(pid: str) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""  # it has just ended
    names = [each.partition(b"=")[2].decode() for each in variables if each.startswith(b"SLUICE_MODEL_NAME=")]
    return names[0] if names else ""


@asynccontextmanager
async def never_more_than(processes: int, supervisor: Callable[[], Supervisor]) -> AsyncIterator[None]:
    """Check all the time that no more models have a process, those of earlier supervisors included."""
    most, seen = 0, set[int]()

    async def watch() -> None:
        nonlocal most, seen
        while True:
            seen = {pid for pid in seen | {*supervisor().worker_pids().values()} if _runs(pid)}
            most = max(most, len(seen))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    yield
    assert not task.done() or task.exception()
    task.cancel()
    assert most == processes


async def answer(client: Client, model: str) -> str:
    job = await client.submit(COUNT, model=model)
    result = await client.result(job.id)
    content: str = result["choices"][0]["message"]["content"]
    return content


async def test_the_least_recently_used_model_leaves_and_each_is_loaded_once_a_need(
    redis_url: str, client: Client
) -> None:
    with Supervisor(redis_url) as supervisor:
        await until(lambda: supervisor.states() == "loaded loaded unloaded")
        in_memory, loads = ["a", "b"], 2
        async with never_more_than(2, lambda: supervisor):
            for model in "acab":
                assert await answer(client, model) == "1 2 3"
                loads += model not in in_memory
                in_memory = [*(each for each in in_memory if each != model), model][-2:]
        assert supervisor.loads() == loads
        assert set(supervisor.worker_pids()) == set(in_memory)
        assert all(model["bytes"] == 75_000_000 for model in supervisor.models().values())
        supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0, supervisor.log()
        assert "Traceback" not in supervisor.log()
        assert not supervisor.models()


async def test_an_idle_model_has_no_process_until_a_job_comes_and_counts_as_served(
    redis_url: str, client: Client
) -> None:
    with Supervisor(redis_url, "a", models={"a": TINY_CHAT, "b": TINY_CHAT}, idle_unload_s=1) as supervisor:
        await until(lambda: supervisor.states() == "unloaded unloaded")
        assert supervisor.worker_pids() == {}
        assert _resident_bytes(supervisor.pid) <= 65_000_000
        job = await client.submit(COUNT, model="b", wait_worker_s=0)  # `NoWorker` if it counted as none
        result = await client.result(job.id)
        assert result["choices"][0]["message"]["content"] == "1 2 3"
        timings = result["sluice"]["timings"]
        assert timings["queue_s"] / 2 < timings["load_s"] <= timings["queue_s"]
        again = await client.submit(COUNT, model="b")
        assert "load_s" not in (await client.result(again.id))["sluice"]["timings"]
        assert set(supervisor.worker_pids()) == {"b"}
        supervisor.ask("load", "a")
        await until(lambda: supervisor.models()["a"]["state"] == "loaded")
        supervisor.ask("load", "none")
        supervisor.ask("unload", "a")
        await until(lambda: "a" not in supervisor.worker_pids())


def slow_model(folder: Path, *, part_s: float = 0.0, step_s: float = 0.0) -> Path:
    """Write the tiny model with code of its own: each of some fifty parts of its weights, and each step, takes longer
    by so much."""
    shutil.copytree(TINY_CHAT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "slow.py"}))
    (folder / "slow.py").write_text(
        "import time\n"
        "from mlx_lm.models import qwen3_5\n"
        "from mlx_lm.models.qwen3_5 import Model, ModelArgs\n"
        "from worker.engine.model import load\n"
        "at_once = load.load_weights\n"
        f"slowly = lambda network, told: at_once(network, lambda part: (time.sleep({part_s}), told and told(part)))\n"
        "load.load_weights = slowly\n"
        "step = qwen3_5.Qwen3_5TextModel.__call__\n"
        f"slow_step = lambda *given, **named: (time.sleep({step_s}), step(*given, **named))[1]\n"
        "qwen3_5.Qwen3_5TextModel.__call__ = slow_step\n"
    )
    return folder


async def test_the_reader_of_a_job_is_told_how_much_of_its_model_is_loaded(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    models = {"a": TINY_CHAT, "slow": slow_model(tmp_path / "slow", part_s=0.1)}
    with Supervisor(redis_url, models=models, trust_model_code="true") as supervisor:
        await until(lambda: supervisor.states().endswith("loading"))
        job = await client.submit(COUNT, model="slow")
        events = [event async for event in client.stream(job.id)]
        loads = [event for event in events if isinstance(event, Progress) and event.phase == "loading"]
        weights = supervisor.models()["slow"]["weights"]
        assert weights > 1_000_000
        assert {each.total for each in loads} == {weights}
        assert len(loads) >= 3
        assert [each.done for each in loads] == sorted({each.done for each in loads})
        assert 0 < loads[-1].done <= weights
        assert events[len(loads)].type == "started"
        await until(lambda: supervisor.models()["slow"]["loaded_bytes"] == 0)  # the supervisor tells it a moment later


@pytest.mark.slow  # the first of two does so above
async def test_a_single_model_leaves_when_it_is_idle_and_returns_for_a_job(redis_url: str, client: Client) -> None:
    with Supervisor(redis_url, "a", idle_unload_s=1, worker_name="mine") as supervisor:
        await until(lambda: supervisor.states() == "unloaded")
        assert supervisor.worker_pids() == {}
        assert await answer(client, "a") == "1 2 3"
        assert supervisor.models()["a"]["bytes"] == 1_000_000_000 * BUDGET_GB
        supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0, supervisor.log()


def test_a_worker_without_a_supervisor_refuses_to_unload_its_model(tmp_path: Path) -> None:
    env = {**ENV, "SLUICE_MODEL": str(TINY_CHAT), "SLUICE_IDLE_UNLOAD_S": "9"}
    done = subprocess.run(
        [sys.executable, "-m", "worker"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("sluice worker: SLUICE_IDLE_UNLOAD_S: python -m worker holds its model")


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_a_dead_worker_comes_back_with_a_growing_delay_while_others_serve(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in TINY_CHAT.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    with Supervisor(redis_url, models={"a": TINY_CHAT, "b": bad}, lease_s=1) as supervisor:
        await until(lambda: supervisor.states() == "loaded loaded")
        (bad / "config.json").write_text("{}")
        other, running_pid = supervisor.worker_pids()["b"], supervisor.worker_pids()["a"]
        os.kill(other, signal.SIGKILL)
        await until(lambda: "b: its worker ended with exit code -9; it is started again in 1 s" in supervisor.log())
        assert await answer(client, "a") == "1 2 3"
        waiting = await client.submit(COUNT, model="b")
        await until(lambda: "b: its worker ended with exit code 2; it is started again in 2 s" in supervisor.log())
        await until(lambda: supervisor.models()["b"]["problem"] == "its worker ended with exit code 2")
        (bad / "config.json").write_bytes((TINY_CHAT / "config.json").read_bytes())
        assert (await client.result(waiting.id))["choices"][0]["message"]["content"] == "1 2 3"
        await until(lambda: supervisor.models()["b"]["problem"] == "")
        assert supervisor.worker_pids()["a"] == running_pid


async def test_a_supervisor_that_is_killed_takes_its_workers_along(redis_url: str) -> None:
    with Supervisor(redis_url, "ab") as supervisor:
        await until(lambda: supervisor.states() == "loaded loaded")
        pids = list(supervisor.worker_pids().values())
        supervisor.kill()
        await until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
async def test_a_model_with_a_running_job_makes_room_for_a_job_that_waits_and_its_own_goes_on(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    models = {"a": slow_model(tmp_path / "slow", step_s=0.15), "b": TINY_CHAT}
    settings = {"memory_gb": 0.1, "grace_s": 0, "trust_model_code": "true"}
    with Supervisor(redis_url, models=models, **settings) as supervisor:
        await until(lambda: supervisor.states() == "loaded unloaded")
        long = await client.submit({**ENDLESS, "max_tokens": 2_000}, model="a")  # some 400 steps
        await until(lambda: "first token" in supervisor.log())
        assert await answer(client, "b") == "1 2 3"
        events = [event.type async for event in client.stream(long.id)]
        assert ("resumed" in events, events[-1]) == (True, "finished")


@pytest.mark.slow
async def test_a_chat_model_and_an_embedding_model_are_loaded_for_their_jobs(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    models = {"a": TINY_CHAT, "e": write_checkpoint("bert", tmp_path / "sentences")}
    with Supervisor(redis_url, models=models, idle_unload_s=1) as supervisor:
        await until(lambda: supervisor.states() == "unloaded unloaded")
        assert [len(vector) for vector in await client.embed(["Hello!", "a"], model="e")] == [64, 64]
        assert await answer(client, "a") == "1 2 3"
        supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0, supervisor.log()
        assert "Traceback" not in supervisor.log()


@pytest.mark.slow  # tests/supervisor/test_locks.py counts the workers of one that was killed
async def test_a_supervisor_that_is_killed_and_started_at_once_waits_for_the_memory_of_its_old_workers(
    redis_url: str,
) -> None:
    with Supervisor(redis_url, "ab") as supervisor:
        await until(lambda: supervisor.states() == "loaded loaded")
        old = supervisor.worker_pids()
        os.kill(old["b"], signal.SIGSTOP)  # as one that ends its jobs
        try:
            async with never_more_than(2, lambda: supervisor):
                supervisor.kill()
                supervisor.start()
                await until(lambda: supervisor.states() == "loaded unloaded")
                assert (_runs(old["a"]), _runs(old["b"])) == (False, True)
                os.kill(old["b"], signal.SIGKILL)
                await until(lambda: supervisor.states() == "loaded loaded")
        finally:
            with suppress(ProcessLookupError):
                os.kill(old["b"], signal.SIGKILL)


@pytest.mark.slow  # tests/end_to_end/test_up.py has one model, and the tests above have several
def test_up_with_two_models_serves_both(tmp_path: Path) -> None:
    second = f"small={TINY_CHAT}"
    with running(tmp_path, "--model", second, "--http-port", str(free_port())) as up:
        up.until_said("ready.")
        assert " chat --model " in up.said()
        for model in ("tiny-chat", "small"):
            env = {**ENV, "SLUICE_REDIS_URL": up.url}
            code, out, said = run_here("chat", "--model", model, "Count to 3.", env=env, folder=tmp_path)
            assert (code, "1 2 3" in out) == (0, True), said
        assert up.end() == 0, up.said()
        assert "Traceback" not in up.said()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "a=x", "--model", "a=y"], "two models are called 'a'"),
        (["--model", "a=x", "--model", "b c"], "--model b c: 'b c' cannot be its name; write one before it: NAME=b c"),
        (["--model", "a", "--model", "b", "--name", "c"], "--name: there are several models; write each name before"),
        (["--model", "a=x", "--name", "b"], "--name b: --model names it 'a' already"),
        (["--config", "none.toml"], "--config none.toml: No such file or directory; give a file that can be read."),
        (["--config", "bad.toml"], "--config bad.toml: it is not TOML: "),
        (["--config", "dates.toml"], "--config dates.toml: a value is a date"),
        (["--config", "empty.toml"], "--config empty.toml: there is no [[model]]"),
        (["--config", "bad.toml", "--model", "a"], "--config: it names the models; leave out --model and --name."),
    ],
)
def test_what_cannot_be_supervised_is_refused_with_a_sentence(tmp_path: Path, args: list[str], said: str) -> None:
    (tmp_path / "bad.toml").write_text("[[model]\n")
    (tmp_path / "dates.toml").write_text("max_rows = 2026-01-01\n[[model]]\nname = 'a'\npath = 'x'\n")
    (tmp_path / "empty.toml").write_text("max_rows = 2\n")
    code, _, err = run_here("worker", *args, env=ENV, folder=tmp_path)
    assert (code, "Traceback" in err, err.startswith(f"sluice: {said}")) == (2, False, True), err


@pytest.mark.slow
async def test_200_jobs_over_three_models_with_kills_of_any_part_lose_nothing() -> None:
    dice = random.Random(39)

    async def kill(part: str) -> None:
        match part:
            case "worker":
                if pids := [*supervisor.worker_pids().values()]:
                    os.kill(dice.choice(pids), signal.SIGKILL)
            case "supervisor":
                supervisor.kill()
                supervisor.start()
            case "server":
                server.kill()
                await asyncio.sleep(0.5)
                await asyncio.to_thread(server.start)

    with Server(args=DURABLE) as server, Supervisor(server.url, lease_s=1, grace_s=1) as supervisor:
        await until(lambda: supervisor.states() == "loaded loaded unloaded")
        parts = [*["worker"] * 4, *["supervisor"] * 3, *["server"] * 3]
        dice.shuffle(parts)
        jobs, killing = list[str](), asyncio.create_task(asyncio.sleep(0))
        async with Client(server.url) as client, never_more_than(2, lambda: supervisor):
            for number in range(200):
                jobs.append((await client.submit(COUNT, model=dice.choice("abc"))).id)
                await asyncio.sleep(dice.choice([0.0, 0.05, 0.3]))
                if number % 20 == 10:
                    await killing
                    killing = asyncio.create_task(kill(parts.pop()))
            await killing
            results = await asyncio.gather(*map(client.result, jobs))
        assert [each["choices"][0]["message"]["content"] for each in results] == ["1 2 3"] * 200
        print(f"{supervisor.loads()} loads, {supervisor.log().count('together')} supervisors")
