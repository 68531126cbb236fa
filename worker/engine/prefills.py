"""The prompts on their way into a cache: which of them advance in a step, and how."""

import time

from worker.engine.encoding import FeatureCache
from worker.engine.layers import weights_bytes
from worker.engine.model import Model
from worker.engine.pictured import PicturedPrefill
from worker.engine.prefill import Phase, Prefill
from worker.engine.prefix import PrefixCache
from worker.engine.row import Row
from worker.engine.scoring import Draft
from worker.engine.sparse import SparsePrefill, front
from worker.engine.thinning import ThinnedPrefill
from worker.engine.upstream import make_prompt_cache
from worker.schedule.budget import TOKENS_PER_S, StepBudget
from worker.schedule.plan import Chunk, Waiting, plan
from worker.schedule.sequence import Outcome

AnyPrefill = Prefill | PicturedPrefill | SparsePrefill | ThinnedPrefill


class Prefills:
    def __init__(
        self,
        model: Model,
        step_s: float,
        prefix: PrefixCache | None,
        draft: Draft | None,
        features: FeatureCache | None = None,
    ) -> None:
        """`features`: of images, for a model that sees them."""
        self._network, self._prefix, self._draft = model.network, prefix, draft
        self._vision, self._features = model.vision, features
        self._prefills: dict[str, AnyPrefill] = {}
        self._turn = 0
        self.budget = StepBudget(step_s)
        # Until it is measured, a draft is as much faster as it is smaller.
        ratio = model.costs.weights_bytes / max(1, weights_bytes(draft.network)) if draft else 1.0
        self._budgets: dict[Phase, StepBudget] = {
            "prefill": self.budget,
            "scoring": StepBudget(step_s, TOKENS_PER_S * ratio),
            "encoding": StepBudget(step_s),
        }

    def __len__(self) -> int:
        return len(self._prefills)

    def __contains__(self, id: str) -> bool:
        return id in self._prefills

    @property
    def rows(self) -> list[Row]:
        return [prefill.row for prefill in self._prefills.values()]

    @property
    def lengths(self) -> list[int]:
        """Tokens that are in the model's caches of those who have some."""
        return [prefill.done for prefill in self._prefills.values() if prefill.phase == "prefill" and prefill.done]

    def begin(self, row: Row) -> None:
        self._prefills[row.id] = self._prefill_of(row)

    def remove(self, id: str) -> None:
        self._prefills.pop(id, None)

    def _prefill_of(self, row: Row) -> AnyPrefill:
        asked = row.sequence
        if asked.pictures:
            assert self._vision is not None, "a model that sees nothing is given no images"
            assert self._features is not None
            return PicturedPrefill(self._network, row, self._prefix, self._vision, self._features)
        if asked.kept is not None:
            head = asked.keys(asked.known[:-1])[: front(asked.kept)]
            found = self._prefix.fetch(asked.space, head) if self._prefix else (make_prompt_cache(self._network), 0)
            return SparsePrefill(self._network, row, asked.kept, *found)
        if asked.thinning and self._draft and not asked.delivered:
            return ThinnedPrefill(self._network, row, asked.thinning, self._prefix, self._draft, self._pays)
        return Prefill(self._network, row, self._prefix)

    def _pays(self, tokens: int, keep: float) -> bool:
        target, draft = self.budget.cost, self._budgets["scoring"].cost
        return draft.of(tokens, 0) + target.of(int(keep * tokens), 0) < target.of(tokens, 0)

    def plan(self, running: int, longest: int) -> list[Chunk]:
        """For the next step, while so many rows decode. `longest`: tokens of a chunk."""
        for prefill in self._prefills.values():
            prefill.look()
        waiting = [
            Waiting(id, p.total - p.remaining, p.remaining, p.waited, p.row.sequence.lane, self._budgets[p.phase].cost)
            for id, p in self._prefills.items()
        ]
        self._turn += 1
        for prefill in self._prefills.values():
            prefill.waited += 1
        return plan(waiting, self.budget.spare_s(running), self._turn, longest)

    def advance(self, chunk: Chunk) -> list[Outcome]:
        """Blocks until it is computed."""
        prefill = self._prefills[chunk.id]
        prefill.skip()
        phase, began, done = prefill.phase, time.perf_counter(), prefill.done
        prefill.advance(chunk.tokens)
        self._budgets[phase].saw_chunk(chunk.tokens, done, time.perf_counter() - began)
        return prefill.news()

    def through(self, id: str) -> AnyPrefill | None:
        """The prompt, if nothing of it remains; it is here no more."""
        return self._prefills.pop(id) if self._prefills[id].remaining == 0 else None
