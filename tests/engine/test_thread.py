"""The engine thread's interface to the event loop."""

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import pytest

from tests.engine.tiny import prompt
from tests.selection import examples
from tests.support.stack import ROOT, TINY_CHAT
from worker.engine.model.load import Model, open_model
from worker.engine.options import EngineOptions
from worker.engine.step.tuning import CLASSES
from worker.engine.thread import EngineThread
from worker.errors import CannotStart
from worker.host.courtesy import Throttle
from worker.outcomes import Outcome, Sampled, StepReport
from worker.request import GenerationRequest, Sampling


@dataclass
class Recorder:
    said: list[int | None] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def on_outcome(self, outcome: Outcome, rows: int) -> None:
        if isinstance(outcome, Sampled):
            self.said.append(outcome.token)
            if outcome.finish_reason:
                self.ended.set()


def tiny_chat() -> Model:
    return open_model(str(TINY_CHAT))


def unreached() -> None:
    raise AssertionError("the engine thread died")


async def test_start_raises_the_error_of_loading() -> None:
    engine = EngineThread(lambda: open_model("./nothing"), EngineOptions(0.1), on_failure=unreached)
    with pytest.raises(CannotStart, match="no such folder"):
        await engine.start()
    await engine.stop()


async def test_a_start_that_is_cancelled_while_the_model_loads_ends_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def load() -> Model:
        begun.set()
        go_on.wait()
        return tiny_chat()

    engine = EngineThread(load, EngineOptions(0.1), on_failure=unreached)
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(begun.wait)
    starting.cancel()
    await asyncio.wait([starting])
    go_on.set()
    await engine.stop()
    await asyncio.sleep(0)  # the last messages of the thread are delivered
    assert starting.cancelled()
    assert caplog.records == []


async def test_listener_receives_outcomes_until_its_request_is_removed() -> None:
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached)
    await engine.start()
    no_end = Sampling(logit_bias=((2, -100.0),))
    stays, keeps_running = Recorder(), Recorder()
    engine.submit(GenerationRequest("stays", prompt(5, 1), 300, no_end), stays.on_outcome)
    engine.submit(GenerationRequest("goes", prompt(5, 2), 10_000, no_end), keeps_running.on_outcome)
    while len(keeps_running.said) < 3:
        await asyncio.sleep(0.001)
    engine.remove("goes")
    heard = len(keeps_running.said)
    await asyncio.wait_for(stays.ended.wait(), 30)
    assert len(keeps_running.said) == heard
    assert len(stays.said) == 300
    await engine.stop()


@pytest.mark.parametrize("removed", [False, True], ids=["ended", "removed"])
async def test_no_memory_is_reported_as_reserved_after_the_last_request(removed: bool) -> None:
    reports, recorder = list[StepReport](), Recorder()
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached, on_step=reports.append)
    await engine.start()
    no_end = Sampling(logit_bias=((2, -100.0),))
    engine.submit(GenerationRequest("a", prompt(5, 1), 10_000 if removed else 10, no_end), recorder.on_outcome)
    while len(recorder.said) < 3:
        await asyncio.sleep(0.001)
    assert any(used for used, _ in reserved(reports))
    if removed:
        engine.remove("a")
    async with asyncio.timeout(10):
        while reserved(reports)[-1][0]:
            await asyncio.sleep(0.001)
    await engine.stop()
    assert reserved(reports)[-1][0] == 0, "no later report counts it again"


def reserved(reports: list[StepReport]) -> list[tuple[int, int]]:
    return [report.reserved for report in reports if report.reserved]


async def test_the_seconds_of_a_decode_step_are_known_once_steps_were_measured() -> None:
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached)
    await engine.start()
    assert not any(engine.step_times())
    recorder = Recorder()
    engine.submit(GenerationRequest("a", prompt(5, 1), 30, Sampling(logit_bias=((2, -100.0),))), recorder.on_outcome)
    await asyncio.wait_for(recorder.ended.wait(), 30)
    assert [0 < seconds < 1 for seconds in engine.step_times()] == [True, *[False] * (CLASSES - 1)]
    await engine.stop()


