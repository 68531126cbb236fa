"""A prompt that is active but cannot be computed now: until it is ready it is not planned, and delays nothing."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.engine.driver import Run
from tests.engine.prefill.test_queue import ROOM, Running, begin, prefills
from tests.engine.test_thread import tiny_chat
from tests.engine.tiny import alone, model, network, prompt
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.options import EngineOptions
from worker.engine.prefill.spans import ComputeSpans
from worker.engine.prefill.stage import Phase, Stage, StageProgress
from worker.engine.prefill.task import PromptTask
from worker.engine.step.cost import PromptChunk
from worker.engine.thread import EngineThread
from worker.outcomes import Outcome, PromptProgress, Sampled
from worker.request import GenerationRequest

PROMPT, ANSWER = prompt(30, 1), 8


class Arrival(Stage):
    """Waits until `arrive` is called on any thread. No step budget knows its phase."""

    phase = cast(Phase, "arriving")
    before_prefix = True
    ready = False
    total = 1

    def __init__(self) -> None:
        self._arrived = threading.Event()

    def arrive(self) -> None:
        self._arrived.set()

    @property
    def remaining(self) -> int:
        return int(self.needed)

    @property
    def needed(self) -> bool:
        return not self._arrived.is_set()

    @property
    def report(self) -> PromptProgress:
        raise AssertionError("it has no progress")

    def advance(self, tokens: int) -> StageProgress:
        raise AssertionError("a stage that is not ready is never advanced")


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> dict[str, Arrival]:
    """Make the prompts with an id that begins with `late` wait before anything else. Returns their stages by id."""
    made = dict[str, Arrival]()

    def task_of(row: Row, spans: ComputeSpans, *, first: Sequence[Stage] = (), **rest: Any) -> PromptTask:
        if row.id.startswith("late"):
            first = [made.setdefault(row.id, Arrival()), *first]
        return PromptTask(row, spans, first=first, **rest)

    monkeypatch.setattr("worker.engine.prefill.queue.PromptTask", task_of)
    return made


def expected(tokens: tuple[int, ...] = PROMPT) -> list[int]:
    return alone(network("qwen3"), tokens, ANSWER)


def test_prompt_that_is_not_ready_is_neither_planned_nor_computed(arrivals: dict[str, Arrival]) -> None:
    made = prefills()
    begin(made, "late", 100)
    made.begin_step(0.0)
    assert (made.has_work, made.plan(Running(), 0.0, ROOM)) == (False, [])
    advanced = made.advance(PromptChunk("late", 100, joins=True))
    assert (advanced.tokens, advanced.outcomes, made.pop_computed("late")) == (0, (), None)
    arrivals["late"].arrive()
    assert made.has_work
    assert made.advance(PromptChunk("late", 100, joins=True)).tokens == 100


def test_engine_needs_no_step_while_all_active_prompts_wait(arrivals: dict[str, Arrival]) -> None:
    run = Run(model("qwen3"), rows=1)
    run.add("late", PROMPT, max_tokens=ANSWER)
    run.add("next", PROMPT, max_tokens=ANSWER)
    run.until(lambda: not run.engine.needs_step, max_steps=10)
    assert (run.active, run.waiting) == (["late"], ["next"])
    arrivals["late"].arrive()
    assert run.engine.needs_step
    assert run.drain() == {"late": expected(), "next": expected()}


def test_row_that_is_removed_while_its_prompt_waits_frees_its_memory(arrivals: dict[str, Arrival]) -> None:
    run = Run(model("qwen3"))
    run.add("late", PROMPT)
    run.until(lambda: not run.engine.needs_step, max_steps=10)
    run.engine.remove("late")
    assert run.engine.needs_step
    reserved, _ = run.step().reserved or (None, None)
    assert (reserved, len(run.engine), run.engine.needs_step) == (0, 0, False)


def test_decoding_rows_go_on_without_being_waited_for(
    arrivals: dict[str, Arrival], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waits = Run(model("qwen3")), list[int]()
    run.add("runs", PROMPT, max_tokens=ANSWER)
    run.until(lambda: bool(run.generated["runs"]))
    monkeypatch.setattr(Groups, "wait", lambda self: waits.append(run.steps))
    run.add("late", PROMPT, max_tokens=ANSWER)
    run.until(lambda: "runs" in run.ended)
    assert (run.active, run.chunks["late"], waits) == (["late"], 0, [])
    monkeypatch.undo()
    arrivals["late"].arrive()
    assert run.drain() == {"runs": expected(), "late": expected()}


async def test_engine_thread_sleeps_until_it_is_woken(arrivals: dict[str, Arrival]) -> None:
    sampled, ended = list[int | None](), asyncio.Event()

    def on_outcome(outcome: Outcome, rows: int) -> None:
        if isinstance(outcome, Sampled):
            sampled.append(outcome.token)
            if outcome.finish_reason:
                ended.set()

    engine = EngineThread(tiny_chat, EngineOptions(0.1), on_failure=ended.set)
    await engine.start()
    engine.submit(GenerationRequest("late", PROMPT, ANSWER), on_outcome)
    async with asyncio.timeout(30):
        while "late" not in arrivals or engine.heartbeat.stalled_s():
            await asyncio.sleep(0.001)

        def arrive() -> None:
            arrivals["late"].arrive()
            engine.wake()

        await asyncio.to_thread(arrive)
        await ended.wait()
    await engine.stop()
    assert sampled
