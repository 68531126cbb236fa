"""Any order of events: each row equals its answer alone."""

from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.tiny import alone, model, network, prompt
from tests.selection import examples
from worker.schedule.grouping import StepCost
from worker.schedule.request import Lane

PROMPTS = [(tokens, seed) for tokens in (1, 9, 16, 40) for seed in (1, 2)]  # around the windows of 16
MOST = 30
IN_BETWEEN = StepCost(group_s=2e-6, cell_s=1e-9)


@cache
def lonely(family: str, asked: tuple[int, int]) -> list[int]:
    return alone(network(family), prompt(*asked), MOST)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        family=st.sampled_from(["gemma3", "qwen3_5", "falcon_h1"]),
        step_s=st.sampled_from([0.0, 0.02]),
        rows=st.sampled_from([2, 4, 40]),
        prefix_bytes=st.sampled_from([0, 100_000, 1_000_000_000]),
    )
    def open(self, family: str, step_s: float, rows: int, prefix_bytes: int) -> None:
        """`rows`: about the number of rows that fit into memory."""
        self.family, self.asked = family, dict[str, tuple[tuple[int, int], int]]()
        memory = model(family).costs.peak_bytes([[PROMPTS[-1][0] + MOST] * rows])
        self.run = Run(model(family), step_s=step_s, memory=memory, prefix_bytes=prefix_bytes)
        self.gone = set[str]()

    @rule(
        asked=st.sampled_from(PROMPTS), max_tokens=st.integers(1, MOST), lane=st.sampled_from(["interactive", "batch"])
    )
    def arrive(self, asked: tuple[int, int], max_tokens: int, lane: Lane) -> None:
        id = str(len(self.asked))
        self.asked[id] = asked, max_tokens
        self.run.add(id, prompt(*asked), max_tokens=max_tokens, lane=lane, boundaries=(9, 16))

    @rule(steps=st.sampled_from([1, 2, 9]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.run.step()

    @precondition(lambda self: self.run.active or self.run.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.run.active + self.run.waiting)))
        self.gone.add(id)
        self.run.engine.remove(id)

    @precondition(lambda self: self.run.active)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.run.preempt(data.draw(st.sampled_from(self.run.active)))

    @rule(keep_caches=st.booleans())
    def readmit_rows(self, keep_caches: bool) -> None:
        self.run.readmit(keep_caches=keep_caches)

    @rule(cost=st.sampled_from([ONE_GROUP, EACH_ALONE, IN_BETWEEN]))
    def regroup(self, cost: StepCost) -> None:
        self.run.group_by(cost)

    @invariant()
    def each_row_equals_its_answer_alone(self) -> None:
        for id, (asked, max_tokens) in self.asked.items():
            expected, generated = lonely(self.family, asked)[:max_tokens], self.run.generated[id]
            assert generated == (expected if id in self.run.ended else expected[: len(generated)])

    @invariant()
    def every_request_is_in_exactly_one_place(self) -> None:
        there = sorted([*self.run.active, *self.run.waiting, *self.run.ended, *self.gone])
        assert there == sorted(self.asked)
        assert len(self.run.engine) == len(self.run.active) + len(self.run.waiting)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.readmit()
            self.run.drain()
            assert set(self.run.ended.values()) <= {"stop", "length"}
            self.each_row_equals_its_answer_alone()


TestLife = EngineMachine.TestCase
TestLife.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
