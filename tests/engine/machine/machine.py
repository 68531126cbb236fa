"""Everything that can happen to requests, in any order: each answers what it answers alone, and a failure costs only
the request that it belongs to.

Prompts of text and of images, SpecPrefill, grammars, sampling and logprobs, prefixes that are reused, edited and
continued, cancelling, preemption, memory pressure, resuming on a new engine, and failures meet in one batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family, Part, images_of, joined, prompt, request, with_other_images
from tests.engine.machine.faults import NOT_FINITE, ONCE, REFUSED, Faults, Once
from tests.engine.machine.grammars import Forbids, Forces, Json, Picky, Plan, Raises
from tests.engine.machine.reference import LONGEST, Answer, alone
from tests.engine.machine.remains import check_remains
from tests.engine.vision.cases import Prompt
from worker.schedule.grouping import StepCost
from worker.schedule.memory import ImageDemand
from worker.schedule.request import Lane, Range, Sampling, SpecPrefillParams

STEPS = 25  # rules in a sequence

SYSTEM: tuple[Part, ...] = (20,)
TEXTS: list[tuple[Part, ...]] = [(1,), (9,), (16,), (40,), (70,), (100,)]
LOOKS: list[tuple[Part, ...]] = [
    (5, (1, 24, 16), 9),
    (5, (2, 24, 16), 9),  # differs from the first in its image only
    (4, (2, 32, 16), 6, (3, 16, 16), 11),
    (30, (1, 32, 24), 34, (2, 24, 16), 30),
]
SPOILT: list[tuple[Part, ...]] = [(5, (1, 24, 16), 3, REFUSED, 9), (5, NOT_FINITE, 9)]
LONGEST_PROMPT = 150
SPARE_IMAGES = ImageDemand(64, 128, 64, 100_000)

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=6),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.5),
    Sampling(temperature=1.2, min_p=0.05, presence_penalty=1.0, seed=7),
]
KEEPS = [0.2, 0.5, 1.0]
LEAST_SCORED = 60  # tokens of a prompt
COSTS = [ONE_GROUP, EACH_ALONE, StepCost(group_s=2e-6, cell_s=1e-9)]
MOST_DOOMED = 3  # more could fail one after another until the engine gives up, as it should


@dataclass(frozen=True)
class Asked:
    """A request, apart from what has become of it."""

    prompt: Prompt
    sampling: Sampling
    grammar: Plan | None
    max_tokens: int
    specprefill: SpecPrefillParams | None = None
    lane: Lane = "interactive"
    namespace: str = ""
    boundaries: tuple[int, ...] = ()
    top_logprobs: int | None = None


@cache
def base(family: Family, parts: tuple[Part, ...], seed: int, *, system: bool) -> Prompt:
    """Return a prompt; some share their first tokens."""
    own = prompt(family, *parts, seed=seed)
    return joined(prompt(family, *SYSTEM, seed=1), own) if system else own


class Machine(RuleBasedStateMachine):
    family: Family

    @initialize(
        step_s=st.sampled_from([0.0, 0.02]),
        rows=st.sampled_from([2, 4, 40, 40]),
        prefix_bytes=st.sampled_from([0, 100_000, 10**9, 10**9]),
        content=st.booleans(),
    )
    def open(self, step_s: float, rows: int, prefix_bytes: int, content: bool) -> None:
        """`rows`: about how many fit into memory. `content`: tokens and images may fail."""
        costs = self.family.model.costs
        longest = LONGEST_PROMPT + LONGEST + costs.draft_tokens(LONGEST_PROMPT)
        images = sum([SPARE_IMAGES] * rows, ImageDemand()) if self.family.sees else ImageDemand()
        self.step_s, self.prefix_bytes = step_s, prefix_bytes
        self.memory = costs.peak_bytes([[longest] * rows], images=images)
        self.faults = Faults(self.family, content=content)
        self.asked, self.resumed = dict[str, Asked](), dict[str, int]()
        self.kept, self.settled = dict[str, tuple[Range, ...]](), set[str]()
        self.done = set[str]()  # cancelled, or ended and checked
        self.past = dict[str, list[int]]()  # answers of earlier engines
        self.unlucky = list[tuple[str, int, int | None]]()  # failed rows: id, tokens delivered, and at which to fail
        self.failing = 0  # requests that were to fail, since the last token
        self.begin()

    def begin(self) -> None:
        self.run = Run(self.family.model, step_s=self.step_s, memory=self.memory, prefix_bytes=self.prefix_bytes)

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
            )
        )

    def ask(self, data: st.DataObject, prompt: Prompt) -> None:
        """Submit a prompt in a form of its own. What is drawn does not depend on the prompt or on the engine, whose
        steps depend on the clock, so that a sequence can be run again."""
        tokens = len(prompt.tokens)
        places = st.one_of(st.sampled_from([9, 16, 20, LONGEST_PROMPT]), st.integers(1, LONGEST_PROMPT))
        asked = Asked(
            prompt,
            data.draw(st.sampled_from(SAMPLINGS), "sampling"),
            data.draw(st.one_of(st.none(), st.sampled_from([Json(), Picky()])), "grammar"),
            data.draw(st.integers(1, LONGEST), "most tokens"),
            self.specprefill(data, tokens),
            data.draw(st.sampled_from(["interactive", "interactive", "batch"]), "lane"),
            data.draw(st.sampled_from(["", "", "", "another"]), "namespace"),
            tuple({min(at, tokens) for at in data.draw(st.lists(places, max_size=3), "boundaries")}),
            data.draw(st.sampled_from([None, None, 0, 2]), "logprobs"),
        )
        if not (self.is_spoilt(prompt) and self.crowd_of_doomed()):
            self.submit(asked)

    def specprefill(self, data: st.DataObject, tokens: int) -> SpecPrefillParams | None:
        keep = data.draw(st.sampled_from([None, *KEEPS]), "keep")
        last = data.draw(st.sampled_from([1, 20]), "last tokens to keep")
        if keep is None or tokens < LEAST_SCORED:
            return None
        return SpecPrefillParams(keep, ((8, tokens - last),), min_tokens=1, requested=True)

    def one_of(self, data: st.DataObject, ids: Sequence[str]) -> str:
        return sorted(ids, key=int)[data.draw(st.integers(0, 99), "which") % len(ids)]

    def catalogue(self) -> list[tuple[Part, ...]]:
        return TEXTS + LOOKS if self.family.sees else TEXTS

    @rule(data=st.data(), seed=st.integers(1, 2), system=st.booleans())
    def ask_anew(self, data: st.DataObject, seed: int, system: bool) -> None:
        self.ask(data, base(self.family, data.draw(st.sampled_from(self.catalogue()), "parts"), seed, system=system))

    @rule(data=st.data(), seed=st.integers(1, 2), keep=st.sampled_from(KEEPS[:2]), system=st.booleans())
    def ask_long(self, data: st.DataObject, seed: int, keep: float, system: bool) -> None:
        """A prompt of which a part is left out, for a long answer."""
        long = [
            parts for parts in self.catalogue() if sum(part for part in parts if isinstance(part, int)) >= LEAST_SCORED
        ]
        whole = base(self.family, data.draw(st.sampled_from(long), "parts"), seed, system=system)
        params = SpecPrefillParams(keep, ((8, len(whole.tokens) - 20),), min_tokens=1, requested=True)
        sampling = data.draw(st.sampled_from(SAMPLINGS), "sampling")
        self.submit(Asked(whole, sampling, None, LONGEST, params))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), turn=st.sampled_from([(1,), (12,)]), seed=st.integers(3, 4), answered=st.booleans())
    def go_on(self, data: st.DataObject, turn: tuple[Part, ...], seed: int, answered: bool) -> None:
        """From what was answered so far, which may be less than the answer, or from the prompt alone."""
        id = self.one_of(data, [*self.asked])
        before = self.asked[id].prompt
        if len(before.tokens) + LONGEST + 12 > LONGEST_PROMPT or self.is_spoilt(before):
            before, answered = Prompt(()), False
        said = Prompt(tuple(self.said(id)) if answered and self.family.is_text(self.said(id)) else ())
        self.ask(data, joined(before, said, prompt(self.family, *turn, seed=seed)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_less(self, data: st.DataObject) -> None:
        """A prompt that ends within another, between its images."""
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
        """The same tokens about other images."""
        before = self.asked[self.one_of(data, [*self.asked])].prompt
        self.ask(data, before if self.is_spoilt(before) else with_other_images(self.family, before))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), again=st.booleans())
    def ask_again(self, data: st.DataObject, again: bool) -> None:
        """The same, or the same in a form of its own."""
        asked = self.asked[self.one_of(data, [*self.asked])]
        if not again:
            self.ask(data, asked.prompt)
        elif not (self.fails_alone(asked) and self.crowd_of_doomed()):
            self.submit(asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """A new attempt goes on after a part of an earlier answer."""
        id = self.one_of(data, [*self.asked])
        said, asked = self.said(id), self.asked[id]
        count = data.draw(st.integers(0, LONGEST), "delivered")
        if id in self.settled and not (self.fails_alone(asked) and self.crowd_of_doomed()):
            self.submit(asked, said[: min(count, asked.max_tokens - 1)], self.kept.get(id))

    # What is to fail

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
        specprefill = self.specprefill(data, len(whole.tokens))
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

    @rule(once=st.sampled_from(ONCE))
    def fail_once(self, once: Once) -> None:
        if not self.crowd_of_doomed():
            self.faults.arm(once)

    def is_spoilt(self, prompt: Prompt) -> bool:
        return self.faults.spoils(prompt) or (self.faults.content and bool({*prompt.tokens} & {*self.family.unused}))

    def fails_alone(self, asked: Asked) -> bool:
        return isinstance(asked.grammar, Raises | Forbids | Forces) or self.is_spoilt(asked.prompt)

    # What happens to them

    @rule(steps=st.sampled_from([1, 2, 3, 9]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.step_once()

    def step_once(self) -> None:
        before = sum(map(len, self.run.generated.values()))
        with self.faults.active():
            report = self.run.step()
        if sum(map(len, self.run.generated.values())) > before:
            self.failing = 0
        assert report.prefix.nbytes <= self.prefix_bytes
        for id in self.run.skipped:
            self.settled.add(id)
            self.kept.pop(id, None)
        for id in self.run.kept_ranges.keys() - self.run.skipped.keys():
            self.settled.add(id)
            self.kept[id] = self.run.kept_ranges[id]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A request that is not ended, or any if all are."""
        id = self.one_of(data, [*self.run.active, *self.run.waiting] or [*self.asked])
        self.done.add(id)
        with self.faults.active():
            self.run.engine.remove(id)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), keep=st.booleans())
    def preempt(self, data: st.DataObject, keep: bool) -> None:
        id = self.one_of(data, self.run.active or [*self.asked])
        engine = self.run.engine
        if id in engine._prefills or id in {row.id for _, row in engine._running}:  # else it waits, or has just failed
            self.run.preempt(id)
            self.run.readmit(keep_caches=keep)

    @rule(cost=st.sampled_from(COSTS))
    def regroup(self, cost: StepCost) -> None:
        self.run.group_by(cost)

    @rule()
    def restart(self) -> None:
        """A new engine goes on with what the last one has not ended."""
        said, ids = self.run.generated, sorted(self.run.active + self.run.waiting, key=int)
        self.done |= self.asked.keys() - {*ids}
        self.failing = 0
        self.past |= said
        self.begin()
        for id in ids:
            self.submit(self.asked[id], said[id], self.kept.get(id), id)

    # What holds

    def said(self, id: str) -> list[int]:
        return self.run.generated.get(id, self.past.get(id, []))

    def answer(self, id: str) -> Answer:
        asked = self.asked[id]
        plan = grammars.without_failure(asked.grammar)
        return alone(self.family, asked.prompt, asked.sampling, plan, self.kept.get(id))[: asked.max_tokens]

    def fails_at(self, id: str) -> int | None:
        """Return the number of tokens that a request delivers before it fails; None if nothing in it fails."""
        asked, answer = self.asked[id], [token for token, _ in self.answer(id)]
        places = self.bad_places(id, answer) if self.faults.content else []
        match asked.grammar:
            # A token is fed, and the next one constrained, before it is delivered; so is the end.
            case Raises(at) if at <= min(asked.max_tokens, len(answer) + 1):
                places.append(max(0, at - 1))
            case Forbids(at) if at < asked.max_tokens and at <= len(answer):
                places.append(at)
        return max(min(places), self.resumed[id]) if places else None

    def bad_places(self, id: str, answer: list[int]) -> list[int]:
        asked, faults = self.asked[id], self.faults
        kept = self.kept.get(id, ((0, len(asked.prompt.tokens)),))
        read = {token for start, end in kept for token in asked.prompt.tokens[start:end]}
        places = [0] if read & {faults.raising, faults.not_finite} or faults.spoils(asked.prompt) else []
        places += [at for at, token in enumerate(answer) if token == faults.raising]
        delivered = [at + 1 for at, token in enumerate(answer) if token == faults.not_finite]
        return places + [at for at in delivered if at < asked.max_tokens]

    @invariant()
    def each_answers_what_it_answers_alone(self) -> None:
        for id in list(self.run.generated):
            if id not in self.done:
                self.check(id)
        assert self.unlucky == [] or len(self.unlucky) <= self.faults.rows_that_may_fail

    def check(self, id: str) -> None:
        said, ending, max_tokens = self.said(id), self.run.ended.get(id), self.asked[id].max_tokens
        if ending is None and len(said) == self.resumed[id]:
            return
        if ending is not None:
            self.done.add(id)
        answer, place = self.answer(id), self.fails_at(id)
        expected = [token for token, _ in answer]
        if ending == "faulted" and place != len(said):
            self.unlucky.append((id, len(said), place))
        elif ending is not None:
            expected_ending = "faulted" if place is not None else "stop" if len(answer) < max_tokens else "length"
            assert (id, ending) == (id, expected_ending)
        whole = ending in ("stop", "length")
        assert (id, said) == (id, expected if whole else expected[: len(said)])
        if self.asked[id].top_logprobs is not None:
            told = self.run.logprobs[id]
            assert told == pytest.approx([value for _, value in answer[self.resumed[id] : len(said)]], abs=1e-4)

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        live = sorted([*self.run.active, *self.run.waiting])
        assert live == sorted(self.run.generated.keys() - self.run.ended.keys() - self.done)
        assert len(self.run.engine) == len(live)

    @invariant()
    def what_must_be_kept_is_kept(self) -> None:
        for id in self.run.kept_ranges.keys() & self.kept.keys():
            asked = self.asked[id]
            assert asked.specprefill is not None
            ((first, end),) = asked.specprefill.droppable_ranges
            tokens = len(asked.prompt.tokens)
            required = {*range(first), *range(end, tokens)}
            for picture in images_of(self.family, asked.prompt):
                required |= {*range(*picture.span)}
            assert required <= {at for span in self.kept[id] for at in range(*span)}
            assert not self.faults.content or self.faults.raising_in_draft not in asked.prompt.tokens

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.finish()
            self.ask_for_what_is_cached()
            check_remains(self.run.engine, self.faults.bad_keys)

    def finish(self) -> None:
        self.run.readmit()
        for _ in range(3000):
            if not len(self.run.engine):
                break
            self.step_once()
        self.each_answers_what_it_answers_alone()
        assert {*self.run.generated} - self.done == set()
        assert "refused" not in self.run.ended.values()

    def ask_for_what_is_cached(self) -> None:
        """The longest prompts are answered from what the prefix cache still holds of them as they are alone."""
        prompts = {(asked.prompt, asked.namespace) for asked in self.asked.values() if not self.is_spoilt(asked.prompt)}
        longest = sorted(prompts, key=lambda each: (len(each[0].tokens), repr(each)), reverse=True)
        for each, namespace in longest[:6]:
            self.submit(Asked(each, Sampling(), None, 3, namespace=namespace))
        self.finish()

    def counts(self) -> Counter[str]:
        """Return what has happened in this sequence."""
        counts = Counter(self.faults.fired)
        endings = [self.run.ended.get(id, "cancelled") for id in self.run.generated]
        counts.update(endings)
        counts["sequences"], counts["requests"] = 1, len(self.asked)
        counts["from a prefix"] = sum(cached > 0 for cached in self.run.cached.values())
        counts["sparse"], counts["SpecPrefill skipped"] = len(self.run.kept_ranges), len(self.run.skipped)
        counts["failed once"] = len(self.unlucky)
        counts["images encoded"] = len(self.run.encoded)
        return counts
