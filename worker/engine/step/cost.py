"""What a step computes besides decoding, and the measured seconds of it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from worker.engine.fitting import LeastSquares
from worker.engine.step.tuning import CLASSES, MAX_CHUNK, MIN_CHUNK, PACE_WEIGHT

_TOKENS_UNIT = 1e3  # tokens are counted in this unit, so that all unknowns have similar magnitude
_BYTES_UNIT = 1e8  # bytes are counted in this unit


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Seconds that a prompt's chunk takes, and that its row takes to join the decoding rows, which copies its cache."""

    forward_s: float = 0.0  # fixed cost of a chunk: a pass over the weights
    token_s: float = 0.0  # for each token of the chunk
    before_s: float = 0.0  # for each pair of a token of the chunk and one before it
    join_s: float = 0.0  # fixed cost of a join
    joined_s: float = 0.0  # for each token of the joining row
    grown_s: float = 0.0  # for each byte of the batch's buffers that is copied to make room for the row

    def chunk_s(self, tokens: int, done: int) -> float:
        """Return the seconds that a chunk takes after `done` tokens of its prompt."""
        return self.forward_s + tokens * (self.token_s + (done + tokens / 2) * self.before_s)

    def rest_s(self, remaining: int, done: int) -> float:
        """Return the seconds that the rest of a prompt takes in a forward of its own; 0 if only its join is left."""
        return 0.0 if done and not remaining else self.chunk_s(remaining, done)

    def joining_s(self, tokens: int, growth: int = 0) -> float:
        """Return the seconds that a row of `tokens` tokens takes to join, if `growth` bytes of buffers are copied."""
        return self.join_s + tokens * self.joined_s + growth * self.grown_s

    @property
    def worthwhile(self) -> int:
        """Length in tokens of the shortest chunk that is worth its pass over the weights: its tokens take as long as
        the pass. Between `MIN_CHUNK` and `MAX_CHUNK`."""
        return max(MIN_CHUNK, min(MAX_CHUNK, ceil(self.forward_s / max(self.token_s, 1e-9))))

    def longest_chunk(self, seconds: float, done: int) -> int:
        """Return the length in tokens of the longest chunk that takes at most `seconds`, after `done` tokens of its
        prompt. At most `MAX_CHUNK`; 0 if no chunk is that short."""
        spare_s, first_s = seconds - self.forward_s, self.token_s + done * self.before_s
        if spare_s <= 0:
            return 0
        # The solution of `chunk_s(tokens, done) == seconds`, written so that `before_s` may be 0.
        mean_s = (first_s + sqrt(first_s**2 + 2 * self.before_s * spare_s)) / 2
        return int(min(MAX_CHUNK, spare_s / max(mean_s, 1e-9)))


