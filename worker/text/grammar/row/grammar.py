"""Grammar state of a constrained answer, one for each row."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from llguidance import LLMatcher

from worker.request import GrammarAhead, GrammarError
from worker.text.grammar.llg_tokenizer import ForcedText
from worker.text.grammar.row.reader import FiniteNumbers, GrammarReader
from worker.text.grammar.row.thought import ThoughtState
from worker.text.grammar.trial import grammar_error


class AllDraftsTime:
    """Time of the engine's thread that the drafts of all rows may take together: a share of the time that passes. For
    the engine's thread."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, *, share: float = 0.25, at_once_s: float = 0.01
    ) -> None:
        """`now`: seconds that have passed. `at_once_s`: that may be saved up: many rows may draft in the same step."""
        self._now = now
        self._share, self._at_once_s = share, at_once_s
        self._taken_at = now()
        self._left_then_s = at_once_s

    @property
    def left(self) -> bool:
        """True if there is time for a draft."""
        return self._left_s(self._now()) > 0

    def _left_s(self, now: float) -> float:
        return min(self._left_then_s + (now - self._taken_at) * self._share, self._at_once_s)

    def take(self, seconds: float) -> None:
        """Record that a draft has taken so long."""
        now = self._now()
        self._left_then_s = self._left_s(now) - seconds
        self._taken_at = now


class DraftTime:
    """Time of the engine's thread that one row may take for drafts: an amount for each token of its answer, since the
    other rows of the batch wait for it. A context that measures some work. Work that takes longer is not interrupted;
    the row then takes no drafts until its answer has made up for it. So drafts of a schema that is slow to read hardly
    delay the others."""

    def __init__(self, clock: Callable[[], float], every: AllDraftsTime, *, at_once_s: float = 0.002) -> None:
        """`clock`: seconds that the thread has computed. `every`: the time of all rows. `at_once_s`: that may be saved
        up."""
        self._clock, self._all = clock, every
        self._left_s = self._at_once_s = at_once_s
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
        # Seconds for each token: a mask of 150,000 tokens mostly takes less than a tenth of a millisecond.
        self._left_s = min(self._left_s + gained * 0.000_25, self._at_once_s)


# Reads the drafts of a row, with a matcher of their own.
#
# A matcher's lexer keeps a state for each beginning of a word that it has tried, up to a limit, and copies of a
# matcher share it. So drafts must not use the matcher of the answer: their states would end the answer sooner.


class _DraftReader:
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
            if self._reader.in_thought:
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

    def masks(self, draft: Sequence[int]) -> Iterator[bytes | None]:
        """Yield the masks after each token of a draft, which the grammar allows, until they take too much time, or the
        grammar is over."""
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
            if mask is None or not self._time.left:
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
        reading, self._unread = self._unread[:64], self._unread[64:]  # at once before a draft
        self._read(reading)
        return not self._unread and not self._failed


class RowGrammar:
    """Grammar state of one row. Used by the engine thread alone, except `error`: llguidance raises if two threads use a
    matcher at once."""

    def __init__(
        self,
        matcher: LLMatcher,
        ends: frozenset[int],
        thought: ThoughtState | None = None,
        begun: Sequence[int] = (),
        *,
        drafts: LLMatcher | None = None,
        clock: Callable[[], float] = time.thread_time,
        drafts_time: AllDraftsTime | None = None,
        forced_text: ForcedText | None = None,
        numbers: FiniteNumbers | None = None,
        then_free: bool = False,
    ) -> None:
        """`ends`: tokens that end a sequence. `begun`: tokens of the answer proper that the prompt holds. `drafts`:
        another matcher of the same grammar, compiled anew, which reads drafts; None: the row takes none. `clock`:
        seconds that the engine's thread has computed. `drafts_time`: shared with all other rows; None: with none.
        `forced_text`, `numbers`, `then_free`: see `GrammarReader`."""
        reader = partial(
            GrammarReader, ends=ends, begun=begun, forced_text=forced_text, numbers=numbers, then_free=then_free
        )
        self._answer = reader(matcher, thought=thought)
        self._drafts: _DraftReader | None = None
        if drafts:
            time_left = DraftTime(clock, drafts_time or AllDraftsTime())
            self._drafts = _DraftReader(reader(drafts, thought=thought), time_left)
        self._begun = begun
        self._current: bytes | None = None  # mask of the next token, once it is computed
        self.error: GrammarError | None = None  # after it the grammar constrains nothing any more
        self._begin()

    def reset(self) -> None:
        """Return to the state before the first sampled token."""
        if self._drafts:
            self._drafts.reset()
        self._begin()

    def _begin(self) -> None:
        self._current = None
        if not self._answer.reset():
            self._refuse(self._begun[-1])
        self._check()

    @property
    def accepted(self) -> int:
        """Number of tokens of the answer that were accepted."""
        return self._answer.accepted

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Tokens that end the sequence are ignored."""
        self._current = None
        if not self._answer.read(token):
            self._refuse(token)
        self._check()
        if self._drafts:
            self._drafts.append(token)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted, at most 16. After an error nothing changes, since the
        grammar constrains nothing any more."""
        if count == 0 or self.error:
            return
        self._answer.rollback(count)
        self._current = None
        if self._drafts:
            self._drafts.remove(count)

    @property
    def over(self) -> bool:
        """True if the grammar has ended, and what comes after it is free."""
        return self._answer.over

    def bitmask(self) -> bytes | None:
        """Return the mask of allowed next tokens: a bit per token, in little-endian 32-bit words. None: any token,
        since the grammar is over."""
        if self._current is None:
            self._current = self._answer.mask()
            self._check()
        return self._current

    @property
    def is_free(self) -> bool:
        """False: each token has a mask."""
        return False

    @property
    def takes_drafts(self) -> bool:
        """True if there is time for drafts, and none has exceeded the limits of the grammar."""
        return self._drafts is not None and self._drafts.ready and not self.error

    def ahead(self, draft: Sequence[int]) -> GrammarAhead:
        """Return the tokens that must come after a draft, as the tokenizer splits the text that the grammar leaves no
        choice about, else the mask. Nothing within a thought, or if the grammar exceeds its limits on the way."""
        if self._drafts is None or not self.takes_drafts:
            return GrammarAhead()
        return self._drafts.ahead(draft, None if draft else self.bitmask())

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, one after the other, the grammar allows. An end of the sequence is not
        counted, nor what comes after it."""
        return self._drafts.valid_prefix(tokens) if self._drafts and self.takes_drafts else 0

    def masks_along(self, draft: Sequence[int]) -> list[bytes | None]:
        """Return the masks before each token of a draft and after the last, and leave the state as it was. Fewer if the
        grammar does not allow the draft, exceeds its limits on the way, or takes too much time."""
        masks: list[bytes | None] = [self.bitmask()]
        if self._drafts and self.takes_drafts:
            masks += self._drafts.masks(draft[: self._drafts.valid_prefix(draft)])
        return masks

    def _refuse(self, token: int) -> None:
        """Record that a token was not allowed, unless the matcher has failed."""
        if self.error is None and self._answer.error is None:
            self.error = GrammarError(f"token {token} was not allowed.", internal=True)
            self._answer.fail(token)

    def _check(self) -> None:
        """Record an error of the matcher."""
        if self.error is None and (why := self._answer.error):
            self.error = GrammarError(grammar_error(why), internal=False)
