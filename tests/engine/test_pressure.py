"""A machine that is short of memory again and again gets it back from the engine, and no answer changes for it."""

import random

import pytest

from sluice.contract.keys import Lane
from tests.engine.driver import Run
from tests.engine.tiny import alone, model, prompt
from tests.host.simulated import SimulatedHost
from worker.host.courtesy import Courtesy, Pressure, Reclaim, Throttle
from worker.outcomes import StepReport

FAMILIES = ["llama", "qwen3_5", "gpt_oss", "falcon_h1"]  # keys of all tokens, recurrent state, windows, both
ANSWER = 12  # tokens
ROWS = 4  # that fit into memory


class Pressed:
    """An engine under load, on a simulated machine."""

    def __init__(self, family: str, seed: int) -> None:
        self.model, self.random = model(family), random.Random(seed)
        self.memory = self.model.costs.peak_bytes([[80] * ROWS])
        self.run = Run(self.model, memory=self.memory, prefix_bytes=200_000)
        self.host, self.courtesy = SimulatedHost(), Courtesy("auto")
        self.asked: dict[str, int] = {}  # seeds of prompts
        self.level, self.now = Reclaim.NOTHING, 0.0
        self.preempted = 0

    def submit(self) -> None:
        lane: Lane = self.random.choice(["interactive", "batch"])
        id, seed = f"{lane}-{len(self.asked)}", self.random.randrange(8)
        self.asked[id] = seed
        self.run.add(id, prompt(30 + seed, seed), max_tokens=ANSWER, lane=lane)

    def step(self, seconds: float = 1.0) -> StepReport:
        """Run a step, after a look at the machine. `seconds`: since the last one."""
        self.now += seconds
        throttle = self.courtesy.decide(self.host.read(), self.now)
        if throttle.reclaim != self.level:
            self.level = throttle.reclaim
            self.run.engine.set_throttle(throttle)
        report = self.run.step()
        self.preempted += report.num_preemptions
        reserved, available = report.reserved or (0, 0)
        assert reserved + self.run.held_bytes <= available
        if self.level >= Reclaim.CACHES:
            assert report.prefix.nbytes == 0
        if self.level >= Reclaim.OFFLINE_ROWS:
            assert [id for id in self.run.active if id.startswith("batch")] == []
            assert self.run.held_bytes == 0
        return report

    def check(self) -> None:
        """Check that each request has ended with the answer that it has alone."""
        expected = {id: alone(self.model.network, prompt(30 + seed, seed), ANSWER) for id, seed in self.asked.items()}
        assert self.run.generated == expected
        assert {*self.run.ended} == {*self.asked}
        assert {*self.run.ended.values()} <= {"stop", "length"}


def press(family: str, times: int) -> Pressed:
    """Press the machine this many times under load, and let all requests end."""
    pressed = Pressed(family, seed=times)
    for _ in range(times):
        pressed.host.press(pressed.random.choice([Pressure.WARNING, Pressure.CRITICAL, Pressure.CRITICAL]))
        for _ in range(pressed.random.randint(1, 8)):
            if len(pressed.run.engine) < 2 * ROWS:
                pressed.submit()
            pressed.step()
        pressed.host.press(Pressure.NORMAL)
        seconds = pressed.random.choice([1.0, 20.0, 700.0])  # the calm that is waited for has at most 600
        for _ in range(pressed.random.randint(1, 16)):
            if len(pressed.run.engine) < 2 * ROWS:
                pressed.submit()
            pressed.step(seconds)
    while len(pressed.run.engine):
        pressed.step()
    pressed.check()
    return pressed


def test_pressure_costs_no_job_and_changes_no_answer() -> None:
    assert press("qwen3_5", 5).preempted > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_times_of_pressure_cost_no_job_and_change_no_answer(family: str) -> None:
    pressed = press(family, 100)
    assert pressed.preempted >= 20
    assert len(pressed.asked) >= 100


def test_new_jobs_wait_and_the_running_one_ends() -> None:
    run = Run(model("llama"))
    run.add("first", prompt(30, 1))
    run.until(lambda: len(run.generated["first"]) > 2)
    run.engine.set_throttle(Throttle(reclaim=Reclaim.NEW_JOBS))
    run.add("second", prompt(31, 2))
    run.add("third", prompt(32, 3))
    run.add("offline", prompt(33, 4), lane="batch")
    run.step()
    assert (run.active, run.waiting) == (["first"], ["second", "third", "offline"])
    run.until(lambda: "first" in run.ended)
    run.until(lambda: run.active == ["second"])  # one at a time, so that none waits for ever
    run.until(lambda: {"second", "third"} <= run.ended.keys())
    assert not run.engine.needs_step or run.step().rows == 0
    assert not run.engine.needs_step  # nothing to do until there is memory again
    run.engine.set_throttle(Throttle())
    assert run.engine.needs_step
    assert run.drain()["offline"] == alone(model("llama").network, prompt(33, 4), 20)


def test_half_of_the_cache_is_given_back_first_then_all_and_taken_again() -> None:
    run = Run(model("llama"), prefix_bytes=10**9)
    for seed in range(4):
        run.add(str(seed), prompt(50, seed))
    run.drain()
    held = run.step().prefix.nbytes
    sizes = []
    for level in Reclaim.HALF_CACHES, Reclaim.CACHES, Reclaim.HALF_CACHES, Reclaim.NOTHING:
        run.engine.set_throttle(Throttle(reclaim=level))
        assert run.engine.needs_step
        run.step()
        run.add(f"more-{len(sizes)}", prompt(50, len(sizes)))
        run.drain()
        sizes.append(run.step().prefix.nbytes)
    assert 0 < sizes[0] <= held // 2
    assert sizes[1] == 0
    assert 0 < sizes[2] <= held // 2
    assert sizes[3] > 0


def test_a_share_waits_until_a_step_is_computed() -> None:
    """Else the device would compute it during the rest."""
    run = Run(model("llama"))
    run.engine.set_throttle(Throttle(share=0.5, offline_share=0.5))
    run.add("a", prompt(30, 1))
    while not run.ended:
        run.step()
        assert not run.engine._running._stopwatch.running
    assert run.generated["a"] == alone(model("llama").network, prompt(30, 1), 20)
