"""Events in any order: each request answers what it answers alone, and a failure costs only the request that it
belongs to.

Prompts of text and of images, SpecPrefill, grammars, budgets of thoughts, sampling and logprobs, drafts, prefixes that
are reused, edited and continued, cancelling, preemption, memory pressure, resuming on a new engine, and failures meet
in one batch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.machine import asked as expected
from tests.engine.machine import drawn, grammars
from tests.engine.machine.asked import LONGEST_PROMPT, LOOKS, SAMPLINGS, SPOILT, TEXTS, Asked, base
from tests.engine.machine.drafts import Drafts
from tests.engine.machine.families import Family, Part, images_of, joined, prompt, request, with_other_images
from tests.engine.machine.faults import ONCE, Faults, Once
from tests.engine.machine.grammars import Forbids, Forces, Raises
from tests.engine.machine.reference import LONGEST, Answer
from tests.engine.vision.cases import Prompt
from worker.engine import admission_controller as admission
from worker.engine.admission import plan as growth
from worker.engine.admission.grouping import StepCost
from worker.engine.memory import MAX_ROWS, ImageDemand
from worker.host.courtesy import Reclaim, Throttle
from worker.request import Range

SPARE_IMAGES = ImageDemand(64, 128, 64, 100_000)
COSTS = [ONE_GROUP, EACH_ALONE, StepCost(group_s=2e-6, cell_s=1e-9)]
MOVES: list[Once] = ["extend", "moved", "filter", "extract"]
MOST_STEPS = 100  # to the first tokens of an answer
MOST_DOOMED = 3  # more could fail one after another until the engine gives up, as it should


@contextmanager
def short_reservations() -> Iterator[None]:
    """Reserve little for answers without a stated limit while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "FIRST_ANSWER", 3)
        patch.setattr(growth, "KNOWN_ANSWERS", 1_000)
        for module in growth, admission:
            patch.setattr(module, "BUFFER_TOKENS", 1)
        yield


