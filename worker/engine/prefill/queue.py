"""The queue of prompts being prefilled: which of them advance in a step, and by how many tokens."""

import time
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Protocol, get_args

from worker.engine.batch.row import Row
from worker.engine.model.load import Model
from worker.engine.model.profile import weights_bytes
from worker.engine.prefill.base import Phase, Prefill
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.images import ImagePrefill, TextPrefill
from worker.engine.prefill.sparse import SparsePrefill, dense_prefix_len
from worker.engine.prefill.specprefill import SpecPrefill
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.vision.inputs import MultimodalInputs
from worker.schedule.budget import StepBudget
from worker.schedule.memory import BUFFER_TOKENS, NO_IMAGES, ImageDemand
from worker.schedule.outcomes import Outcome, SpecPrefillSkipped
from worker.schedule.plan import Chunk, WaitingPrompt, plan
from worker.schedule.request import Lane

_ENCODER_TOKENS_PER_S = 100.0  # tokens per second, until a vision encoder is measured

AnyPrefill = TextPrefill | ImagePrefill


class RunningRows(Protocol):
    """The part of `Groups` that a plan depends on."""

    def __len__(self) -> int: ...

    def decode_slowdown(self, more: int) -> float:
        """Return the factor by which a decode step slows down with `more` additional rows. Counts at most as many as
        decode now."""

    def join_copy_bytes(self, length: int) -> int:
        """Return the bytes of other rows that are copied when a row of `length` tokens joins."""


