"""How long prompts take, and how much time a step has for them without holding up the rows that decode."""

from dataclasses import dataclass
from math import ceil, sqrt

from worker.schedule.fitting import LeastSquares
from worker.schedule.request import Lane

MIN_CHUNK, MAX_CHUNK = 16, 2048  # tokens of a chunk; beyond MOST a larger one is hardly faster
TOKENS_PER_S = 2000.0
# Where nobody decodes, nobody waits for the step but those who come or cancel in it.
ALONE_STEPS = 4
# While interactive prompts wait, a step may last 1 + this multiple of the time that decoding will take with their rows,
# even if it then misses its target: where decoding alone takes most of the target, they would wait for the answers of
# all others to end.
PROMPT_SHARE = 2.0
# But no step is planned to last longer than this multiple of the target, so a user who needs short gaps sets a short
# target.
MAX_STEP_STRETCH = 5
# A chunk is worth its pass over the weights if its tokens take at least this multiple of it.
MIN_TOKENS_TIME_PER_PASS = 1.0
_WEIGHT = 0.2  # of the newest measurement
_MAX_STALENESS = 1.25  # what is expected of a decode step is at most this multiple of what the last one took
_TOKENS_UNIT = 1e3  # tokens are counted in these, so that all unknowns are of one size
# That length costs nothing: while all prompts are alike, it is each token, and each row, that costs.
_PRIOR = 0.0, 0.1
_BYTES_UNIT = 1e8  # bytes are counted in these
_GROWTH_PRIOR = 1e-3  # faint: buffers grow rarely, and then it shows
_GUESS = 0.1  # of a measurement: what a guess weighs beside it, until there is one


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Seconds of a prompt's chunk, and of its joining those who decode, which copies it."""

    forward_s: float = 0.0  # of a chunk, before its first token: a pass over the weights
    token_s: float = 0.0
    before_s: float = 0.0  # for each token, and each one before it
    join_s: float = 0.0
    joined_s: float = 0.0  # for each token of the row
    grown_s: float = 0.0  # for each byte that is copied to make room for it

    def of(self, tokens: int, done: int) -> float:
        """A chunk; `done` tokens of its prompt are before it."""
        return self.forward_s + tokens * (self.token_s + (done + tokens / 2) * self.before_s)

    def join(self, tokens: int, growth: int = 0) -> float:
        return self.join_s + tokens * self.joined_s + growth * self.grown_s

    @property
    def worthwhile(self) -> int:
        """Tokens of the shortest chunk that is worth its pass over the weights; between `MIN_CHUNK` and `MAX_CHUNK`."""
        return max(MIN_CHUNK, min(MAX_CHUNK, ceil(MIN_TOKENS_TIME_PER_PASS * self.forward_s / max(self.token_s, 1e-9))))

    def within(self, seconds: float, done: int) -> int:
        """Tokens of the longest chunk that takes no longer; 0 where none does."""
        spare_s, first_s = seconds - self.forward_s, self.token_s + done * self.before_s
        if spare_s <= 0:
            return 0
        # Where `of` says all of it, written so that `before_s` may be 0.
        mean_s = (first_s + sqrt(first_s**2 + 2 * self.before_s * spare_s)) / 2
        return int(min(MAX_CHUNK, spare_s / max(mean_s, 1e-9)))


class StepBudget:
    """Keeps a step near its target, from what prompts and decoding took while running."""

    def __init__(self, step_s: float, tokens_per_s: float = TOKENS_PER_S, *, least: int = MIN_CHUNK) -> None:
        """`tokens_per_s`: a guess, until something was measured. `least`: of a chunk, for its speed to be measured:
        fewer tokens measure the overhead."""
        self._step_s, self._decode_s, self._least = step_s, 0.0, least
        self._tokens, self._joins = LeastSquares(_PRIOR), LeastSquares((*_PRIOR, _GROWTH_PRIOR))
        # Of the device just now: what a token takes in units of what it took on the whole. That part has to be known
        # soon, while how much dearer a token is deep in a prompt is told only by long prompts, which are rare.
        self._pace = 1.0
        self._tokens.observe((_GUESS, 0.0), _GUESS / tokens_per_s)
        self._joins.observe((_GUESS, 0.0, 0.0), 0.0)
        self.forward_s = 0.0

    def observe_chunk(self, tokens: int, done: int, seconds: float, *, cuts: int = 0) -> None:
        """`cuts` within the chunk, of which each took another pass over the weights."""
        seconds -= cuts * self.forward_s
        if tokens < self._least or seconds <= 0:
            return
        token_s, before = max(seconds - self.forward_s, seconds / 2) / tokens, (done + tokens / 2) / _TOKENS_UNIT
        usual_s, before_s = self._tokens.costs()
        pace = token_s / max(usual_s + before * before_s, 1e-9)
        self._tokens.observe((1.0, before), token_s / self._pace)
        self._pace += _WEIGHT * (min(pace, 2 * self._pace) - self._pace)

    def observe_join(self, tokens: int, growth: int, seconds: float) -> None:
        self._joins.observe((1.0, tokens / _TOKENS_UNIT, growth / _BYTES_UNIT), seconds)

    def observe_decode(self, seconds: float) -> None:
        self._decode_s += _WEIGHT * (seconds - self._decode_s)
        # After many rows have decoded, a few must not be held up for a share of what those took.
        self._decode_s = min(self._decode_s, _MAX_STALENESS * seconds)

    @property
    def cost(self) -> PromptCost:
        token_s, before_s = (self._pace * cost for cost in self._tokens.costs())
        join_s, joined_s, grown_s = self._joins.costs()
        return PromptCost(
            self.forward_s, token_s, before_s / _TOKENS_UNIT, join_s, joined_s / _TOKENS_UNIT, grown_s / _BYTES_UNIT
        )

    def spare_s(self, rows: int, lane: Lane, elapsed_s: float, slower: float = 1.0) -> float:
        """Seconds for this lane's prompts in a step beside `rows` that decode; `elapsed_s` since they began to. Both
        lanes share the step: what interactive prompts take, offline ones do not get. `slower`: how many times as long
        decoding will take once the rows of the waiting interactive prompts decode too."""
        if not rows:
            return ALONE_STEPS * self._step_s
        most_s = self._step_s
        if lane == "interactive":
            most_s = max(most_s, min((1 + PROMPT_SHARE) * slower * self._decode_s, MAX_STEP_STRETCH * self._step_s))
        return most_s - max(elapsed_s, self._decode_s)
