"""Prompts that continue, edit or repeat others, or are cancelled: each row equals its answer without a cache."""

from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.contract.keys import Lane
from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.tiny import alone, model, network, prompt
from tests.selection import examples
from worker.engine.admission.grouping import StepCost
from worker.engine.prefill import task as prefill_module
from worker.engine.prefix import tree as prefix

Tokens = tuple[int, ...]

MOST = 8  # tokens of an answer
LONGEST = 120  # of a conversation
LANES: list[Lane] = ["interactive", "interactive", "batch"]
SYSTEMS = [prompt(20, 1), prompt(37, 2)]


@cache
def lonely(family: str, tokens: Tokens) -> list[int]:
    return alone(network(family), tokens, MOST)


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(
        family=st.sampled_from(["llama", "gemma3", "qwen3_5", "deepseek_v32"]),
        step_s=st.sampled_from([0.0, 0.02]),
        max_tokens=st.sampled_from([15_000, 60_000, 10**9]),
        longest_run=st.sampled_from([16, prefix.MAX_SEGMENT_TOKENS]),
    )
    def open(self, family: str, step_s: float, max_tokens: int, longest_run: int) -> None:
        """`max_tokens`: bytes of prefixes; one conversation takes some 50,000."""
        self.patch = pytest.MonkeyPatch()
        for module in prefix, prefill_module:
            self.patch.setattr(module, "MAX_SEGMENT_TOKENS", longest_run)
        self.family, self.max_tokens = family, max_tokens
        self.run = Run(model(family), step_s=step_s, prefix_bytes=max_tokens)
        self.prompts: dict[str, tuple[Tokens, int]] = {}
        self.preempted = set[str]()

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        try:
            self.run.readmit()
            self.run.drain()
            assert set(self.run.ended.values()) <= {"stop", "length"}
            self.each_says_what_it_says_alone()
            assert not self.run.engine._prefills._keys  # of prompts that are computed or removed
        finally:  # an example may be given up in the middle of a rule, and then nothing here holds
            self.patch.undo()

    def submit(self, data: st.DataObject, tokens: Tokens) -> None:
        id = str(len(self.prompts))
        max_tokens = data.draw(st.integers(1, MOST), "most tokens")
        places = st.one_of(st.sampled_from([20, 37, len(tokens)]), st.integers(1, len(tokens)))
        self.prompts[id] = tokens, max_tokens
        self.run.add(
            id,
            tokens,
            max_tokens=max_tokens,
            lane=data.draw(st.sampled_from(LANES), "lane"),
            namespace=data.draw(st.sampled_from(["", "", "another's"]), "space"),
            boundaries=data.draw(st.lists(places, max_size=5, unique=True), "boundaries"),
        )

    def earlier(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.prompts)), "earlier")

    @rule(data=st.data(), system=st.sampled_from(SYSTEMS), tail=st.integers(0, 25), seed=st.integers(3, 5))
    def begin(self, data: st.DataObject, system: Tokens, tail: int, seed: int) -> None:
        self.submit(data, system + prompt(tail, seed))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), turn=st.integers(1, 20), seed=st.integers(6, 7))
    def go_on(self, data: st.DataObject, turn: int, seed: int) -> None:
        """Continue from the tokens received so far, which may be less than the answer."""
        id = self.earlier(data)
        talk = self.prompts[id][0] + tuple(self.run.generated[id])
        self.submit(data, (talk + prompt(turn, seed))[:LONGEST])

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), turn=st.integers(1, 20), seed=st.integers(8, 9))
    def edit(self, data: st.DataObject, turn: int, seed: int) -> None:
        talk = self.prompts[self.earlier(data)][0]
        self.submit(data, talk[: data.draw(st.integers(0, len(talk)), "kept")] + prompt(turn, seed))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        self.submit(data, self.prompts[self.earlier(data)][0])

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def ask_less(self, data: st.DataObject) -> None:
        talk = self.prompts[self.earlier(data)][0]
        self.submit(data, talk[: data.draw(st.integers(1, len(talk)), "kept")])

    @precondition(lambda self: self.run.active or self.run.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.run.active + self.run.waiting)), "cancelled")
        self.run.engine.remove(id)

    @precondition(lambda self: self.run.active)
    @rule(data=st.data(), keep_caches=st.booleans())
    def preempt(self, data: st.DataObject, keep_caches: bool) -> None:
        id = data.draw(st.sampled_from(self.run.active), "parked")
        self.preempted.add(id)
        self.run.preempt(id)
        self.run.readmit(keep_caches=keep_caches)

    @rule(steps=st.sampled_from([1, 3, 30]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            assert self.run.step().prefix.nbytes <= self.max_tokens

    @rule(cost=st.sampled_from([ONE_GROUP, EACH_ALONE]))
    def regroup(self, cost: StepCost) -> None:
        self.run.group_by(cost)

    @invariant()
    def each_says_what_it_says_alone(self) -> None:
        for id, (tokens, max_tokens) in self.prompts.items():
            expected, generated = lonely(self.family, tokens)[:max_tokens], self.run.generated[id]
            assert generated == (expected if id in self.run.ended else expected[: len(generated)])

    @invariant()
    def a_token_at_least_is_computed(self) -> None:
        for id, cached in self.run.cached.items():
            prompt_tokens, was_preempted = len(self.prompts[id][0]), id in self.preempted
            assert cached < prompt_tokens + was_preempted * len(self.run.generated[id])


TestLife = PrefixCacheMachine.TestCase
TestLife.settings = settings(max_examples=examples(40, by_default=5), stateful_step_count=25, deadline=None)