class CostEstimate:
    """Learns what the chunks of prompts in one phase cost, and the joins of their rows."""

    def __init__(self, tokens_per_s: float = 2000.0, *, least: int = MIN_CHUNK) -> None:
        """`tokens_per_s`: speed assumed before any measurement, by default that of a small model on a laptop. `least`:
        tokens of the shortest chunk that is measured; shorter chunks mostly measure overhead."""
        self._least = least
        self.is_measured = False  # until a chunk is
        # Priors: while all prompts have the same length, cost is assigned to tokens and rows. Weak for what few
        # measurements tell: a pass, by two chunks of different length, and the growth of a buffer, by one. test_cost.
        length_prior = 0.0, 0.1
        self._tokens, self._joins = LeastSquares(length_prior), LeastSquares((*length_prior, 1e-3))
        self._passes = LeastSquares((1e-3, 1e-3))  # seconds of chunks by their passes and tokens
        # Current time of a token relative to its long-term average. It follows changes of the device quickly, while the
        # cost of a token's position is measured only by long prompts, which are rare.
        self._pace = 1.0
        weight = 0.1  # of what is assumed, in measurements
        copied_bytes_per_s = 2e9  # a memcpy on 2 cores took less
        self._tokens.observe((weight, 0.0), weight / tokens_per_s)
        self._joins.observe((weight, 0.0, 0.0), 0.0)
        self._joins.observe((0.0, 0.0, weight), weight * _BYTES_UNIT / copied_bytes_per_s)
        self._forward_s = 0.0  # seconds of a pass over the weights
        self._most_forward_s = 0.0  # upper limit of that

    @property
    def now(self) -> PromptCost:
        """The current estimate."""
        token_s, before_s = (self._pace * cost for cost in self._tokens.costs())
        join_s, joined_s, grown_s = self._joins.costs()
        return PromptCost(
            self._forward_s, token_s, before_s / _TOKENS_UNIT, join_s, joined_s / _TOKENS_UNIT, grown_s / _BYTES_UNIT
        )

    def observe_chunk(self, tokens: int, done: float, seconds: float, *, cuts: int = 0, rows: int = 1) -> None:
        """Record the measured seconds of a chunk of `tokens`, after `done` tokens of its prompt. `cuts`: number of cuts
        within the chunk, each of which took another pass over the weights. `rows`: number of prompts that computed such
        a chunk in one forward; `done` is their mean then."""
        if rows * tokens < self._least:
            return
        before = (done + tokens / 2) / _TOKENS_UNIT
        self._observe_passes(1 + cuts, rows * tokens, before, seconds)
        seconds -= cuts * self._forward_s
        if seconds <= 0:
            return
        self.is_measured = True
        token_s = max(seconds - self._forward_s, seconds / 2) / (rows * tokens)
        usual_s, before_s = self._tokens.costs()
        pace = token_s / max(usual_s + before * before_s, 1e-9)
        self._tokens.observe((1.0, before), token_s / self._pace)
        pace = min(pace, 2 * self._pace)
        self._pace += PACE_WEIGHT * (pace - self._pace)

    def _observe_passes(self, passes: int, tokens: int, before: float, seconds: float) -> None:
        """Learn from a chunk what a pass over the weights costs. `before`: tokens before it, in `_TOKENS_UNIT`."""
        _, before_s = self._tokens.costs()
        # Hundreds of tokens, so that both unknowns have similar magnitude.
        self._passes.observe((passes, tokens / 100), seconds / self._pace - tokens * before * before_s)
        self._forward_s = min(self._most_forward_s, self._pace * self._passes.costs()[0])

    def observe_forward(self, seconds: float) -> None:
        """Record the estimated seconds of a decode step of one row: a pass over the weights takes at most as long.
        Before the first record, as in phases that have none, a pass counts as free."""
        self._most_forward_s = seconds
        self._forward_s = min(seconds, self._forward_s or seconds)

    def observe_join(self, tokens: int, growth: int, seconds: float) -> None:
        """Record the measured seconds of a row's join. `tokens`: its length; `growth`: bytes of buffers copied."""
        self._joins.observe((1.0, tokens / _TOKENS_UNIT, growth / _BYTES_UNIT), seconds)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens that one prompt advances by in a step."""

    id: str
    tokens: int
    joins: bool = False  # prefill is finished with this chunk, and the row joins the decoding rows


@dataclass(frozen=True, slots=True)
class Forward:
    """Chunks that are computed together. Several chunks belong to prompts with the same `pack`, have at least one token
    and, unless these are `padded`, the same number of tokens. None of them crosses a cut of its prompt, although it may
    end at one."""

    chunks: tuple[PromptChunk, ...]
    seconds: float = 0.0  # expected, with the joins of its rows and the time that these add to the decode step


@dataclass(frozen=True, slots=True)
class StepKind:
    """What the time of a step depends on. Steps of one kind may be underestimated alike."""

    joins: bool = False  # rows join the decoding ones
    shared: bool = False  # several prompts share a forward


PLAIN_STEP = StepKind()


def step_kind(forwards: Sequence[Forward]) -> StepKind:
    """Return the kind of a step that computes these forwards."""
    joins = any(chunk.joins for forward in forwards for chunk in forward.chunks)
    return StepKind(joins, shared=any(len(forward.chunks) > 1 for forward in forwards))


class StepTimes:
    """Shortest decode steps of the last minute, for each class of rows. Other work of a machine makes steps longer, and
    none shorter, so the shortest compare machines; one that has other work all the time has no short steps."""

    def __init__(self) -> None:
        # By class, the steps that are shorter than all after them: seconds, and when they were measured.
        self._least = tuple(deque[tuple[float, float]]() for _ in range(CLASSES))
        self._counts = [0] * CLASSES  # steps since the class had none

    def observe(self, rows: int, seconds: float, now: float) -> None:
        """Record the measured seconds of a decode step of `rows`, unless it has no rows, or unknown seconds: 0.
        `now`: seconds of any clock that never goes back."""
        if not rows or not seconds:
            return
        place = min(rows.bit_length(), CLASSES) - 1
        least = self._of_last_minute(place, now)
        self._counts[place] = self._counts[place] + 1 if least else 1
        while least and least[-1][0] >= seconds:
            least.pop()
        least.append((seconds, now))

    def seconds(self, now: float) -> tuple[float, ...]:
        """Return the seconds of each class; 0 if it has too few steps."""
        each = [self._of_last_minute(place, now) for place in range(CLASSES)]
        # A few may all be slow: a worker whose first two steps took 44 and 178 ms instead of 5 got none of the bursts
        # of the next minute, so it measured no others.
        return tuple(
            least[0][0] if least and count >= 8 else 0.0 for least, count in zip(each, self._counts, strict=True)
        )

    def _of_last_minute(self, place: int, now: float) -> deque[tuple[float, float]]:
        """Forget the steps of a class that are older, since a machine may get other work, and return the others."""
        least = self._least[place]
        while least and now - least[0][1] >= 60.0:
            least.popleft()
        return least
