"""SpecPrefill (arXiv 2502.02789): a draft model scores a long prompt, and only the important tokens are computed.

What the prefix cache holds of the prompt is used, and so are the first tokens, up to the first dropped one: these are
computed densely, and other requests may reuse them."""

import time
from collections.abc import Callable

from worker.engine.prefill.scoring import LOOKAHEAD, Draft, Scores, Scoring
from worker.engine.prefill.stage import Ended, Phase, Progress, Stage
from worker.schedule.outcomes import Scored, SpecPrefillApplied, SpecPrefillSkipped
from worker.schedule.request import GenerationRequest, Range, SpecPrefillParams, tokens_in
from worker.schedule.selection import merged, outside, select_ranges

IsWorthwhile = Callable[[int, int, float], bool]


class Score(Stage):
    """Decides if a prompt is scored, scores it with the draft, and chooses the tokens to keep."""

    phase: Phase = Scored.phase
    exclusive = True  # a draft's cache takes memory

    def __init__(
        self,
        request: GenerationRequest,
        params: SpecPrefillParams,
        draft: Draft,
        is_worthwhile: IsWorthwhile,
        window: int,
        tokens_in_draft: Callable[[int], int],
    ) -> None:
        """`is_worthwhile(scored, tokens, keep)`: return True if scoring that many tokens, and computing the share
        `keep` of `tokens`, is faster than computing all. `window`: the last tokens, all of which are kept; images are
        never dropped either. `tokens_in_draft`: see `MemoryModel.draft_tokens`."""
        self._request = request
        self._params = params
        self._draft = draft
        self._is_worthwhile = is_worthwhile
        self._tokens_in_draft = tokens_in_draft
        self._end = len(request.prompt) - max(1, window)  # of what may be dropped
        self._scoring: Scoring | None = None
        self._start = 0
        self._seconds = 0.0

    @property
    def total(self) -> int:
        """Tokens that the draft computes or takes from its prefix cache; 0 before the decision."""
        return self._scoring.total if self._scoring else 0

    @property
    def remaining(self) -> int:
        """Tokens left for the draft to compute."""
        return self._scoring.remaining if self._scoring else 0

    @property
    def report(self) -> Scored:
        """The progress of the scoring."""
        return Scored(self._request.id, self.done, self.total)

    @property
    def fallback(self) -> SpecPrefillSkipped:
        """Keep all tokens if the scoring fails."""
        return SpecPrefillSkipped(self._request.id, "The draft failed; the worker's log has the reason.")

    @property
    def held_tokens(self) -> int:
        """Tokens of the model's own cache that take as much memory as the tokens done in the draft's."""
        return self._tokens_in_draft(self.done)

    @property
    def started(self) -> bool:
        """True if the draft's cache may hold tokens."""
        return self._seconds > 0

    def refresh(self, start: int) -> Ended | None:
        """Choose among the tokens from index `start` on. The first call decides if the prompt is scored, and returns
        `Ended` if not."""
        self._start = start
        if self._scoring is None and (reason := self._why_not()):
            return Ended(0, SpecPrefillSkipped(self._request.id, reason))
        request = self._request
        self._scoring = self._scoring or self._draft.scoring(request.namespace, request.prompt, request.boundaries)
        return None

    def prepare(self) -> None:
        """Load the longest prefix from the draft's prefix cache. Blocks."""
        assert self._scoring is not None, "not decided yet"
        self._scoring.load_prefix()

    def advance(self, tokens: int) -> Progress | Ended:
        """Compute up to `tokens` tokens with the draft, or a single one of its lookahead. Blocks. Raises
        ArithmeticError if the draft's scores are not finite."""
        assert self._scoring is not None, "not decided yet"
        began = time.perf_counter()
        computed = self._scoring.advance(tokens)
        self._seconds += time.perf_counter() - began
        if self._scoring.scores is None:
            return Progress(computed)
        return Ended(
            computed, SpecPrefillApplied(self._request.id, self._kept_ranges(self._scoring.scores), self._seconds)
        )

    def _why_not(self) -> str | None:
        """Return why the prompt is not scored; None if it is."""
        # With the last token, which is computed when the row decodes.
        params, prompt = self._params, self._request.prompt
        rest = len(prompt) - self._start
        if rest < params.min_tokens:
            return f"{rest:,} tokens were left to compute, fewer than the minimum of {params.min_tokens:,}."
        if tokens_in(self._required_ranges()) == rest:
            return f"None of the {rest:,} tokens left to compute may be dropped."
        if self._draft.num_scored(prompt) + LOOKAHEAD > self._draft.context:
            return f"The prompt exceeds the draft's context of {self._draft.context:,} tokens."
        worthwhile = params.requested or self._is_worthwhile(
            self._draft.num_scored(prompt[self._start :]), rest, self._share_to_keep()
        )
        return None if worthwhile else "Scoring would have taken longer than it saves."

    def _kept_ranges(self, scores: Scores) -> tuple[Range, ...]:
        """Return the ranges of the prompt to keep."""
        start, tokens = self._start, len(scores)
        required = [(first - start, end - start) for first, end in self._required_ranges()]
        chosen = select_ranges(scores[start:], self._share_to_keep(), required)
        return tuple(merged([(0, start), *((first + start, end + start) for first, end in chosen)], tokens))

    def _required_ranges(self) -> list[Range]:
        """Return the ranges that are kept whatever their scores: undroppable text, images, the last window."""
        start, tokens = self._start, len(self._request.prompt)
        droppable = [(max(first, start), min(end, self._end)) for first, end in self._params.droppable_ranges]
        # With one token on either side: the tokens that mark the beginning and end of an image.
        images = [(image.span[0] - 1, image.span[1] + 1) for image in self._request.images]
        required = [*outside(droppable, tokens), *images]
        return merged(((max(first, start), end) for first, end in required), tokens)

    def _share_to_keep(self) -> float:
        """Return the share of the tokens to keep: all required ones, and the requested share of the others. A share of
        all tokens would leave the scores no choice if much is required."""
        tokens, num_required = len(self._request.prompt) - self._start, tokens_in(self._required_ranges())
        return (num_required + self._params.keep * (tokens - num_required)) / max(1, tokens)