class Rules(RuleBasedStateMachine):
    """The events, and the state that they leave. `Machine` adds what must hold between them."""

    family: Family

    @initialize(
        step_s=st.sampled_from([0.0, 0.02]),
        rows=st.sampled_from([2, 4, 40, 40]),
        most_rows=st.sampled_from([3, MAX_ROWS, MAX_ROWS]),
        prefix_bytes=st.sampled_from([0, 100_000, 10**9, 10**9]),
        content=st.booleans(),
        pipelined=st.booleans(),
        drafts=st.booleans(),
    )
    def open(
        self,
        step_s: float,
        rows: int,
        most_rows: int,
        prefix_bytes: int,
        content: bool,
        pipelined: bool,
        drafts: bool,
    ) -> None:
        """`rows`: about how many fit into memory. `most_rows`: of which an interactive one may preempt an offline one.
        `content`: tokens and images may fail. `drafts`: rows take drafts."""
        self.faults = Faults(self.family, content=content)
        self.drafts = Drafts(self.family, wanted=drafts, not_finite=self.faults.not_finite if content else None)
        costs = replace(self.family.model.costs, max_draft=self.drafts.max_draft)
        longest = LONGEST_PROMPT + LONGEST + costs.draft_tokens(LONGEST_PROMPT)
        images = sum([SPARE_IMAGES] * rows, ImageDemand()) if self.family.sees else ImageDemand()
        self.prefix_bytes = prefix_bytes
        memory = costs.peak_bytes([[longest] * rows], images=images)
        self.memory_for_one = costs.peak_bytes([[longest]], images=SPARE_IMAGES if self.family.sees else ImageDemand())
        self.memory = memory
        self.make_run = partial(
            Run,
            self.family.model,
            step_s=step_s,
            rows=most_rows,
            memory=memory,
            prefix_bytes=prefix_bytes,
            pipelined=pipelined,
        )
        self.asked, self.resumed = dict[str, Asked](), dict[str, int]()
        # The tokens that are computed of each sparse prompt, and the requests for which this is decided.
        self.kept, self.settled = dict[str, tuple[Range, ...]](), set[str]()
        self.done = set[str]()  # cancelled, or ended and checked
        self.past = dict[str, list[int]]()  # answers of earlier engines
        self.unlucky = list[
            tuple[str, int, set[int | None]]
        ]()  # failed rows: id, tokens delivered, and those at which it may fail
        self.failing = 0  # requests that were to fail, and calls, since the last token
        self.happened = Counter[str]()
        self.run = self.new_run()

    def new_run(self) -> Run:
        return self.make_run(speculator=self.drafts.speculator())

    # Requests

    def submit(
        self, asked: Asked, answered: Sequence[int] = (), kept: tuple[Range, ...] | None = None, id: str = ""
    ) -> None:
        id = id or str(len(self.asked))
        self.asked[id], self.resumed[id] = asked, len(answered)
        if kept is not None:
            self.kept[id] = kept
        if asked.specprefill is None or answered or kept is not None:
            self.settled.add(id)
        self.expect_drafts(id)
        if self.fails_at(id) is not None:
            self.failing += 1
        self.run.submit(
            request(
                self.family,
                id,
                asked.prompt,
                asked.max_tokens,
                sampling=asked.sampling,
                lane=asked.lane,
                resume_tokens=tuple(answered),
                grammar=grammars.make(self.family, asked.grammar),
                top_logprobs=asked.top_logprobs,
                namespace=asked.namespace,
                boundaries=asked.boundaries,
                specprefill=None if answered else asked.specprefill,
                kept_ranges=kept,
                grows=asked.grows,
            )
        )

    def ask(self, data: st.DataObject, prompt: Prompt) -> None:
        """Submit a prompt in a form of its own."""
        asked = drawn.form(data, prompt)
        if not (self.is_spoilt(prompt) and self.crowd_of_doomed()):
            self.submit(asked)

    def one_of(self, data: st.DataObject, ids: Sequence[str]) -> str:
        return sorted(ids, key=int)[data.draw(st.integers(0, 99), "which") % len(ids)]

    def catalogue(self) -> list[tuple[Part, ...]]:
        return TEXTS + LOOKS if self.family.sees else TEXTS

    @rule(data=st.data(), seed=st.integers(1, 2), system=st.booleans())
    def ask_anew(self, data: st.DataObject, seed: int, system: bool) -> None:
        self.ask(data, base(self.family, data.draw(st.sampled_from(self.catalogue()), "parts"), seed, system=system))

    @rule(data=st.data())
    def ask_long(self, data: st.DataObject) -> None:
        self.submit_long(data)

    def submit_long(self, data: st.DataObject) -> str:
        """Ask for a long answer to a prompt of which some tokens are dropped, and return the request's id."""
        self.submit(drawn.long(data, self.family, self.catalogue()))
        return list(self.asked)[-1]

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), turn=st.sampled_from([(1,), (12,)]), seed=st.integers(3, 4), answered=st.booleans())
    def go_on(self, data: st.DataObject, turn: tuple[Part, ...], seed: int, answered: bool) -> None:
        """Ask a next turn, after the answer so far or after the prompt alone."""
        id = self.one_of(data, [*self.asked])
        before = self.asked[id].prompt
        if len(before.tokens) + LONGEST + 12 > LONGEST_PROMPT or self.is_spoilt(before):
            before, answered = Prompt(()), False
        said = Prompt(tuple(self.said(id)) if answered and self.family.is_text(self.said(id)) else ())
        self.ask(data, joined(before, said, prompt(self.family, *turn, seed=seed)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_less(self, data: st.DataObject) -> None:
        """Ask a prompt that ends within another, between its images."""
        before = self.asked[self.one_of(data, [*self.asked])].prompt
        spans = [picture.span for picture in images_of(self.family, before)]
        end = min(data.draw(st.integers(1, LONGEST_PROMPT), "end"), len(before.tokens))
        if not self.family.is_text(before.tokens[end - 1 : end]) or any(start <= end <= last for start, last in spans):
            end = len(before.tokens)
        images = sum(last < end for _, last in spans)
        self.ask(data, Prompt(before.tokens[:end], before.images[:images]))

    @precondition(lambda self: self.family.sees and self.asked)
    @rule(data=st.data())
    def ask_about_other_images(self, data: st.DataObject) -> None:
        """Ask the same tokens about other images."""
        before = self.asked[self.one_of(data, [*self.asked])].prompt
        self.ask(data, before if self.is_spoilt(before) else with_other_images(self.family, before))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), again=st.booleans())
    def ask_again(self, data: st.DataObject, again: bool) -> None:
        """Ask the same, or the same prompt in a form of its own."""
        asked = self.asked[self.one_of(data, [*self.asked])]
        if not again:
            self.ask(data, asked.prompt)
        elif not (expected.fails_alone(self.faults, asked) and self.crowd_of_doomed()):
            self.submit(asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """Continue after a part of an earlier answer."""
        id = self.one_of(data, [*self.asked])
        said, asked = self.said(id), self.asked[id]
        count = data.draw(st.integers(0, LONGEST), "delivered")
        if id in self.settled and not (expected.fails_alone(self.faults, asked) and self.crowd_of_doomed()):
            self.submit(asked, said[: min(count, asked.max_tokens - 1)], self.kept.get(id))

    # Failures

    def crowd_of_doomed(self) -> bool:
        live = sum(self.fails_at(id) is not None for id in self.asked if id not in self.done)
        return max(live, self.failing) >= MOST_DOOMED or self.faults.armed

    @rule(data=st.data(), parts=st.sampled_from(TEXTS), seed=st.integers(1, 2), at=st.integers(0, LONGEST))
    def fail_in_a_grammar(self, data: st.DataObject, parts: tuple[Part, ...], seed: int, at: int) -> None:
        bad = [Forces(self.faults.raising, at), Forces(self.faults.not_finite, at)] if self.faults.content else []
        plan = data.draw(st.sampled_from([Raises(at), Forbids(at), *bad]), "grammar")
        sampling = data.draw(st.sampled_from(SAMPLINGS), "sampling")
        max_tokens = data.draw(st.integers(1, LONGEST), "most tokens")
        whole = base(self.family, parts, seed, system=False)
        specprefill = drawn.specprefill(data, len(whole.tokens))
        if not self.crowd_of_doomed():
            self.submit(Asked(whole, sampling, plan, max_tokens, specprefill))

    @precondition(lambda self: self.faults.content)
    @rule(data=st.data(), seed=st.integers(1, 2), system=st.booleans())
    def fail_in_a_prompt(self, data: st.DataObject, seed: int, system: bool) -> None:
        whole = base(self.family, data.draw(st.sampled_from(TEXTS), "parts"), seed, system=system)
        bad = data.draw(st.sampled_from(self.family.unused), "bad token")
        at = min(data.draw(st.integers(0, LONGEST_PROMPT), "at"), len(whole.tokens) - 1)
        self.ask(data, Prompt((*whole.tokens[:at], bad, *whole.tokens[at + 1 :])))

    @precondition(lambda self: self.family.sees and self.faults.content)
    @rule(data=st.data(), parts=st.sampled_from(SPOILT), seed=st.integers(1, 2))
    def fail_in_an_image(self, data: st.DataObject, parts: tuple[Part, ...], seed: int) -> None:
        self.ask(data, base(self.family, parts, seed, system=False))

    @rule(once=st.sampled_from(ONCE), spared=st.sampled_from([0, 0, 1, 3]))
    def fail_once(self, once: Once, spared: int) -> None:
        self.fail_once_unless_crowded(once, spared)

    def fail_once_unless_crowded(self, once: Once, spared: int) -> None:
        if not self.crowd_of_doomed() and (once != "commit" or self.drafts.wanted):
            self.faults.arm(once, spared)
            self.failing += 1  # it may cost a request before its first token, too

    @rule(data=st.data(), once=st.sampled_from(ONCE), spared=st.integers(0, 5), tokens=st.sampled_from([0, 0, 2]))
    def fail_in_a_long_prompt(self, data: st.DataObject, once: Once, spared: int, tokens: int) -> None:
        """Fail once after the choice of tokens to keep, and after `tokens` tokens of the answer."""
        id = self.submit_long(data)
        self.step_until_said(id, tokens)
        self.fail_once_unless_crowded(once, spared)
        self.step_once()

    # Other events

    @rule(steps=st.sampled_from([1, 2, 3, 9]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.step_once()

    def step_once(self) -> None:
        before = {id: len(tokens) for id, tokens in self.run.generated.items()}
        with self.drafts.active(), self.faults.active(), short_reservations():
            report = self.run.step()
        if sum(map(len, self.run.generated.values())) > sum(before.values()):
            self.failing = 0
        self.happened["preempted by the engine"] += report.num_preemptions
        assert not self.run.cut
        assert report.prefix.nbytes <= self.prefix_bytes
        self.settle(before)

    def step_until_said(self, id: str, tokens: int) -> None:
        """Run steps until the tokens to keep are chosen and `tokens` tokens of the answer are delivered."""
        for _ in range(MOST_STEPS):
            if id in self.run.ended or (id in self.settled and len(self.said(id)) >= tokens):
                return
            self.step_once()

    def settle(self, before: dict[str, int]) -> None:
        """Record which tokens of each prompt the engine computes. `before`: tokens of each answer before the step."""
        for id in self.run.skipped.keys() | self.run.kept_ranges.keys():
            kept = None if id in self.run.skipped else self.run.kept_ranges[id]
            if id not in self.settled or kept != self.kept.get(id):
                assert before[id] == self.resumed[id] == 0, "another choice of tokens after a part of the answer"
                self.settled.add(id)
                self.kept.pop(id, None)
                if kept is not None:
                    self.kept[id] = kept
                self.expect_drafts(id)

    def expect_drafts(self, id: str) -> None:
        """Let the drafts of a request be parts of its answer."""
        if self.drafts.wanted:
            self.drafts.expect(id, [token for token, _ in self.answer(id)])

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a request that has not ended, or any if all have."""
        id = self.one_of(data, [*self.run.active, *self.run.waiting] or [*self.asked])
        self.done.add(id)
        with self.faults.active():
            self.run.engine.remove(id)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), wait=st.sampled_from([False, False, True]), keep=st.booleans())
    def preempt(self, data: st.DataObject, wait: bool, keep: bool) -> None:
        """Preempt an active request. `wait`: until memory may have become free, else for one step at most. `keep`: its
        cache is saved."""
        if not self.run.active:
            self.step_once()
        self.preempt_row(self.one_of(data, self.run.active or [*self.asked]), wait, keep)

    @rule(data=st.data(), tokens=st.integers(0, 4), wait=st.sampled_from([False, False, True]), keep=st.booleans())
    def preempt_long(self, data: st.DataObject, tokens: int, wait: bool, keep: bool) -> None:
        """Preempt a request with dropped tokens, after `tokens` tokens of its answer."""
        id = self.submit_long(data)
        self.step_until_said(id, tokens)
        self.preempt_row(id, wait, keep)

    @rule(data=st.data(), tokens=st.integers(1, 4))
    def fail_in_a_return(self, data: st.DataObject, tokens: int) -> None:
        """Fail once when a preempted request joins a group again, with its saved cache."""
        id = self.submit_long(data)
        self.step_until_said(id, tokens)
        self.preempt_row(id, wait=False, keep=True)
        self.fail_once_unless_crowded("extend", 0)
        self.step_once()

    def preempt_row(self, id: str, wait: bool, keep: bool) -> None:
        engine = self.run.engine
        decodes = id in {row.id for _, row in engine._running}
        if decodes or id in engine._prefills:  # else it waits, has just failed, or has ended
            self.happened["preempted"] += 1
            self.happened["preempted sparse"] += decodes and id in self.kept
            self.run.preempt(id)
            if not wait:
                self.run.readmit(keep_caches=keep)

    @rule(spare=st.sampled_from([0, 0, 0.1, 1]))
    def squeeze(self, spare: float) -> None:
        """Let a part of the memory be used by something else: what rows have reserved remains, and a single row can
        always go on. `spare`: share of the memory beyond that for one row."""
        limit = self.memory_for_one + int(spare * (self.memory - self.memory_for_one))
        controller = self.run.engine._admission
        controller._limits = replace(controller._limits, max_bytes=limit)
        controller.mark_dirty()

    @rule(reclaim=st.sampled_from([*Reclaim]))
    def give_back(self, reclaim: Reclaim) -> None:
        """Let the machine be short of memory, or no longer."""
        self.happened["gave memory back"] += reclaim > Reclaim.NOTHING
        self.run.engine.set_throttle(Throttle(0.9, 0.8, reclaim))

    @rule(keep=st.booleans())
    def readmit(self, keep: bool) -> None:
        """Admit what was preempted, with its cache or without."""
        self.run.readmit(keep_caches=keep)

    @rule(cost=st.sampled_from(COSTS), once=st.sampled_from([None, *MOVES]), spared=st.integers(0, 5))
    def regroup(self, cost: StepCost, once: Once | None, spared: int) -> None:
        """Have rows moved to other groups. `once`: a call that may fail then."""
        if once and len(self.run.active) > 1:
            self.fail_once_unless_crowded(once, spared)
        self.run.group_by(cost)

    @rule()
    def restart(self) -> None:
        """Continue on a new engine the requests that the last one has not ended."""
        said, ids = self.run.generated, sorted(self.run.active + self.run.waiting, key=int)
        self.done |= self.asked.keys() - {*ids}
        self.failing = 0
        self.past |= said
        self.run = self.new_run()
        for id in ids:
            self.submit(self.asked[id], said[id], self.kept.get(id), id)

    # Knowledge about requests

    def said(self, id: str) -> list[int]:
        return self.run.generated.get(id, self.past.get(id, []))

    def is_spoilt(self, prompt: Prompt) -> bool:
        return expected.is_spoilt(self.faults, prompt)

    def answer(self, id: str) -> Answer:
        return expected.answer_to(self.family, self.asked[id], self.kept.get(id))

    def fails_at(self, id: str, *, last_fed: bool = True, known: bool = False) -> int | None:
        """Return the number of tokens that a request has when it fails for its content; None if it does not."""
        answer = [token for token, _ in self.answer(id)]
        place = expected.fails_at(
            self.faults, self.asked[id], answer, self.kept.get(id), last_fed=last_fed, known=known
        )
        return None if place is None else max(place, self.resumed[id])
