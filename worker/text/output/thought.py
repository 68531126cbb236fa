"""Follows an answer's thoughts token by token: counts their tokens, and closes them when their budget is out."""

import codecs
import re
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from worker.text.dialects.cursor import Cursor
from worker.text.output.answer import AnswerReader

# Tokens of a cycle and its repetitions that are a loop. Of 1,000 answers with tables, lists of equal rows, runs of
# zeros and the like, of up to 2,003 tokens with Qwen3's tokenizer, none is found (`tests/text/output/test_loops.py`).
# A thought that is closed by mistake is still followed by an answer; a repetitive answer may be what somebody wants.
THOUGHT_LOOP = 3_072
ANSWER_LOOP = 8_192


class LoopDetector:
    """The last tokens of an answer. Each costs the same, however many came before it."""

    def __init__(self, bound: int) -> None:
        """`bound`: how many of the last tokens repeat a cycle in a loop."""
        self._bound = bound
        self._count = 0
        self._tokens = array("I")  # the last ones

    def append(self, token: int) -> int:
        """Append a token. Returns the length of the cycle that the last tokens repeat, if that is a loop, else 0. It
        searches at fixed places, so the same tokens give the same results."""
        self._tokens.append(token)
        self._count += 1
        if self._count % 16 or self._count < self._bound:  # so that a search costs each token little
            return 0
        if len(self._tokens) >= 2 * self._bound:
            del self._tokens[: -self._bound - 64]  # more than a search reads, since some may be removed again
        return self._cycle()

    def remove(self) -> None:
        """Remove the last token."""
        self._tokens.pop()
        self._count -= 1

    def _cycle(self) -> int:
        # Models that loop mostly repeat a sentence or a paragraph: up to 512 tokens. The earlier places of the last 8,
        # the probe, tell the possible lengths of a cycle; it may occur several times within one.
        width = self._tokens.itemsize
        recent = self._tokens[-512 - 8 :].tobytes()
        probe, end = recent[-8 * width :], len(recent) - 1
        for _ in range(64):
            place = recent.rfind(probe, 0, end)
            if place < 0:
                break
            period, rest = divmod(len(recent) - len(probe) - place, width)
            if rest == 0 and self._repeats(period):
                return period
            end = place + len(probe) - 1
        return 0

    def _repeats(self, period: int) -> bool:
        """Return True if the last tokens repeat with this period."""
        with memoryview(self._tokens)[-self._bound :] as last, last[period:] as later, last[:-period] as earlier:
            return later == earlier