async def test_paused_engine_makes_no_token_and_then_continues() -> None:
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached)
    await engine.start()
    recorder = Recorder()
    engine.submit(
        GenerationRequest("a", prompt(5, 1), 10_000, Sampling(logit_bias=((2, -100.0),))), recorder.on_outcome
    )
    while len(recorder.said) < 3:
        await asyncio.sleep(0.001)
    engine.set_paused(True)
    async with asyncio.timeout(30):
        while engine.heartbeat.stalled_s():  # it is in a step
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    said = len(recorder.said)
    await asyncio.sleep(0.2)
    assert len(recorder.said) == said < 10_000
    assert engine.heartbeat.stalled_s() == 0, "a paused engine is at rest, not hung"
    engine.set_paused(False)
    async with asyncio.timeout(30):
        while len(recorder.said) < said + 10:
            await asyncio.sleep(0.001)
    engine.remove("a")
    await engine.stop()


@pytest.mark.timing
async def test_the_engine_rests_after_its_steps_and_not_while_a_reader_waits() -> None:
    reports, offline, reader = list[StepReport](), Recorder(), Recorder()
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached, on_step=reports.append)
    await engine.start()
    engine.set_throttle(Throttle(1.0, 0.25))
    no_end, began = Sampling(logit_bias=((2, -100.0),)), time.monotonic()
    engine.submit(GenerationRequest("a", prompt(5, 1), 60, no_end, "batch"), offline.on_outcome)
    await asyncio.wait_for(offline.ended.wait(), 60)
    computed_s, took_s = sum(report.seconds for report in reports), time.monotonic() - began
    assert 0.1 * took_s < computed_s < 0.3 * took_s
    engine.set_throttle(Throttle(1.0, 0.0001))
    engine.submit(GenerationRequest("b", prompt(5, 2), 60, no_end, "batch"), Recorder().on_outcome)
    await asyncio.sleep(0.2)  # it has computed a step, and rests for a minute
    engine.submit(GenerationRequest("c", prompt(5, 3), 20, no_end), reader.on_outcome)
    await asyncio.wait_for(reader.ended.wait(), 20)
    await engine.stop()


async def test_the_memory_of_the_last_row_is_released_after_the_rest() -> None:
    reports, offline = list[StepReport](), Recorder()
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached, on_step=reports.append)
    await engine.start()
    engine.set_throttle(Throttle(1.0, 0.1))
    engine.submit(GenerationRequest("a", prompt(5, 1), 3, lane="batch"), offline.on_outcome)
    await asyncio.wait_for(offline.ended.wait(), 60)
    engine.remove("a")
    async with asyncio.timeout(30):
        while not (reserved := reports[-1].reserved) or reserved[0]:
            await asyncio.sleep(0.01)
    await engine.stop()


async def test_engine_that_raises_reports_failure_to_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    died = asyncio.Event()
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=died.set)
    await engine.start()
    monkeypatch.setattr("worker.engine.engine.Engine.step", lambda self: 1 / 0)
    engine.submit(GenerationRequest("a", prompt(5, 1), 5), Recorder().on_outcome)
    await asyncio.wait_for(died.wait(), 10)
    await engine.stop()


EXITS = """
import asyncio
from tests.support.stack import TINY_CHAT
from tests.engine.test_thread import Recorder, tiny_chat, unreached
from tests.engine.tiny import prompt
from worker.engine.options import EngineOptions
from worker.engine.thread import EngineThread
from worker.request import GenerationRequest

async def main():
    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=unreached)
    await engine.start()
    engine.submit(GenerationRequest("a", prompt(5, 1), 5000), Recorder().on_outcome)
    await asyncio.sleep(0.2)
    await engine.stop()

asyncio.run(main())
"""


def test_process_with_a_busy_engine_exits_cleanly() -> None:
    for _ in range(examples(3)):
        subprocess.run([sys.executable, "-c", EXITS], check=True, cwd=ROOT)
