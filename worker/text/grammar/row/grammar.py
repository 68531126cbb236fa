"""Grammar state of a constrained answer, one for each row."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from llguidance import LLMatcher

from worker.request import GrammarAhead, GrammarError
from worker.text.grammar.errors import grammar_error
from worker.text.grammar.llg_tokenizer import ForcedText
from worker.text.grammar.row.draft_reader import DraftReader
from worker.text.grammar.row.draft_time import AllDraftsTime, DraftTime
from worker.text.grammar.row.numbers import FiniteNumbers
from worker.text.grammar.row.reader import GrammarReader
from worker.text.grammar.row.thought_mask import ThoughtState


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
        self._drafts: DraftReader | None = None
        if drafts:
            time_left = DraftTime(clock, drafts_time or AllDraftsTime())
            self._drafts = DraftReader(reader(drafts, thought=thought), time_left)
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