class Closing(NamedTuple):
    """Tokens that close a thought, as the model does."""

    before: tuple[int, ...]  # white space, left out after a line's end
    after: tuple[int, ...]  # from the end marker on


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The markers around the thoughts of one answer."""

    begins: bytes
    ends: bytes
    begin_tokens: int  # tokens of the marker at the beginning
    bytes_of: Callable[[int], bytes]
    closings: tuple[Closing, ...]  # of the first thought that is closed, of the second …; the last is of all others
    stops: tuple[bytes, ...] = ()  # texts after which no thought begins, and none is closed
    reopens: bool = False  # a thought may begin after content

    @property
    def longest(self) -> int:
        """Bytes of the longest text that is searched for."""
        return max(map(len, (self.begins, self.ends, *self.stops)))


class _Place(NamedTuple):
    """What is known after a token."""

    inside: bool  # within a thought
    ended: bool  # the next text that is no marker is content, before which a thought can begin no more
    over: bool  # no thought begins any more
    begun: bool  # content has come since the last thought
    tail: bytes  # the last text, which may begin a marker
    spent: int  # tokens of thoughts without their markers
    tokens: int  # tokens of thoughts with their markers
    cycle: int  # tokens of the cycle that a thought repeated; 0: none did
    closings: int  # thoughts that were closed
    due: tuple[int, ...]  # tokens that must come next
    weighed: bytes = b""  # the text from an opening on, as long as it may be a call, which is not cut
    undecided: int = 0  # tokens of it


class _Weighing:
    """Reads what may be a call within a thought, as the output parser does."""

    def __init__(self, new_reader: Callable[[Cursor], AnswerReader]) -> None:
        self._new_reader = new_reader
        self._begin()

    def _begin(self) -> None:
        self._read, self._cursor = b"", Cursor()
        self._reader = self._new_reader(self._cursor)
        self._events = self._reader.read()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read(self, text: bytes) -> AnswerReader:
        """Return the reader after the text from an opening on. Only what is new of it is read."""
        if not text.startswith(self._read):  # some was taken back
            self._begin()
        self._cursor.add(self._decode(text[len(self._read) :]))
        self._read = text
        for event in self._events:
            if event is None:
                break
        return self._reader


class Thought:
    """The thoughts of one answer.

    A thought has ended, and another may begin, where the output parser finds it. The budget counts the tokens of all
    thoughts without their markers. When it is out, or a thought is a loop, `forced` names the tokens that close it; so
    does it for each further thought. A character is never cut: its rest, at most three tokens, may exceed the budget.
    The same tokens give the same results, so a resumed answer continues as an unbroken one.
    """

    def __init__(
        self, form: ThoughtFormat, *, begun: bool, only_first: bool, budget: int | None = None, loops: bool = False,
        new_reader: Callable[[Cursor], AnswerReader] | None = None,
    ) -> None:  # fmt: skip
        """`begun`: the prompt ends within a thought. `only_first`: after other text, none begins. `budget`: most tokens
        of thoughts; None: no limit. `loops`: close a thought that repeats itself. `new_reader`: of answers that go on
        within a thought, which may hold calls; None: there are none."""
        self._form, self._budget = form, inf if budget is None else budget
        self._marks_inside, self._marks_outside = _any_of(form.ends, *form.stops), _any_of(form.begins, *form.stops)
        self._longest = max(form.longest - 1, 4)  # bytes; the longest character in UTF-8 has 4
        self._loops = LoopDetector(THOUGHT_LOOP) if loops else None
        self._weighing = _Weighing(new_reader) if new_reader else None
        self._history = deque[_Place](maxlen=32)  # 16 tokens of an answer, and a draft after it
        self._place = self._closed_if_due(_Place(begun, only_first, False, False, b"", 0, 0, 0, 0, ()))

    @property
    def can_close(self) -> bool:
        """True unless the tokens that close a thought would end the answer."""
        return bool(self._form.closings)

    @property
    def inside(self) -> bool:
        """True if the next text belongs to a thought."""
        return self._place.inside

    @property
    def tokens(self) -> int:
        """Tokens of thoughts so far, with their markers."""
        return self._place.tokens

    @property
    def cycle(self) -> int:
        """Tokens of the cycle for which a thought was closed; 0 if none was."""
        return self._place.cycle

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next; mostly none."""
        return self._place.due

    def append(self, token: int) -> None:
        """Advance by a token of the answer."""
        place = self._place
        self._history.append(place)
        if place.inside:
            self._place = self._inside(place, token)
        elif place.due or not place.over:
            self._place = self._outside(place, token)

    def remove(self, count: int) -> None:
        """Take back the last tokens."""
        for _ in range(count):
            self._place = self._history.pop()
            if self._loops and self._place.inside:
                self._loops.remove()

    def _inside(self, place: _Place, token: int) -> _Place:
        found = self._loops.append(token) if self._loops else 0
        due = place.due[1:] if place.due and token == place.due[0] else ()
        text = place.tail + self._form.bytes_of(token)
        if place.weighed or self._marks_inside.search(text):
            return self._at_mark(place._replace(cycle=place.cycle or found, due=due), text, token)
        # Most tokens come here, so the fields are given by their places.
        tail, spent = text[-self._longest :], place.spent + 1
        cycle = place.cycle or found
        after = _Place(True, place.ended, False, False, tail, spent, place.tokens + 1, cycle, place.closings, due)
        return self._closed_if_due(after) if (cycle or spent >= self._budget) and not due else after

    def _at_mark(self, place: _Place, text: bytes, token: int) -> _Place:
        """Return the place within a thought after text with a marker, or with what may be a call. `text`: what is
        searched."""
        form, weighed = self._form, place.weighed
        if weighed or (self._weighing and any(stop in text for stop in form.stops)):
            after_end = weighed[-64:].rstrip().endswith(form.ends)  # white space may follow it
            place = place._replace(undecided=place.undecided + (not after_end))
            return self._weigh(place, weighed + form.bytes_of(token) if weighed else text)
        if form.ends in text:
            rest = text.partition(form.ends)[2]
            return place._replace(inside=False, ended=True, over=False, tail=rest, tokens=place.tokens + 1)
        tail, spent = text[-self._longest :], place.spent + 1
        tokens = place.tokens + 1
        return place._replace(inside=False, over=True, tail=tail, spent=spent, tokens=tokens)

    def _weigh(self, place: _Place, text: bytes) -> _Place:
        """Return the place after text with an opening in a thought. While it may be a call, it is not cut."""
        assert self._weighing
        reader = self._weighing.read(text)
        if reader.weighs and not place.due:
            return place._replace(weighed=text)
        spent, tokens = place.spent + place.undecided, place.tokens + place.undecided
        place = place._replace(spent=spent, tokens=tokens, weighed=b"", undecided=0)
        if reader.reasons:
            after = place._replace(tail=text[-self._longest :])
            return after if place.due else self._closed_if_due(after)
        rest = text.rpartition(self._form.ends)[2]
        return place._replace(inside=False, ended=True, begun=False, tail=rest, spent=spent - 1)  # its marker

    def _outside(self, place: _Place, token: int) -> _Place:
        form = self._form
        text = place.tail + form.bytes_of(token)
        goes_on = place.begun and not place.due and (form.reopens or not place.ended)
        if goes_on and not self._marks_outside.search(text):  # most tokens, as within a thought
            tail, spent = text[-self._longest :], place.spent
            tokens = place.tokens
            return _Place(False, place.ended, False, True, tail, spent, tokens, place.cycle, place.closings, ())
        due = place.due[1:] if place.due[:1] == (token,) else ()
        while not place.begun and text.lstrip().startswith(form.ends):  # of a thought that was left out
            text = text.lstrip().removeprefix(form.ends)
            place = place._replace(ended=True)
        before, marker, rest = text.partition(form.begins)
        words = before.lstrip()
        may_be_marker = not marker and (form.begins.startswith(words) or form.ends.startswith(words))
        begun = place.begun or (bool(words) and not may_be_marker)
        over = (place.ended and begun and not form.reopens) or any(stop in before for stop in form.stops)
        if marker and not over:
            inside = place._replace(
                inside=True, begun=False, tail=rest, tokens=place.tokens + form.begin_tokens, due=()
            )
            return self._closed_if_due(inside)
        return place._replace(over=over, begun=begun, tail=text[-self._longest :], due=due)

    def _closed_if_due(self, place: _Place) -> _Place:
        """Return the place, with the tokens that close its thought if it has to end here."""
        is_out = place.cycle or place.spent >= self._budget
        closings = self._form.closings
        if not (is_out and place.inside and closings) or _is_cut(place.tail):
            return place
        before, after = closings[min(place.closings, len(closings) - 1)]
        due = after if place.tail.endswith(b"\n") else before + after
        return place._replace(closings=place.closings + 1, due=due)


def _any_of(*marks: bytes) -> re.Pattern[bytes]:
    return re.compile(b"|".join(map(re.escape, marks)))


def _is_cut(text: bytes) -> bool:
    """Return True if the text ends within a character."""
    for count, byte in enumerate(reversed(text), start=1):
        if byte & 0xC0 != 0x80:
            return count < _length(byte)
    return False


def _length(first: int) -> int:
    """Return the bytes of a character in UTF-8 by its first."""
    return next((length for length, least in ((4, 0xF0), (3, 0xE0), (2, 0xC0)) if first >= least), 1)
