"""Reads a row's tokens with a matcher of llguidance."""

import copy
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import isinf

from llguidance import LLMatcher

from worker.text.grammar.llg_tokenizer import ForcedText
from worker.text.grammar.row.thought import ThoughtState
from worker.text.grammar.sandbox import error_of

# Keeps the numbers of answers in JSON within a double.
#
# A grammar of llguidance (1.9) allows any digits and exponents where the schema bounds nothing, and readers of JSON
# take 1e400 for infinity. What the grammar allows is narrowed here, by the text of the number that has begun.


_PART = frozenset(b"+-.0123456789eE")
_DIGIT = re.compile(rb"[0-9]")
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_BEGINNING = re.compile(rb"[+.0-9eE-]+")  # what a token adds to a number that has begun
_EXPONENT = re.compile(rb"[eE]\+?[0-9]{2}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in an answer: what came last of its JSON."""

    in_json: bool  # else nothing of it has begun
    in_string: bool = False
    escaped: bool = False  # by a backslash
    number: bytes = b""  # what has been written of a number

    def after(self, text: bytes) -> "_Place":
        """Return the place after a token with this text."""
        in_json, number = self.in_json, bytearray(self.number)
        in_string, escaped = self.in_string, self.escaped
        for byte in text:
            if escaped:
                escaped = False
            elif in_string:
                in_string, escaped = byte != _QUOTE, byte == _BACKSLASH
            elif byte in _PART:
                number.append(byte)
            else:
                number.clear()
                in_json = in_json or byte in _OPENINGS
                in_string = in_json and byte == _QUOTE
        return _Place(in_json, in_string, escaped, bytes(number))


_QUOTE, _BACKSLASH = b'"\\'
_OPENINGS = b"[{"


class FiniteNumbers:
    """The tokens of one vocabulary that continue numbers."""

    def __init__(self, bytes_of: Callable[[int], bytes], count: int, markers: Iterable[int], *, begun: bool) -> None:
        """`bytes_of`: returns a token's bytes. `count`: tokens in a mask. `markers`: tokens after which other JSON
        begins. `begun`: the answer begins with JSON; else other texts may precede its first bracket."""
        self._bytes_of, self._markers = bytes_of, frozenset(markers)
        self.begins = _Place(begun)
        self._continuing = defaultdict[bytes, list[int]](list)  # tokens by what they add to a number
        self._infinite = list[int]()  # tokens that hold a whole number beyond a double
        for token in range(count):
            text = bytes_of(token)
            if not _DIGIT.search(text):
                continue
            if adds := _BEGINNING.match(text):
                self._continuing[adds[0]].append(token)
            if any(map(_is_infinite, _NUMBER.findall(text))):
                self._infinite.append(token)
        self._with_exponents = [adds for adds in self._continuing if _EXPONENT.search(adds)]

    def after(self, place: _Place, token: int) -> _Place:
        """Return the place after this token."""
        return self.begins if token in self._markers else place.after(self._bytes_of(token))

    def allows(self, place: _Place, token: int) -> bool:
        """Return False if a number would exceed a double after this token."""
        return place.in_string or not place.in_json or token not in self._barred(place)

    def narrowed(self, mask: bytes, place: _Place) -> bytes:
        """Return a mask without the tokens after which a number would exceed a double. A mask of nothing else stays as
        it is: a multiple of 1000 has to end with zeros."""
        if place.in_string or not place.in_json or not (barred := self._barred(place)):
            return mask
        left = bytearray(mask)
        for token in barred:
            left[token // 8] &= ~(1 << token % 8)
        return bytes(left) if left.count(0) < len(left) else mask

    def _barred(self, place: _Place) -> list[int]:
        number = place.number
        if not number:
            return self._infinite
        # Any token without an exponent may be added to a number of up to 100 bytes that has none.
        is_long = len(number) > 100 or b"e" in number.lower()
        if len(number) > 1000 and number[-1:].isdigit():  # its digits would else never end
            beyond = [*self._continuing]
        else:
            beyond = [
                adds
                for adds in (self._continuing if is_long else self._with_exponents)
                if (written := _NUMBER.match(number + adds)) and _is_infinite(written[0])
            ]
        return [*self._infinite, *(token for adds in beyond for token in self._continuing[adds])]


def _is_infinite(number: bytes) -> bool:
    return isinf(float(number))


ROLLBACK = 16  # tokens that can be taken back: see `GrammarState.rollback`


class GrammarReader:
    """A matcher at a place of an answer, with the thought before it."""

    def __init__(
        self,
        matcher: LLMatcher,
        ends: frozenset[int],
        thought: ThoughtState | None,
        begun: Sequence[int],
        forced_text: ForcedText | None = None,
        numbers: FiniteNumbers | None = None,
        *,
        then_free: bool = False,
    ) -> None:
        """`ends`: tokens that end a sequence. `begun`: tokens of the answer proper that the prompt holds; call `reset`
        to read them. `forced_text`: reads long texts without a choice; None: the matcher does. `numbers`: of an answer
        in JSON. `then_free`: any token may come as soon as the grammar may end."""
        self._then_free = then_free
        self._matcher, self._forced_text = matcher, forced_text
        self._numbers = numbers
        self._place = numbers.begins if numbers else None
        self._ends = ends
        self._begun = begun
        self._first_thought = self._thought_state = thought
        self.accepted = 0  # tokens of the answer
        self._consumed = 0  # tokens that the matcher has read
        self._last: int | None = None  # the last of them
        # By token that was accepted last: the thought before it, and the tokens consumed before it: their number, the
        # last, and the place after them.
        self._history = deque[tuple[ThoughtState | None, int, int | None, _Place | None]](maxlen=ROLLBACK)

    def reset(self) -> bool:
        """Return to the state before the first sampled token. Returns False if the grammar does not allow what the
        prompt holds of the answer."""
        self._matcher.reset()
        self.accepted = self._consumed = 0
        self._last = None
        self._place = self._numbers.begins if self._numbers else None
        self._history.clear()
        self._thought_state = copy.copy(self._first_thought)
        return all(self._consume(token) for token in self._begun)

    def read(self, token: int) -> bool:
        """Advance by a token. Tokens that end the sequence are ignored. Returns False if the grammar does not allow the
        token, or has failed."""
        return not self._record(token) or self._consume(token)

    def _record(self, token: int) -> bool:
        """Record a token, and advance the thought. Return True if the matcher has to consume the token."""
        self.accepted += 1
        self._history.append((copy.copy(self._thought_state), self._consumed, self._last, self._place))
        if token in self._ends or self.over:  # a batch may compute one step more than a row needs
            return False
        if self._thought_state and self._thought_state.take(token):
            self._thought_state = None if self._thought_state.over else self._thought_state
            return False
        self._thought_state = None
        return True

    def _consume(self, token: int) -> bool:
        self._consumed += 1
        self._last = token
        if self._numbers and self._place:
            self._place = self._numbers.after(self._place, token)
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, at most 16."""
        if count > len(self._history):
            raise ValueError(f"count: {count} tokens cannot be taken back; {len(self._history)} are recorded.")
        self.accepted -= count
        consumed = self._consumed
        for _ in range(count):
            self._thought_state, consumed, self._last, self._place = self._history.pop()
        if self._consumed > consumed:
            self._matcher.rollback(self._consumed - consumed)
            self._consumed = consumed

    def mask(self) -> bytes | None:
        """Return the tokens that may come next: see `GrammarState.bitmask`."""
        if self.over:
            return None
        thought = self._thought_state
        if thought and thought.begun:
            return thought.allowed()
        mask = self._answer_mask()
        return mask if thought is None or thought.begins is None else _with_token(mask, thought.begins)

    def _answer_mask(self) -> bytes:
        if self._forced_text and (tokens := self._forced_text.tokens(self._matcher, self._last)):
            return self._forced_text.mask(tokens[0])
        mask = self._matcher.compute_bitmask()
        return self._numbers.narrowed(mask, self._place) if self._numbers and self._place else mask

    def forced(self) -> tuple[int, ...]:
        """Return tokens that must come next; none within a thought."""
        if self._thought_state or self.over:
            return ()
        tokens = self._forced_text.tokens(self._matcher, self._last) if self._forced_text else []
        tokens = tokens or self._matcher.compute_ff_tokens()[:256]  # more are known later
        return tuple(takewhile(lambda token: token not in self._ends, tokens))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next: see `GrammarState.valid_prefix`."""
        thought = copy.copy(self._thought_state)
        for place, token in enumerate(tokens):
            if not thought or not (thought.begun or token == thought.begins):
                answer = list(takewhile(lambda token: token not in self._ends, tokens[place:]))
                return place + self._matcher.validate_tokens(self._of_finite_numbers(answer))
            if token in self._ends or (thought.begun and not _allows(thought.allowed(), token)):
                return place
            thought.take(token)
            thought = None if thought.over else thought
        return len(tokens)

    def _of_finite_numbers(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first that makes a number too large."""
        place = self._place
        if not self._numbers or not place:
            return tokens
        for read, token in enumerate(tokens):
            if not self._numbers.allows(place, token):
                return tokens[:read]
            place = self._numbers.after(place, token)
        return tokens

    @property
    def in_thought(self) -> bool:
        """True if the answer proper has not begun."""
        return self._thought_state is not None

    @property
    def over(self) -> bool:
        """True if the grammar has ended, and what comes after it is free."""
        return self._then_free and self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """Error of the matcher. It never leaves it."""
        return error_of(self._matcher)

    def fail(self, token: int) -> None:
        """Make the matcher allow only the end of the sequence from here on. `token`: one that it does not allow."""
        self._matcher.consume_token(token)


def _allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _with_token(mask: bytes, token: int) -> bytes:
    place = token // 8
    return mask[:place] + bytes([mask[place] | 1 << token % 8]) + mask[place + 1 :]
