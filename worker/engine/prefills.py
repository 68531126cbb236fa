"""The prompts on their way into a cache: which of them advance in a step, and how."""

import time
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Protocol, get_args

from worker.engine.caches import Caches
from worker.engine.layers import weights_bytes
from worker.engine.model import Model
from worker.engine.pictured import OfTokens, PicturedPrefill
from worker.engine.prefill import Phase, Prefill
from worker.engine.row import Row
from worker.engine.scene import Scene
from worker.engine.sparse import SparsePrefill, front
from worker.engine.thinning import ThinnedPrefill
from worker.engine.upstream import make_prompt_cache
from worker.schedule.budget import StepBudget
from worker.schedule.memory import BUFFER_TOKENS, NO_IMAGES, Images
from worker.schedule.plan import Chunk, Waiting, plan
from worker.schedule.sequence import Lane, Outcome, Whole

_UNKNOWN_TOWER = 100.0  # tokens a second

AnyPrefill = OfTokens | PicturedPrefill


class Decoding(Protocol):
    """The running rows, as far as a plan depends on them."""

    def __len__(self) -> int: ...

    def slower(self, more: int) -> float:
        """How many times as long as now a step takes with this many rows more, at least up to twice as many."""

    def growth(self, length: int) -> int:
        """Bytes that are copied when a row of that length joins, beside its own."""


