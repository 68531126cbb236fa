"""Grammar state of an answer whose text is free, and whose calls are held to a grammar.

A call begins as the output parser reads it: at the text of an opening, whichever tokens spell it, or, without one, as
soon as the parser takes the text for a call. The parser is fed when a token may have completed an opening, within
calls, and where a bare one may begin; the other tokens of a row cost a look into a set.
"""

import codecs
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

from llguidance import LLMatcher

from worker.request import GrammarAhead, GrammarError
from worker.text.dialects.cursor import Cursor
from worker.text.dialects.dialect import CallBegan, CallEnded, Functions
from worker.text.dialects.json_calls import HeaderCalls
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.row.reader import ROLLBACK
from worker.text.output.formats import ModelFormat
from worker.text.output.harmony import unescape_markers
from worker.text.prompt.prompt import Thinking
from worker.text.tokenizer import Vocabulary

logger = logging.getLogger("sluice.text")

_SEPARATORS = " \t\r\n,;"  # between calls


class Openings:
    """Where calls may begin in the answers of one model; a worker has one."""

    def __init__(self, vocabulary: Vocabulary, model_format: ModelFormat, ends: frozenset[int]) -> None:
        """`ends`: tokens that end a sequence."""
        self.bytes_of, self.ends = vocabulary.bytes_of, ends
        self.format = model_format
        dialect = model_format.dialect if not model_format.harmony else None
        # Calls may follow others without an opening too.
        self.bare = dialect is not None and (bool(dialect.bare) or not dialect.closing)
        unmarked = isinstance(dialect, HeaderCalls) and dialect.unmarked
        self.left_out = model_format.openings[0] if unmarked else ""  # what models leave out before further calls
        # What ends calls opens some too, but text may follow it as well.
        sure = [each for each in model_format.openings if not (dialect and each == dialect.closing)]
        self.texts = re.compile("|".join(map(re.escape, sorted(sure, key=len, reverse=True))))
        # A bare call may begin after a thought.
        thought_ends = (model_format.think[1],) if model_format.think and self.bare else ()
        self._marks = tuple(each.encode() for each in (*model_format.openings, *thought_ends))
        self.reach = max(map(len, self._marks))  # bytes of the longest mark, so the tokens that may spell it
        rests = {mark[at:] for mark in self._marks for at in range(1, len(mark))}
        ending = [vocabulary.tokens_with(rest, first=True) for rest in rests]
        self.completing = frozenset(chain(*ending, *map(vocabulary.tokens_with, self._marks)))

    def completed(self, tokens: Sequence[int]) -> bool:
        """True if the last of these tokens may have completed a mark."""
        if not tokens or tokens[-1] not in self.completing:
            return False
        text = b"".join(map(self.bytes_of, tokens[-self.reach :]))[-self.reach - len(self.bytes_of(tokens[-1])) :]
        return any(mark in text for mark in self._marks)


class _CallSearch:
    """Reads one answer as the output parser does, and finds its calls."""

    def __init__(self, openings: Openings, thinking: Thinking, functions: Functions) -> None:
        self._openings = openings
        self._cursor = Cursor()
        reader = openings.format.reader(self._cursor, thinking, functions)
        assert reader is not None
        self._reader, self._events = reader, reader.read()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tried = False  # the opening of the call that is being read was found
        self.in_call = False  # its arguments have begun
        self.fed = list[int]()  # tokens

    @property
    def waits(self) -> bool:
        """True if the next token may begin a call without an opening, or belongs to a call, so it should be fed."""
        return self._reader.begun is not None or self._reader.may_be_bare

    def feed(self, tokens: Sequence[int]) -> str | None:
        """Read more tokens. Returns the text of a call that has begun with them, up to here; None if none has."""
        self.fed += tokens
        ends, bytes_of = self._openings.ends, self._openings.bytes_of
        for token in tokens:
            if token not in ends:
                self._cursor.add(self._openings.format.text_of(token, self._decoder.decode(bytes_of(token))))
        found = None
        for event in self._events:
            if event is None:
                break
            self._tried = False
            if isinstance(event, CallBegan | CallEnded):
                self.in_call = isinstance(event, CallBegan)
                found = self._beginning if self.in_call else None
        if found and not self._openings.texts.match(found):
            found = self._openings.left_out + found
        found = found or self._opened()
        return found if found and not self._decoder.getstate()[0] else None

    def _opened(self) -> str | None:
        """Return the text from an opening on that was found now. In a thought it may be a mention."""
        if self.in_call or self._tried or self._reader.reasons:
            return None
        self._tried = self._openings.texts.match(self._beginning) is not None
        return self._beginning if self._tried else None

    @property
    def _beginning(self) -> str:
        return unescape_markers(self._reader.begun or "").lstrip(_SEPARATORS)


