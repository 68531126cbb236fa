"""SpecPrefill (arXiv 2502.02789): a draft model scores a long prompt, and only the important tokens are computed.

The class has the interface of `Prefill`. What the prefix cache holds of the prompt is used, and so are the first
tokens, up to the first dropped one: these are computed densely, and other requests may reuse them. If anything fails,
the whole prompt is computed."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from worker.engine.batch.decode_batch import PendingTokens
from worker.engine.batch.row import Row
from worker.engine.cache.prefix import PrefixCache
from worker.engine.prefill.base import Phase, Prefill
from worker.engine.prefill.scoring import LOOKAHEAD, Draft, Scores, Scoring
from worker.engine.prefill.sparse import SparsePrefill, dense_prefix_len, window_of
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.engine.vision.inputs import MultimodalInputs
from worker.schedule.outcomes import Outcome, Prefilled, Scored, SpecPrefillApplied, SpecPrefillSkipped
from worker.schedule.request import Range, SpecPrefillParams, tokens_in
from worker.schedule.selection import merged, outside, select_ranges

logger = logging.getLogger("sluice.engine")

IsWorthwhile = Callable[[int, int, float], bool]


class SpecPrefill:
    """Prefill of a prompt that may be computed in part: decides, scores, then computes the kept tokens."""

    def __init__(
        self,
        network: nn.Module,
        row: Row,
        params: SpecPrefillParams,
        prefix: PrefixCache | None,
        draft: Draft,
        is_worthwhile: IsWorthwhile,
        inputs: MultimodalInputs | None = None,
    ) -> None:
        """`is_worthwhile(scored, tokens, keep)`: return True if scoring that many tokens, and computing the share
        `keep` of `tokens`, is faster than computing all. `inputs`: the inputs of a prompt with images; images are never
        dropped."""
        self.row, self.waited = row, 0
        self._network, self._prefix, self._params, self._inputs = network, prefix, params, inputs
        self._draft, self._is_worthwhile = draft, is_worthwhile
        self._prefill = Prefill(network, row, prefix, inputs)  # of the whole prompt, or of its dense prefix
        self._scoring: Scoring | None = None
        self._sparse: SparsePrefill | None = None
        self._undecided, self._seconds = True, 0.0
        self._outcomes: list[Outcome] = []

    @property
    def phase(self) -> Phase:
        """ "scoring" while the draft computes, else "prefill"."""
        return "scoring" if self._scoring else "prefill"

    @property
    def started(self) -> bool:
        """True if anything was computed or loaded."""
        return self._seconds > 0 or self._prefill.started

    @property
    def total(self) -> int:
        """Tokens of the draft while it scores, else of the row's cache when the prefill is done. The other counts
        follow the same phase."""
        return self._scoring.total if self._scoring else len(self.row.request.tokens) - 1 - self.row.num_dropped

    @property
    def done(self) -> int:
        """Tokens computed or taken from a prefix cache."""
        return self.total - self.remaining

    @property
    def remaining(self) -> int:
        """Tokens left to compute in this phase."""
        if self._scoring:
            return self._scoring.remaining
        now = self._sparse or self._prefill
        return self.total - (now.total - now.remaining)

    @property
    def start(self) -> int:
        """Index of the first token that the row's cache needs and that is neither computed nor in the prefix cache."""
        return (self._sparse or self._prefill).start

    @property
    def cached(self) -> int:
        """Tokens taken from the prefix cache."""
        return self._prefill.cached

    def match_prefix(self) -> None:
        """Find the longest cached prefix. The first call also decides whether to use SpecPrefill."""
        self._prefill.match_prefix()
        if self._undecided:
            self._undecided = False
            with self._or_dense("The draft"):
                self._decide()

    def apply_prefix(self) -> None:
        """Load the prefixes found, for the model and for the draft. Blocks."""
        self._prefill.apply_prefix()
        if self._scoring:
            with self._or_dense("The draft"):
                self._scoring.apply_prefix()

    def advance(self, tokens: int) -> int:
        """Compute up to `tokens` tokens of the current phase. Blocks. Returns the number computed."""
        if self._scoring:
            with self._or_dense("The draft"):
                self._score(self._scoring, tokens)
        elif self.row.num_dropped:
            with self._or_dense("The prefill of the kept tokens"):
                return self._compute_kept(tokens)
        else:
            return self._prefill.advance(tokens)
        return tokens

    def pop_outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call: decisions, and the progress of this phase."""
        outcomes, self._outcomes = self._outcomes, []
        if self._scoring:
            return [*outcomes, Scored(self.row.id, self.done, self.total)]
        return [*outcomes, Prefilled(self.row.id, self.done, self.total, self.cached)]

    def finish(self) -> tuple[list[Any], PendingTokens, int | None]:
        """Return the row's cache, its next input, and its position, as `Prefill.finish` does."""
        return (self._rest() if self.row.num_dropped else self._prefill).finish()

    def _decide(self) -> None:
        # With the last token, which is computed when the row decodes.
        params, rest = self._params, self._prefill.remaining + 1
        prompt, num_scored = self.row.request.prompt, self._draft.num_scored
        start = len(prompt) - rest
        if rest < params.min_tokens:
            self._skip_specprefill(
                f"{rest:,} tokens were left to compute, fewer than the minimum of {params.min_tokens:,}."
            )
        elif tokens_in(self._required_ranges(start)) == rest:
            self._skip_specprefill(f"None of the {rest:,} tokens left to compute may be dropped.")
        elif num_scored(prompt) + LOOKAHEAD > self._draft.context:
            self._skip_specprefill(f"The prompt exceeds the draft's context of {self._draft.context:,} tokens.")
        elif not params.requested and not self._is_worthwhile(
            num_scored(prompt[start:]), rest, self._share_to_keep(start)
        ):
            self._skip_specprefill("Scoring would have taken longer than it saves.")
        else:
            request = self.row.request
            self._scoring = self._draft.scoring(request.namespace, request.prompt, request.boundaries)

    def _score(self, scoring: Scoring, tokens: int) -> None:
        began = time.perf_counter()
        scoring.advance(tokens)
        self._seconds += time.perf_counter() - began
        if scoring.scores is not None:
            self._apply(scoring.scores)

    def _apply(self, scores: Scores) -> None:
        kept = self._kept_ranges(scores, self._prefill.done)
        self._scoring = None
        self.row.drop_tokens(kept)
        self._prefill.truncate(dense_prefix_len(kept))
        self._outcomes.append(SpecPrefillApplied(self.row.id, kept, self._seconds))

    def _kept_ranges(self, scores: Scores, start: int) -> tuple[Range, ...]:
        """Return the ranges of the prompt to keep. `start`: number of first tokens that are computed already."""
        tokens = len(scores) - start
        required = [(first - start, end - start) for first, end in self._required_ranges(start)]
        chosen = select_ranges(scores[start:], self._share_to_keep(start), required)
        return tuple(merged([(0, start), *((first + start, end + start) for first, end in chosen)], tokens + start))

    def _required_ranges(self, start: int) -> list[Range]:
        """Return the ranges from `start` on that are kept whatever their scores: undroppable text, images, the last
        window."""
        tokens = len(self.row.request.prompt)
        end = tokens - max(1, window_of(make_prompt_cache(self._network)))
        droppable = [(max(first, start), min(behind, end)) for first, behind in self._params.droppable_ranges]
        # With one token on either side: the tokens that mark the beginning and end of an image.
        images = [(image.span[0] - 1, image.span[1] + 1) for image in self.row.request.images]
        required = [*outside(droppable, tokens), *images]
        return merged(((max(first, start), behind) for first, behind in required), tokens)

    def _share_to_keep(self, start: int) -> float:
        """Return the share of the tokens from `start` on to keep: all required ones, and the requested share of the
        others. A share of all tokens would leave the scores no choice if much is required."""
        tokens, num_required = len(self.row.request.prompt) - start, tokens_in(self._required_ranges(start))
        return (num_required + self._params.keep * (tokens - num_required)) / max(1, tokens)

    def _compute_kept(self, tokens: int) -> int:
        computed = self._prefill.advance(tokens)
        if not self._prefill.remaining:
            computed += self._rest().advance(max(0, tokens - computed))
        return computed

    def _rest(self) -> SparsePrefill:
        """Return the sparse prefill of what follows the dense prefix; created at the first call."""
        if self._sparse is None:
            assert self.row.request.kept_ranges is not None, "no tokens are dropped"
            kept, detached = self.row.request.kept_ranges, self._prefill.detach_cache()
            self._sparse = SparsePrefill(self._network, self.row, kept, *detached, self._inputs)
        return self._sparse

    @contextmanager
    def _or_dense(self, step: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever failed, the whole prompt can still be computed
            logger.exception("%s: SpecPrefill failed; computing the whole prompt", self.row.id)
            self._skip_specprefill(f"{step} failed; the worker's log has the reason.")
            self._prefill, self._sparse = Prefill(self._network, self.row, self._prefix, self._inputs), None

    def _skip_specprefill(self, reason: str) -> None:
        self._scoring = None
        self.row.keep_all_tokens()
        self._outcomes.append(SpecPrefillSkipped(self.row.id, reason))
