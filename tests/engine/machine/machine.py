"""The machine: events in any order, what must hold between two of them, and when all requests have ended."""

from collections import Counter

import pytest
from hypothesis.stateful import invariant

from tests.engine.machine.asked import Asked
from tests.engine.machine.families import images_of, with_other_images
from tests.engine.machine.remains import check_remains
from tests.engine.machine.rules import Rules
from worker.host.courtesy import Throttle
from worker.request import Sampling

STEPS = 25  # events in a sequence
ASKED_AT_END = 6


class Machine(Rules):
    """A state machine without a family."""

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
        answer = self.answer(id)
        places = {self.fails_at(id), self.fails_at(id, last_fed=False), self.fails_at(id, known=True)}
        expected = [token for token, _ in answer]
        if ending == "faulted" and len(said) not in places:
            self.unlucky.append((id, len(said), places))
        elif ending is not None:
            whole_ending = "stop" if len(answer) < max_tokens else "length"
            assert (id, ending) in {(id, whole_ending if place is None else "faulted") for place in places}
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
    def nothing_fails_but_on_purpose(self) -> None:
        assert self.faults.surprises.errors == []

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
            self.ask_what_is_cached()
            check_remains(self.run.engine, self.faults.bad_keys)
            assert self.drafts.held == set()

    def finish(self) -> None:
        self.run.readmit()
        self.run.engine.set_throttle(Throttle())
        for _ in range(3000):
            if not len(self.run.engine):
                break
            self.step_once()
        self.each_answers_what_it_answers_alone()
        self.nothing_fails_but_on_purpose()
        assert {*self.run.generated} - self.done == set()
        assert "refused" not in self.run.ended.values()

    def ask_what_is_cached(self) -> None:
        """Ask some prompts again, now with all of their tokens: what the prefix cache holds of them changes nothing."""
        for asked in self.asked_at_end():
            self.submit(asked)
        self.finish()

    def asked_at_end(self) -> list[Asked]:
        """Return requests for prompts of this sequence, and for one of them with other images. Prompts with dropped
        tokens come first, then the longest."""
        sparse = {self.asked[id].prompt for id in self.kept}
        prompts = {(asked.prompt, asked.namespace) for asked in self.asked.values() if not self.is_spoilt(asked.prompt)}
        last = sorted(prompts, key=lambda each: (each[0] not in sparse, -len(each[0].tokens), repr(each)))
        last = last[:ASKED_AT_END]
        about_others = [
            (with_other_images(self.family, prompt), namespace) for prompt, namespace in last if prompt.images
        ]
        return [
            Asked(prompt, Sampling(), None, 2, namespace=namespace) for prompt, namespace in [*last, *about_others[:1]]
        ]

    def counts(self) -> Counter[str]:
        """Return what has happened in this sequence."""
        counts = Counter(self.faults.fired) + self.happened
        counts.update([self.run.ended.get(id, "cancelled") for id in self.run.generated])
        counts["sequences"] = 1
        counts["requests"] = len(self.asked)
        counts["from a prefix"] = sum(cached > 0 for cached in self.run.cached.values())
        counts["sparse"] = len(self.run.kept_ranges)
        counts["SpecPrefill skipped"] = len(self.run.skipped)
        counts["failed once"] = len(self.unlucky)
        counts["images encoded"] = len(self.run.encoded)
        counts["drafted tokens"], counts["right drafted tokens"] = self.drafts.proposed, self.drafts.accepted
        return counts
