import asyncio
import signal
import socket
import subprocess
import sys
from typing import Any

from worker.supervisor.decision import Plan, PlannedModel
from worker.supervisor.supervisor import Supervisor, _Model


def supervisor(*names: str) -> Supervisor:
    models = tuple(PlannedModel(name, "path", 10, 5) for name in names)
    return Supervisor(Plan("redis://127.0.0.1:1/0", "INFO", "text", 20, models))


def test_a_job_that_was_requeued_when_its_model_left_waits_behind_those_that_it_left_for() -> None:
    model = _Model(PlannedModel("a", "path", 10, 5), since=100.0, waits_since=50.0)
    assert model.situation().waits_since == 100.0
    model.waits_since = 120.0
    assert model.situation().waits_since == 120.0
    model.asked_at = 110.0
    assert model.situation().waits_since == 110.0
    model.waits_since = model.asked_at = None
    assert model.situation().waits_since is None


async def test_a_signal_while_processes_are_started_ends_the_one_and_starts_no_other() -> None:
    running = supervisor("a", "b")
    a, b = running._models.values()
    starting = asyncio.create_task(running._load(a))
    await asyncio.sleep(0)
    assert (starting.done(), a.process) == (False, None)
    running._stop(signal.SIGTERM)
    await starting
    process, followers = a.process, [*running._followers]
    assert process is not None
    try:
        async with asyncio.timeout(10):
            await asyncio.gather(*followers)
        await running._load(b)
        assert (a.process, b.process, running._worst) == (None, None, 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_worker_ends_with_its_supervisor_though_that_has_not_read_what_it_told() -> None:
    code = (
        "import time; from sluice.cli import options; from worker.cli import worker; worker._tell_loaded()(5); "
        "options.stop_when_stdin_closes(); time.sleep(60)"
    )
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen([sys.executable, "-c", code], stdin=theirs) as process:
        theirs.close()
        ours.recv(2, socket.MSG_PEEK | socket.MSG_WAITALL)
        ours.close()
        assert process.wait(30) == -signal.SIGTERM


async def ended(running: Supervisor, model: _Model, code: str) -> None:
    """Let the model's worker be a process that ends with a code, once it has ended."""
    model.process = await asyncio.create_subprocess_exec("sh", "-c", code)
    await running._follow(model, model.process)


async def test_a_worker_that_is_drained_counts_as_unloaded_and_one_that_dies_has_a_problem() -> None:
    running = supervisor("a", "b")
    a, b = running._models.values()
    await ended(running, a, "exit 0")
    await ended(running, b, "exit 3")
    assert [(each.state, each.wanted, each.problem) for each in (a, b)] == [
        ("unloaded", False, ""),
        ("unloaded", True, "its worker ended with exit code 3"),
    ]


async def test_a_supervisor_ends_with_the_highest_exit_code_of_the_workers_that_it_stopped() -> None:
    running = supervisor("a")
    (a,) = running._models.values()
    await ended(running, a, "exit 5")  # by itself
    running._stop(signal.SIGTERM)
    for code, worst in (("exit 0", 0), ("kill -TERM $$", 0), ("kill -KILL $$", 1), ("exit 5", 5), ("exit 4", 5)):
        await ended(running, a, code)
        assert running._worst == worst


def test_a_model_that_is_asked_for_while_it_leaves_is_loaded_again() -> None:
    leaving: Any = object()  # its process
    asked = supervisor("a")
    (model,) = asked._models.values()
    model.process, model.state = leaving, "unloading"
    asked._obey({"do": "load", "model": "a"})
    model.process, model.state = None, "unloaded"
    assert model.situation().waits_since is not None
    model.process, model.state, model.asked_at = leaving, "loading", None
    asked._obey({"do": "load", "model": "a"})
    assert model.situation().waits_since is None
