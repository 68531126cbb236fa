import asyncio
import signal
from typing import Any

from worker.supervisor.planned import Plan, PlannedModel
from worker.supervisor.supervisor import Supervisor, _Model


def supervisor(*names: str) -> Supervisor:
    models = tuple(PlannedModel(name, "path", 10, 5) for name in names)
    return Supervisor(Plan("redis://127.0.0.1:1/0", "info", 20, models))


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
