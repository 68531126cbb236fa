"""SpecPrefill (arXiv 2502.02789): a draft model scores a long prompt, and only the important tokens are computed.

What the prefix cache holds of the prompt is used, and so are the first tokens, up to the first dropped one: these are
computed densely, and other requests may reuse them."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from worker.engine.prefill.scoring import LOOKAHEAD, DraftScorer, Scores, Scoring
from worker.engine.prefill.stage import Phase, Stage, StageProgress
from worker.outcomes import PromptProgress, SpecPrefillApplied, SpecPrefillSkipped
from worker.request import GenerationRequest, Range, SpecPrefillParams, tokens_in


def select_ranges(scores: Sequence[float], keep: float, protected: Iterable[Range] = ()) -> list[Range]:
    """Return the ranges to keep, ascending and separate. `scores`: one per token. `keep`: share of all tokens to keep,
    the protected ones included; less than a chunk more is kept. The protected tokens and the best chunk of each region
    without kept tokens are kept even if they exceed that share, so any gap is shorter than two regions."""
    tokens = len(scores)
    if keep >= 1:
        return merged_ranges([(0, tokens)], tokens)
    kept = merged_ranges(protected, tokens)
    # By its best token: relevant text is often shorter than a chunk, and a mean would dilute its score.
    best = sorted(_pieces(kept, tokens), key=lambda piece: -max(scores[slice(*piece)]))
    floor = _floor(kept, best)
    lacking = round(keep * tokens) - tokens_in(kept) - tokens_in(floor)
    return merged_ranges([*kept, *floor, *_first(lacking, best, set(floor))], tokens)


def merged_ranges(ranges: Iterable[Range], tokens: int) -> list[Range]:
    """Return the ranges clipped to (0, tokens), ascending, with those that touch or overlap merged."""
    apart: list[Range] = []
    for start, end in sorted((max(0, start), min(end, tokens)) for start, end in ranges):
        if start >= end:
            continue
        if apart and start <= apart[-1][1]:
            start, end = apart[-1][0], max(apart.pop()[1], end)
        apart.append((start, end))
    return apart


def outside(ranges: Iterable[Range], tokens: int) -> list[Range]:
    """Return the ranges of (0, tokens) that are in none of these ranges, ascending."""
    apart = [(0, 0), *merged_ranges(ranges, tokens), (tokens, tokens)]
    return [(start, end) for (_, start), (end, _) in pairwise(apart) if start < end]


def _pieces(kept: Sequence[Range], tokens: int) -> Iterator[Range]:
    """Yield the ranges between the kept ones, cut at the starts of chunks."""
    chunk = 16  # tokens. On the tiny model 8 and 16 gave similar results, and 32 worse ones if little was kept.
    for start, end in outside(kept, tokens):
        yield from pairwise([start, *range(start - start % chunk + chunk, end, chunk), end])


def _floor(kept: Iterable[Range], best: Iterable[Range]) -> list[Range]:
    """Return the best piece of each region without kept tokens. `best`: pieces, the best first."""
    length = 1024  # tokens of a region, a multiple of a chunk's
    covered = {region for start, end in kept for region in range(start // length, (end - 1) // length + 1)}
    floor: list[Range] = []
    for piece in best:
        if (region := piece[0] // length) not in covered:
            covered.add(region)
            floor.append(piece)
    return floor


def _first(tokens: int, best: Iterable[Range], there: set[Range]) -> Iterator[Range]:
    """Yield the best pieces that are not in `there`, until they have at least `tokens` tokens."""
    for start, end in best:
        if tokens <= 0:
            return
        if (start, end) not in there:
            yield start, end
            tokens -= end - start


IsWorthwhile = Callable[[int, int, float], bool]


class Score(Stage):
    """Decides if a prompt is scored, scores it with the draft, and chooses the tokens to keep."""

    phase: Phase = "scoring"
    exclusive = True  # a draft's cache takes memory

    def __init__(
        self,
        request: GenerationRequest,
        params: SpecPrefillParams,
        draft: DraftScorer,
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
    def report(self) -> PromptProgress:
        """The progress of the scoring."""
        return PromptProgress("scoring", self._request.id, self.done, self.total)

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

    def refresh(self, start: int) -> StageProgress | None:
        """Choose among the tokens from index `start` on. The first call decides if the prompt is scored, and returns
        the choice to keep all tokens if not."""
        self._start = start
        if self._scoring is None and (reason := self._why_not()):
            return StageProgress(0, SpecPrefillSkipped(self._request.id, reason))
        request = self._request
        self._scoring = self._scoring or self._draft.scoring(request.namespace, request.prompt, request.boundaries)
        return None

    def prepare(self) -> None:
        """Load the longest prefix from the draft's prefix cache. Blocks."""
        assert self._scoring is not None, "not decided yet"
        self._scoring.load_prefix()

    def advance(self, tokens: int) -> StageProgress:
        """Compute up to `tokens` tokens with the draft, or a single one of its lookahead. Blocks. Raises
        ArithmeticError if the draft's scores are not finite."""
        assert self._scoring is not None, "not decided yet"
        began = time.perf_counter()
        computed = self._scoring.advance(tokens)
        self._seconds += time.perf_counter() - began
        if self._scoring.scores is None:
            return StageProgress(computed)
        return StageProgress(
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
        return tuple(merged_ranges([(0, start), *((first + start, end + start) for first, end in chosen)], tokens))

    def _required_ranges(self) -> list[Range]:
        """Return the ranges that are kept whatever their scores: undroppable text, images, the last window."""
        start, tokens = self._start, len(self._request.prompt)
        droppable = [(max(first, start), min(end, self._end)) for first, end in self._params.droppable_ranges]
        # With one token on either side: the tokens that mark the beginning and end of an image.
        images = [(image.span[0] - 1, image.span[1] + 1) for image in self._request.images]
        required = [*outside(droppable, tokens), *images]
        return merged_ranges(((max(first, start), end) for first, end in required), tokens)

    def _share_to_keep(self) -> float:
        """Return the share of the tokens to keep: all required ones, and the requested share of the others. A share of
        all tokens would leave the scores no choice if much is required."""
        tokens, num_required = len(self._request.prompt) - self._start, tokens_in(self._required_ranges())
        return (num_required + self._params.keep * (tokens - num_required)) / max(1, tokens)