class Prefills:
    def __init__(self, model: Model, step_s: float, caches: Caches) -> None:
        self._network, self._costs, self._vision = model.network, model.costs, model.vision
        self._prefix, self._draft, self._features = caches.prefix, caches.draft, caches.features
        self._prefills: dict[str, AnyPrefill] = {}
        self._turn = 0
        self.budget, self._step_s = StepBudget(step_s), step_s
        # A layer of a vision tower is a few tokens' part of its work; until it is known how long one takes, it is one.
        self._images = StepBudget(step_s, _UNKNOWN_TOWER, least=1)
        self._ratio = model.costs.weights_bytes / max(1, weights_bytes(model.draft.network)) if model.draft else 1.0

    @cached_property
    def _drafts(self) -> StepBudget:
        """Until it is measured, it is as much faster than the model as it is smaller. First asked for when a prompt may
        be scored, since by then the model is measured, most likely."""
        return StepBudget(self._step_s, self._ratio / max(self.budget.cost.token_s, 1e-9))

    def _budget(self, phase: Phase) -> StepBudget:
        match phase:
            case "encoding":
                return self._images
            case "scoring":
                return self._drafts
            case "prefill":
                return self.budget

    def __len__(self) -> int:
        return len(self._prefills)

    def __contains__(self, id: str) -> bool:
        return id in self._prefills

    @property
    def rows(self) -> list[Row]:
        return [prefill.row for prefill in self._prefills.values()]

    @property
    def lengths(self) -> list[int]:
        """Tokens that are in caches, for each that has some; those in a draft's by what they take of the model's."""
        done = ((prefill.phase, prefill.done) for prefill in self._prefills.values() if prefill.phase != "encoding")
        return [self._costs.draft_tokens(tokens) if phase == "scoring" else tokens for phase, tokens in done if tokens]

    def images(self, id: str) -> Images:
        """That the row has still to be computed with."""
        prefill = self._prefills.get(id)
        return prefill.images if isinstance(prefill, PicturedPrefill) else NO_IMAGES

    def begin(self, row: Row) -> None:
        self._prefills[row.id] = self._prefill_of(row)

    def remove(self, id: str) -> None:
        self._prefills.pop(id, None)

    def _prefill_of(self, row: Row) -> AnyPrefill:
        if not row.sequence.pictures:
            return self._of_tokens(row)
        assert self._vision is not None, "a model that sees nothing is given no images"
        assert self._features is not None
        scene = Scene(self._vision.family, row.sequence, self._features)
        return PicturedPrefill(self._of_tokens(row, scene), scene, self._vision.family.encode)

    def _of_tokens(self, row: Row, scene: Scene | None = None) -> OfTokens:
        asked = row.sequence
        if asked.kept is not None:
            head = asked.keys(asked.known[:-1])[: front(asked.kept)]
            found = self._prefix.fetch(asked.space, head) if self._prefix else (make_prompt_cache(self._network), 0)
            cache, length = found
            return SparsePrefill(self._network, row, asked.kept, cache, length, scene)
        if asked.thinning and self._draft and not asked.delivered:
            return ThinnedPrefill(self._network, row, asked.thinning, self._prefix, self._draft, self._pays, scene)
        return Prefill(self._network, row, self._prefix, scene)

    def _pays(self, scored: int, tokens: int, keep: float) -> bool:
        target, draft = self.budget.cost, self._drafts.cost
        return draft.of(scored, 0) + target.of(int(keep * tokens), 0) < target.of(tokens, 0)

    def plan(self, running: Decoding, elapsed_s: float, longest: int) -> list[Chunk]:
        """Chunks for this step, beside the running rows; `elapsed_s` since they began to decode. `longest`: tokens of a
        chunk."""
        for prefill in self._prefills.values():
            prefill.look()
        single = self._first_in("encoding"), self._first_in("scoring")
        # For hundreds of prompts, what is the same for many is found once.
        cost_of = cache(lambda phase: self._budget(phase).cost)
        growth_of = cache(running.growth)
        waiting = [
            Waiting(
                prefill.row.id,
                prefill.total - prefill.remaining,
                prefill.remaining,
                prefill.waited,
                prefill.row.sequence.lane,
                cost_of(prefill.phase),
                _cuts(prefill),
                growth_of(-(-prefill.total // BUFFER_TOKENS) * BUFFER_TOKENS),  # by so many tokens do buffers grow
            )
            for prefill in self._prefills.values()
            if prefill.phase == "prefill" or prefill in single
        ]
        self._turn += 1
        for prefill in self._prefills.values():
            prefill.waited += 1
        slower = running.slower(sum(row.lane == "interactive" for row in waiting))
        spare_s = {lane: self.budget.spare_s(len(running), lane, elapsed_s, slower) for lane in get_args(Lane)}
        return plan(waiting, spare_s, self._turn, longest)

    def _first_in(self, phase: Phase) -> AnyPrefill | None:
        """One prompt at a time: each takes the draft a cache of its length, or the vision tower what its layers put
        out. The one under way, or else the shortest, of the interactive ones first."""
        there = [prefill for prefill in self._prefills.values() if prefill.phase == phase]
        return max(there, key=lambda p: (p.begun, p.row.sequence.lane == "interactive", -p.remaining), default=None)

    def advance(self, chunk: Chunk) -> tuple[int, list[Outcome]]:
        """How many tokens were computed, and what came of it. Blocks until they are."""
        prefill = self._prefills[chunk.id]
        prefill.look()  # again: another prompt may have come further in this very step
        prefill.skip()
        phase, done, cuts = prefill.phase, prefill.done, _cuts(prefill)
        began = time.perf_counter()
        tokens = prefill.advance(min(chunk.tokens, prefill.remaining))
        seconds, news = time.perf_counter() - began, prefill.news()
        if not any(isinstance(outcome, Whole) for outcome in news):  # else it is not the chunk that took so long
            self._budget(phase).saw_chunk(tokens, done, seconds, cuts=sum(done < cut < done + tokens for cut in cuts))
        return tokens, news

    def through(self, id: str) -> AnyPrefill | None:
        """The prompt, if nothing of it remains; it is here no more."""
        prefill = self._prefills[id]  # one whose scores are known already has nothing to score, and yet to heed them
        return self._prefills.pop(id) if prefill.phase == "prefill" and prefill.remaining == 0 else None


def _cuts(prefill: AnyPrefill) -> Sequence[int]:
    """Tokens behind which a forward of the prompt has to end. Those of thinned prompts and of prompts with images are
    few beside their tokens."""
    return prefill.cuts if isinstance(prefill, Prefill) else ()