class PrefillQueue:
    """All prompts that are in a phase before decoding. For the engine's thread."""

    def __init__(self, model: Model, step_s: float, caches: EngineCaches) -> None:
        """`step_s`: target seconds of a step. `caches` stays owned by the caller."""
        self._network, self._costs, self._vision = model.network, model.costs, model.vision
        self._prefix, self._draft, self._features = caches.prefix, caches.draft, caches.features
        self._prefills: dict[str, AnyPrefill] = {}
        self._steps = 0
        self.budget, self._step_s = StepBudget(step_s), step_s
        # One layer of a vision encoder counts as a few tokens; until its speed is measured, advance by a single token.
        self._encoder_budget = StepBudget(step_s, _ENCODER_TOKENS_PER_S, least=1)
        self._ratio = model.costs.weights_bytes / max(1, weights_bytes(model.draft.network)) if model.draft else 1.0

    @cached_property
    def _draft_budget(self) -> StepBudget:
        """Budget of the draft. Until it is measured, the draft counts as faster than the model by the ratio of their
        sizes. Created at first use, since by then the model has most likely been measured."""
        return StepBudget(self._step_s, self._ratio / max(self.budget.cost.token_s, 1e-9))

    def _budget(self, phase: Phase) -> StepBudget:
        match phase:
            case "encoding":
                return self._encoder_budget
            case "scoring":
                return self._draft_budget
            case "prefill":
                return self.budget

    def __len__(self) -> int:
        return len(self._prefills)

    def __contains__(self, id: str) -> bool:
        return id in self._prefills

    @property
    def rows(self) -> list[Row]:
        """The rows of all prompts, in the order of admission."""
        return [prefill.row for prefill in self._prefills.values()]

    @property
    def lengths(self) -> list[int]:
        """Tokens that the prompts hold in caches, omitting empty ones. Tokens in a draft's cache are converted to the
        number of the model's tokens that take the same memory."""
        done = ((prefill.phase, prefill.done) for prefill in self._prefills.values() if prefill.phase != "encoding")
        return [self._costs.draft_tokens(tokens) if phase == "scoring" else tokens for phase, tokens in done if tokens]

    def images(self, id: str) -> ImageDemand:
        """Return the images that the row has still to be computed with; none for an unknown id."""
        prefill = self._prefills.get(id)
        return prefill.images if isinstance(prefill, ImagePrefill) else NO_IMAGES

    def add(self, row: Row) -> None:
        """Add a row whose prompt is to be prefilled. Raises ValueError for images or kept ranges that do not match the
        prompt."""
        self._prefills[row.id] = self._prefill_of(row)

    def remove(self, id: str) -> None:
        """Drop a prompt and what it has computed. An unknown id is ignored."""
        self._prefills.pop(id, None)

    def _prefill_of(self, row: Row) -> AnyPrefill:
        if not row.request.images:
            return self._text_prefill(row)
        assert self._vision is not None, "a text model has no images"
        assert self._features is not None
        inputs = MultimodalInputs(self._vision.family, row.request, self._features)
        return ImagePrefill(self._text_prefill(row, inputs), inputs, self._vision.family.encode)

    def _text_prefill(self, row: Row, inputs: MultimodalInputs | None = None) -> TextPrefill:
        request = row.request
        if request.kept_ranges is not None:
            head = request.cache_key(request.tokens[:-1])[: dense_prefix_len(request.kept_ranges)]
            found = (
                self._prefix.load(request.namespace, head) if self._prefix else (make_prompt_cache(self._network), 0)
            )
            cache, length = found
            return SparsePrefill(self._network, row, request.kept_ranges, cache, length, inputs)
        if request.specprefill and self._draft and not request.resume_tokens:
            return SpecPrefill(
                self._network, row, request.specprefill, self._prefix, self._draft, self._is_worthwhile, inputs
            )
        return Prefill(self._network, row, self._prefix, inputs)

    def _is_worthwhile(self, scored: int, tokens: int, keep: float) -> bool:
        """Return True if scoring `scored` tokens, and then computing the share `keep` of `tokens`, is expected to be
        faster than computing all of them."""
        target, draft = self.budget.cost, self._draft_budget.cost
        return draft.of(scored, 0) + target.of(int(keep * tokens), 0) < target.of(tokens, 0)

    def plan(self, running: RunningRows, elapsed_s: float, longest: int) -> list[Chunk]:
        """Return the chunks to compute in this step. `elapsed_s`: seconds since the running decode step began.
        `longest`: the largest chunk in tokens. Decides for SpecPrefill prompts whether they are scored."""
        for prefill in self._prefills.values():
            prefill.match_prefix()
        single = self._first_in("encoding"), self._first_in("scoring")
        # With hundreds of prompts, values shared by many are computed once.
        cost_of = cache(lambda phase: self._budget(phase).cost)
        join_copy_bytes_of = cache(running.join_copy_bytes)
        waiting = [
            WaitingPrompt(
                prefill.row.id,
                prefill.total - prefill.remaining,
                prefill.remaining,
                prefill.waited,
                prefill.row.request.lane,
                cost_of(prefill.phase),
                _cuts(prefill),
                join_copy_bytes_of(-(-prefill.total // BUFFER_TOKENS) * BUFFER_TOKENS),  # buffers grow in these steps
            )
            for prefill in self._prefills.values()
            if prefill.phase == "prefill" or prefill in single
        ]
        self._steps += 1
        for prefill in self._prefills.values():
            prefill.waited += 1
        slower = running.decode_slowdown(sum(row.lane == "interactive" for row in waiting))
        spare_s = {lane: self.budget.spare_s(len(running), lane, elapsed_s, slower) for lane in get_args(Lane)}
        return plan(waiting, spare_s, self._steps, longest)

    def _first_in(self, phase: Phase) -> AnyPrefill | None:
        """Return the one prompt of this phase that may advance, if any: a draft's cache, or a vision encoder's
        activations, are held for one prompt at a time. Prefers a prompt that has started, then interactive ones, then
        the shortest."""
        prefills = [prefill for prefill in self._prefills.values() if prefill.phase == phase]
        return max(prefills, key=lambda p: (p.started, p.row.request.lane == "interactive", -p.remaining), default=None)

    def advance(self, chunk: Chunk) -> tuple[int, list[Outcome]]:
        """Compute a chunk. Blocks. Returns the number of tokens computed, and the outcomes."""
        prefill = self._prefills[chunk.id]
        prefill.match_prefix()  # again: another prompt may have inserted more in this step
        prefill.apply_prefix()
        phase, done, cuts = prefill.phase, prefill.done, _cuts(prefill)
        began = time.perf_counter()
        tokens = prefill.advance(min(chunk.tokens, prefill.remaining))
        seconds, outcomes = time.perf_counter() - began, prefill.pop_outcomes()
        # If SpecPrefill was skipped in this step, the time is not that of the chunk alone.
        if not any(isinstance(outcome, SpecPrefillSkipped) for outcome in outcomes):
            self._budget(phase).observe_chunk(
                tokens, done, seconds, cuts=sum(done < cut < done + tokens for cut in cuts)
            )
        return tokens, outcomes

    def pop_finished(self, id: str) -> AnyPrefill | None:
        """Remove and return the prompt if nothing is left to compute; else return None."""
        # With scores from the memo nothing is left to score, but the scores must still be applied.
        prefill = self._prefills[id]
        return self._prefills.pop(id) if prefill.phase == "prefill" and prefill.remaining == 0 else None


def _cuts(prefill: AnyPrefill) -> Sequence[int]:
    """Return the positions at which a forward of the prompt has to end. None for SpecPrefill prompts and for prompts
    with images, where these forwards are a small share of the work."""
    return prefill.cuts if isinstance(prefill, Prefill) else ()