@dataclass(slots=True)
class _Call:
    """A call that is held. `start`, `end`: tokens of the answer before it and up to its end; None: it has none."""

    start: int
    begun: Sequence[int]  # its first tokens, as the grammar reads them
    grammar: RowGrammar
    end: int | None = None


@dataclass(frozen=True, slots=True)
class CallMatchers:
    """What the calls of one row are held with."""

    matcher: LLMatcher
    drafts: LLMatcher | None
    tokens_of: Callable[[str], Sequence[int]]  # tokens of the beginning of a call, with the markers' own
    new_grammar: Callable[..., RowGrammar]

    def begin(self, text: str) -> tuple[Sequence[int], RowGrammar] | None:
        """Return the first tokens of a call with its grammar after them, or None if the grammar does not allow them."""
        tokens = self.tokens_of(text)
        if self.matcher.is_error():
            return None
        self.matcher.reset()
        return (tokens, self.resume(tokens)) if self.matcher.validate_tokens([*tokens]) == len(tokens) else None

    def resume(self, begun: Sequence[int]) -> RowGrammar:
        """Return the grammar after the first tokens of a call."""
        return self.new_grammar(self.matcher, begun=begun, drafts=self.drafts, then_free=True)


class CallsGrammar:
    """Grammar state of one row. Used by the engine's thread alone, except `error`."""

    def __init__(
        self,
        openings: Openings,
        thinking: Thinking,
        functions: Functions,
        matchers: "Future[CallMatchers | None]",
        *,
        strict: bool,
    ) -> None:
        """`functions`: those that the request offers. `matchers`: calls that begin before they are there, or without
        them, are free. `strict`: the answer fails if the grammar does; else what follows is free."""
        self._openings, self._completing = openings, openings.completing
        self._thinking, self._functions = thinking, functions
        self._matchers, self._strict = matchers, strict
        self._left_free = set[int]()  # starts of calls that began before the matchers were there
        self.error: GrammarError | None = None
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first sampled token."""
        self._tokens = list[int]()  # of the answer
        self._calls = list[_Call]()
        self._held: RowGrammar | None = None  # of the call that has no end yet
        self._search_again()

    def _search_again(self) -> None:
        self._search = _CallSearch(self._openings, self._thinking, self._functions)
        self._found = dict[int, str]()  # beginnings of calls, by the number of tokens of the answer up to there
        self._waits = self._search.waits

    @property
    def accepted(self) -> int:
        """Number of tokens of the answer that were accepted."""
        return len(self._tokens)

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        self._tokens.append(token)
        if self._held:
            self._hold(token)
        elif self._waits or token in self._completing:
            self._look()

    @property
    def is_free(self) -> bool:
        """True outside of calls."""
        return self._held is None

    def bitmask(self) -> bytes | None:
        """Return the mask of the next token within a call. None: any token may come."""
        if self._held is None:
            return None
        mask = self._held.bitmask()
        return mask if self._goes_on() else None

    def _look(self) -> None:
        """Hold a call if one begins with the last token."""
        if not self._waits and not self._openings.completed(self._tokens):
            return
        self._feed()
        text = self._found.get(len(self._tokens))
        if text is not None and self.error is None:
            self._begin(text)

    def _feed(self) -> None:
        """Let the search read what it has not. It may have read tokens that were taken back and come again."""
        count, fed = len(self._tokens), self._search.fed
        known = min(count, len(fed))
        changeable = slice(max(0, known - ROLLBACK), known)
        if fed[changeable] != self._tokens[changeable]:
            self._search_again()
            for place, token in enumerate(self._tokens[:-1], start=1):  # each alone, to find where calls begin
                self._record(place, [token])
            known = count - 1
        if known < count:
            self._record(count, self._tokens[known:])
        self._waits = self._search.waits or count < len(self._search.fed)

    def _record(self, count: int, tokens: Sequence[int]) -> None:
        if (found := self._search.feed(tokens)) is not None:
            self._found[count] = found

    def _begin(self, text: str) -> None:
        start = len(self._tokens)
        if not self._matchers.done() or start in self._left_free:
            self._left_free.add(start)
            return
        if (matchers := self._matchers.result()) and (begun := matchers.begin(text)):
            self._calls.append(_Call(start, *begun))
            self._held = begun[1]
            self._end_if_over()

    def _hold(self, token: int) -> None:
        assert self._held
        self._held.accept(token)
        self._feed()
        if self._goes_on():
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._held and self._held.over:
            self._calls[-1].end, self._held = len(self._tokens), None

    def _goes_on(self) -> bool:
        """Return False if the grammar has failed; then nothing is held any more."""
        if self._held is None or not (error := self._held.error):
            return True
        self._held = None
        if self._strict:
            self.error = error
        else:
            logger.info("a call is not held to its schema: %s", error.reason)
        return False

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted, at most 16."""
        if count == 0:
            return
        read = len(self._tokens)
        del self._tokens[-count:]
        self._waits = True  # the search is ahead
        self._held, others = None, False
        while self._calls and self._calls[-1].start > len(self._tokens):
            self._calls.pop()
            others = True
        if self._calls and (self._calls[-1].end or read) > len(self._tokens):
            self._return_to(self._calls[-1], self._calls[-1].end or read, anew=others)

    def _return_to(self, call: _Call, read: int, *, anew: bool) -> None:
        """Return to a place within a call, of which the grammar has read the tokens up to `read`. `anew`: its matcher
        has read others since."""
        call.end = None
        if anew:
            matchers = self._matchers.result()
            assert matchers is not None
            call.grammar = matchers.resume(call.begun)
            for token in self._tokens[call.start :]:
                call.grammar.accept(token)
        else:
            call.grammar.rollback(read - len(self._tokens))
        self._held = None if call.grammar.error else call.grammar

    @property
    def takes_drafts(self) -> bool:
        """True while text is free, or there is time for drafts of the call."""
        return self._held is None or self._held.takes_drafts

    def ahead(self, draft: Sequence[int]) -> GrammarAhead:
        """Return what may come after a draft; nothing while text is free."""
        return self._held.ahead(draft) if self._held else GrammarAhead()

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next, without those from the beginning of a call on."""
        if self._held:
            return self._held.valid_prefix(tokens)
        if self._waits and (self._openings.bare or not self._search.in_call):
            return 0
        reach = self._openings.reach
        for place, token in enumerate(tokens):
            if token in self._openings.ends:
                return place
            if token in self._completing and self._openings.completed([*self._tokens[-reach:], *tokens[: place + 1]]):
                return place
        return len(tokens)

    def masks_along(self, draft: Sequence[int]) -> list[bytes | None]:
        """Return the masks before each token of a draft and after the last, up to the next end or beginning of a call,
        and leave the state as it was."""
        if self.bitmask() is not None and self._held:
            return self._held.masks_along(draft)
        return [None] * (self.valid_prefix(draft) + 1)
