"""Reads an answer with a matcher of llguidance, and drafts after it with a matcher of their own.

A matcher's lexer keeps a state for each beginning of a word that it has tried, up to a limit, and copies of a matcher
share it. So drafts must not use the matcher of the answer: their states would end the answer sooner."""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from llguidance import LLMatcher

from worker.schedule.request import GrammarAhead
from worker.text.grammar.llg_tokenizer import ForcedText
from worker.text.grammar.reasoning import ReasoningState
from worker.text.grammar.sandbox import error_of

_ROLLBACK = 16  # tokens
_READ_AT_ONCE = 64  # tokens of an answer that a draft's matcher catches up with at once
_FORCED = 256  # tokens that are forced and known at once
# Seconds that drafts may take for each token of the answer. A mask of 150,000 tokens mostly takes less than a tenth of
# a millisecond.
_PER_TOKEN_S = 0.000_25
_AT_ONCE_S = 0.002  # that may be saved up
# Share of all time that drafts of all rows may take together, and the seconds of it that may be saved up: many rows may
# draft in the same step.
_SHARE = 0.25
_ALL_AT_ONCE_S = 0.01


class GrammarReader:
    """A matcher at a place of an answer, with the reasoning before it."""

    def __init__(
        self,
        matcher: LLMatcher,
        ends: frozenset[int],
        reasoning: ReasoningState | None,
        begun: Sequence[int],
        forced_text: ForcedText | None = None,
    ) -> None:
        """`ends`: tokens that end a sequence. `begun`: tokens of the answer proper that the prompt holds; call `reset`
        to read them. `forced_text`: reads long texts without a choice; None: the matcher does."""
        self._matcher, self._forced_text = matcher, forced_text
        self._ends = ends
        self._begun = begun
        self._first_reasoning = self._reasoning_state = reasoning
        self.accepted = 0  # tokens of the answer
        self._consumed = 0  # tokens that the matcher has read
        self._last: int | None = None  # the last of them
        # By token that was accepted last: the reasoning before it, and the tokens consumed before it: their number, and
        # the last.
        self._history = deque[tuple[ReasoningState | None, int, int | None]](maxlen=_ROLLBACK)

    def reset(self) -> bool:
        """Return to the state before the first sampled token. Returns False if the grammar does not allow what the
        prompt holds of the answer."""
        self._matcher.reset()
        self.accepted = self._consumed = 0
        self._last = None
        self._history.clear()
        self._reasoning_state = copy.copy(self._first_reasoning)
        return all(self._consume(token) for token in self._begun)

    def read(self, token: int) -> bool:
        """Advance by a token. Tokens that end the sequence are ignored. Returns False if the grammar does not allow the
        token, or has failed."""
        return not self._belongs_to_answer(token) or self._consume(token)

    def _belongs_to_answer(self, token: int) -> bool:
        """Record a token, and advance the reasoning. Return True if the matcher has to consume the token."""
        self.accepted += 1
        self._history.append((copy.copy(self._reasoning_state), self._consumed, self._last))
        if token in self._ends:  # a batch may compute one step more than a row needs
            return False
        if self._reasoning_state and self._reasoning_state.take(token):
            self._reasoning_state = None if self._reasoning_state.over else self._reasoning_state
            return False
        self._reasoning_state = None
        return True

    def _consume(self, token: int) -> bool:
        self._consumed += 1
        self._last = token
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, at most 16."""
        if count > len(self._history):
            raise ValueError(f"count: {count} tokens cannot be taken back; {len(self._history)} are recorded.")
        self.accepted -= count
        consumed = self._consumed
        for _ in range(count):
            self._reasoning_state, consumed, self._last = self._history.pop()
        if self._consumed > consumed:
            self._matcher.rollback(self._consumed - consumed)
            self._consumed = consumed

    def mask(self) -> bytes:
        """Return the tokens that may come next: see `GrammarState.bitmask`."""
        reasoning = self._reasoning_state
        if reasoning and reasoning.begun:
            return reasoning.allowed()
        mask = self._answer_mask()
        return _with_token(mask, reasoning.begins) if reasoning else mask

    def _answer_mask(self) -> bytes:
        if self._forced_text and (tokens := self._forced_text.tokens(self._matcher, self._last)):
            return self._forced_text.mask(tokens[0])
        return self._matcher.compute_bitmask()

    def forced(self) -> tuple[int, ...]:
        """Return tokens that must come next; none within reasoning."""
        if self._reasoning_state:
            return ()
        tokens = self._forced_text.tokens(self._matcher, self._last) if self._forced_text else []
        tokens = tokens or self._matcher.compute_ff_tokens()[:_FORCED]
        return tuple(takewhile(lambda token: token not in self._ends, tokens))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next: see `GrammarState.valid_prefix`."""
        reasoning = copy.copy(self._reasoning_state)
        for place, token in enumerate(tokens):
            if not reasoning or not (reasoning.begun or token == reasoning.begins):
                answer = list(takewhile(lambda token: token not in self._ends, tokens[place:]))
                return place + self._matcher.validate_tokens(answer)
            if token in self._ends or (reasoning.begun and not _allows(reasoning.allowed(), token)):
                return place
            reasoning.take(token)
            reasoning = None if reasoning.over else reasoning
        return len(tokens)

    @property
    def in_reasoning(self) -> bool:
        """True if the answer proper has not begun."""
        return self._reasoning_state is not None

    @property
    def error(self) -> str | None:
        """Error of the matcher. It never leaves it."""
        return error_of(self._matcher)

    def fail(self, token: int) -> None:
        """Make the matcher allow only the end of the sequence from here on. `token`: one that it does not allow."""
        self._matcher.consume_token(token)


