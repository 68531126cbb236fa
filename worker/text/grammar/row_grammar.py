"""Grammar state of a constrained answer, one for each row."""

import copy
from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from llguidance import LLMatcher

from worker.schedule.request import GrammarAhead, GrammarError
from worker.text.grammar.errors import grammar_error
from worker.text.grammar.reasoning import ReasoningState
from worker.text.grammar.sandbox import error_of

_ROLLBACK = 16  # tokens


class RowGrammar:
    """Grammar state of one row. Used by the engine thread alone, except `error`: llguidance raises if two threads use a
    matcher at once."""

    def __init__(
        self,
        matcher: LLMatcher,
        ends: frozenset[int],
        reasoning: ReasoningState | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        """`ends`: tokens that end a sequence. `begun`: tokens of the answer proper that the prompt holds."""
        self._matcher = matcher
        # A matcher never leaves an error, and a wrong draft must not leave one. Copies are cheap at the beginning only.
        self._unused = matcher.deep_copy()
        self._ends = ends
        self._begun = begun
        self._first_reasoning = reasoning
        self.error: GrammarError | None = None  # after it the grammar constrains nothing any more
        self._begin()

    def reset(self) -> None:
        """Return to the state before the first sampled token."""
        self._matcher.reset()
        self._begin()

    def _begin(self) -> None:
        self.accepted = 0  # tokens of the answer
        self._current: bytes | None = None  # mask of the next token, once it is computed
        self._consumed = list[int]()  # by the matcher
        # By token that was accepted last: the reasoning before it, and the number of tokens consumed before it.
        self._history = deque[tuple[ReasoningState | None, int]](maxlen=_ROLLBACK)
        self._reasoning_state = copy.copy(self._first_reasoning)
        for token in self._begun:
            self._consume(token)

    def accept(self, token: int) -> None:
        """Advance by a sampled token. Tokens that end the sequence are ignored."""
        if self._belongs_to_answer(token):
            self._consume(token)

    def _belongs_to_answer(self, token: int) -> bool:
        """Record a token, and advance the reasoning. Return True if the matcher has to consume the token."""
        self.accepted += 1
        self._current = None
        self._history.append((copy.copy(self._reasoning_state), len(self._consumed)))
        if token in self._ends:  # a batch may compute one step more than a row needs
            return False
        if self._reasoning_state and self._reasoning_state.take(token):
            self._reasoning_state = None if self._reasoning_state.over else self._reasoning_state
            return False
        self._reasoning_state = None
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted, at most 16. After an error nothing changes, since the
        grammar constrains nothing any more."""
        if count == 0 or self.error:
            return
        if count > len(self._history):
            raise ValueError(f"count: {count} tokens cannot be taken back; {len(self._history)} are recorded.")
        self.accepted -= count
        self._current = None
        for _ in range(count):
            reasoning, consumed = self._history.pop()
        self._reasoning_state = reasoning
        if len(self._consumed) > consumed:
            self._matcher.rollback(len(self._consumed) - consumed)
            del self._consumed[consumed:]

    def bitmask(self) -> bytes:
        """Return the mask of allowed next tokens: a bit per token, in little-endian 32-bit words."""
        if self._current is None:
            self._current = self._mask()
            self._check_error()
        return self._current

    def _mask(self) -> bytes:
        reasoning = self._reasoning_state
        if reasoning and reasoning.begun:
            return reasoning.allowed()
        mask = self._matcher.compute_bitmask()
        return _with_token(mask, reasoning.begins) if reasoning else mask

    def ahead(self, draft: Sequence[int]) -> GrammarAhead:
        """Return the tokens that must come after a draft, as the tokenizer splits the text that the grammar leaves no
        choice about, else the mask. Nothing within reasoning, or if the grammar exceeds its limits on the way."""
        if self.error:
            return GrammarAhead()
        current = self._current
        for token in draft:
            self._walk(token)
        found = GrammarAhead() if self._reasoning_state else self._answer_ahead()
        failed = self._matcher.is_error()
        self.rollback(len(draft))
        if draft:
            self._current = current
        if failed:
            self._recover()
        return GrammarAhead() if failed else found

    def _answer_ahead(self) -> GrammarAhead:
        tokens = self._matcher.compute_ff_tokens()
        forced = tuple(takewhile(lambda token: token not in self._ends, tokens))
        if forced:
            return GrammarAhead(forced)
        self._current = self._current or self._mask()
        return GrammarAhead(mask=self._current)

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, one after the other, the grammar allows. An end of the sequence is not
        counted, nor what comes after it."""
        if self.error:
            return 0
        reasoning = copy.copy(self._reasoning_state)
        for place, token in enumerate(tokens):
            if not reasoning or not (reasoning.begun or token == reasoning.begins):
                return place + self._valid_answer(tokens[place:])
            if token in self._ends or (reasoning.begun and not _allows(reasoning.allowed(), token)):
                return place
            reasoning.take(token)
            reasoning = None if reasoning.over else reasoning
        return len(tokens)

    def masks_along(self, draft: Sequence[int]) -> list[bytes | None]:
        """Return the masks before each token of a draft and after the last, and leave the state as it was. Fewer if the
        grammar does not allow the draft, or exceeds its limits on the way."""
        masks: list[bytes | None] = [self.bitmask()]
        if self.error:
            return masks
        walked = 0
        for token in draft[: self.valid_prefix(draft)]:
            self._walk(token)
            walked += 1
            mask = self._mask()
            if self._matcher.is_error():
                break
            masks.append(mask)
        failed = self._matcher.is_error()
        self.rollback(walked)
        if failed:
            self._recover()
        return masks

    def _walk(self, token: int) -> None:
        """Advance by a token of a draft, which is allowed. `error` stays as it is: other threads read it."""
        if self._belongs_to_answer(token):
            self._consumed.append(token)
            self._matcher.consume_token(token)

    def _valid_answer(self, tokens: Sequence[int]) -> int:
        answer = list(takewhile(lambda token: token not in self._ends, tokens))
        valid = self._matcher.validate_tokens(answer)
        if self._matcher.is_error():
            self._recover()
            return 0
        return valid

    def _recover(self) -> None:
        """Replace a matcher that has failed within a draft by one in the same state. Copies share the lexer, so if its
        limit is exceeded, which counts the states of all texts it has read, the row cannot continue."""
        self._matcher = self._unused.deep_copy()
        self._current = None
        self._matcher.consume_tokens(self._consumed)
        self._check_error()

    def _consume(self, token: int) -> None:
        if self.error:
            return
        self._consumed.append(token)
        if not self._matcher.try_consume_tokens([token]) and not self._matcher.is_error():
            self.error = GrammarError(f"token {token} was not allowed.", internal=True)
            self._matcher.consume_token(token)  # makes the matcher allow only the end from here on
        self._check_error()

    def _check_error(self) -> None:
        if self.error is None and (why := error_of(self._matcher)):
            self.error = GrammarError(grammar_error(why), internal=False)


def _allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _with_token(mask: bytes, token: int) -> bytes:
    place = token // 8
    return mask[:place] + bytes([mask[place] | 1 << token % 8]) + mask[place + 1 :]