class AllDraftsTime:
    """Time of the engine's thread that the drafts of all rows may take together: a share of the time that passes. For
    the engine's thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds that have passed."""
        self._now = now
        self._left_s = _ALL_AT_ONCE_S
        self._filled_at = now()

    @property
    def left(self) -> bool:
        """True if there is time for a draft."""
        now = self._now()
        self._left_s = min(self._left_s + (now - self._filled_at) * _SHARE, _ALL_AT_ONCE_S)
        self._filled_at = now
        return self._left_s > 0

    def take(self, seconds: float) -> None:
        """Record that a draft has taken so long."""
        self._left_s -= seconds


class DraftTime:
    """Time of the engine's thread that one row may take for drafts: an amount for each token of its answer, since the
    other rows of the batch wait for it. A context that measures some work. Work that takes longer is not interrupted;
    the row then takes no drafts until its answer has made up for it. So drafts of a schema that is slow to read hardly
    delay the others."""

    def __init__(self, clock: Callable[[], float], every: AllDraftsTime) -> None:
        """`clock`: seconds that the thread has computed. `every`: the time of all rows."""
        self._clock, self._all = clock, every
        self._left_s = _AT_ONCE_S
        self._tokens = 0
        self._began = 0.0

    @property
    def left(self) -> bool:
        """True if there is time for a draft."""
        return self._left_s > 0 and self._all.left

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *raised: object) -> None:
        taken_s = self._clock() - self._began
        self._left_s -= taken_s
        self._all.take(taken_s)

    def advance(self, tokens: int) -> None:
        """Add the time for the tokens that the answer has gained. `tokens`: of the answer."""
        gained = max(0, tokens - self._tokens)
        self._tokens += gained
        self._left_s = min(self._left_s + gained * _PER_TOKEN_S, _AT_ONCE_S)


class DraftReader:
    """Reads the drafts of one row. Follows its answer."""

    def __init__(self, reader: GrammarReader, time_left: DraftTime) -> None:
        """`reader`: of a matcher that has nothing in common with the answer's. `time_left`: for its drafts."""
        self._reader = reader
        self._time = time_left
        self._unread = list[int]()  # the last tokens of the answer
        self._failed = not reader.reset()

    def reset(self) -> None:
        """Return to the state before the first sampled token."""
        self._unread.clear()
        self._failed = self._failed or not self._reader.reset()

    def append(self, token: int) -> None:
        """Append a token of the answer, which is read before the next draft."""
        self._unread.append(token)
        self._time.advance(self._reader.accepted + len(self._unread))

    def remove(self, count: int) -> None:
        """Take back the last `count` tokens of the answer."""
        kept = max(0, len(self._unread) - count)
        count -= len(self._unread) - kept
        del self._unread[kept:]
        if count and not self._failed:
            self._reader.rollback(count)

    @property
    def ready(self) -> bool:
        """True if there is time for drafts, and none has exceeded the limits of the grammar."""
        return self._time.left and not self._failed

    def ahead(self, draft: Sequence[int], mask: bytes | None) -> GrammarAhead:
        """Return what may come after a draft: see `GrammarState.ahead`. `mask`: after the answer."""
        with self._time:
            if not self._follow():
                return GrammarAhead()
            self._read(draft)
            if self._reader.in_reasoning:
                found = GrammarAhead()
            elif forced := self._reader.forced():
                found = GrammarAhead(forced)
            else:
                found = GrammarAhead(mask=self._reader.mask() if draft else mask)
            self._take_back(len(draft))
        return GrammarAhead() if self._failed else found

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows: see `GrammarState.valid_prefix`."""
        with self._time:
            valid = self._reader.valid_prefix(tokens) if self._follow() else 0
            self._failed = self._failed or self._reader.error is not None
        return 0 if self._failed else valid

    def masks(self, draft: Sequence[int]) -> Iterator[bytes]:
        """Yield the masks after each token of a draft, which the grammar allows, until they take too much time."""
        walked = 0
        for token in draft:
            with self._time:
                walked += 1
                self._read([token])
                mask = self._reader.mask()
                self._failed = self._failed or self._reader.error is not None
            if self._failed:
                break
            yield mask
            if not self._time.left:
                break
        self._take_back(walked)

    def _read(self, tokens: Sequence[int]) -> None:
        allowed = [self._reader.read(token) for token in tokens]
        self._failed = self._failed or not all(allowed)

    def _take_back(self, count: int) -> None:
        self._failed = self._failed or self._reader.error is not None
        if not self._failed:  # else nothing is read any more
            self._reader.rollback(count)

    def _follow(self) -> bool:
        """Read the answer. Returns False if that has failed, or is not finished yet."""
        reading, self._unread = self._unread[:_READ_AT_ONCE], self._unread[_READ_AT_ONCE:]
        self._read(reading)
        return not self._unread and not self._failed


def _allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _with_token(mask: bytes, token: int) -> bytes:
    place = token // 8
    return mask[:place] + bytes([mask[place] | 1 << token % 8]) + mask[place + 1 :]
