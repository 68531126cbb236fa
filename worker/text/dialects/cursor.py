"""Reads the text of an answer while it is being written.

Readers are generators. They yield None when they need more text, and events otherwise: each is written as if the text
were complete, and what it reads does not depend on how the text was cut.
"""

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]  # yields None when it needs more text; returns T

BLANK = " \t\r\n"
BLANKS = re.compile(f"[{BLANK}]+")
LONGEST_HEADER = 300  # characters of a name with its attributes; a function's name has at most 128


class NotACall(Exception):
    """The text that was read is no call of the dialect."""


class Markers:
    """Texts to find in a text that arrives in pieces; of two that begin at one place the longer is found."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.texts = tuple(sorted({marker for marker in markers if marker}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._starts = frozenset(marker[0] for marker in self.texts)
        self._beginnings = frozenset(marker[:end] for marker in self.texts for end in range(1, len(marker)))
        self._longest = max(map(len, self.texts), default=0)

    def first(self, text: str, at: int) -> tuple[int, str]:
        """Return the place and the text of the first marker, or the text's end and an empty string."""
        found = self._pattern.search(text, at)
        return (found.start(), found[0]) if found else (len(text), "")

    def at(self, text: str, at: int) -> str:
        """Return the marker at this place, or an empty string."""
        found = self._pattern.match(text, at)
        return found[0] if found else ""

    def held(self, text: str, at: int) -> int:
        """Return the place from which on the text may be the beginning of a marker; its end if there is none."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start] in self._starts and text[start:] in self._beginnings:
                return start
        return len(text)

    def may_go_on(self, text: str, at: int) -> bool:
        """True if the text from `at` on is the beginning of a marker, and not all of it."""
        return text[at:] in self._beginnings


class Cursor:
    """The text of an answer and the place up to which it was read."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._recordings = list[list[str]]()  # text read since each `record`
        self.ended = False  # no more text follows
        self.cut_off = False  # because there were no tokens left

    def add(self, text: str) -> None:
        """Add text at the end."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, *, cut_off: bool = False) -> None:
        """End the text. `cut_off`: the model would have gone on."""
        self.ended, self.cut_off = True, cut_off

    def record(self) -> list[str]:
        """Record what is read from here on, in pieces. Returns the recording, for `recorded`."""
        self._recordings.append([])
        return self._recordings[-1]

    def recorded(self, recording: list[str]) -> str:
        """Return what was read since `record`, and stop this recording."""
        self._recordings = [each for each in self._recordings if each is not recording]
        return "".join(recording)

    def take(self, count: int) -> str:
        """Read the next `count` characters, which must be there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        for recording in self._recordings:
            recording.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Put text back that was read last."""
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0
        for recording in self._recordings:
            count = len(text)
            while count > 0 and recording:
                last = recording.pop()
                if len(last) > count:
                    recording.append(last[:-count])
                count -= len(last)

    @property
    def waiting(self) -> str:
        """The text that is there and has not been read."""
        return self._text[self._at :]

    def skip(self, text: str) -> Waiting[bool]:
        """Read this text if it comes next. Returns False if another does."""
        while not self._text.startswith(text, self._at):
            if self.ended or not text.startswith(self.waiting):
                return False
            yield None
        self.take(len(text))
        return True

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read what the pattern matches of the text that is there."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def ahead(self, count: int) -> Waiting[str]:
        """Return the next `count` characters without reading them; fewer if the answer ends before."""
        while len(self._text) - self._at < count and not self.ended:
            yield None
        return self._text[self._at : self._at + count]

    def next(self) -> Waiting[str]:
        """Return the next character without reading it; empty at the answer's end."""
        if self._at < len(self._text):
            return self._text[self._at]
        return (yield from self.ahead(1))

    def skip_blank(self) -> Waiting[str]:
        """Read white space, and return the character after it, which is not read."""
        while (char := (yield from self.next())) and char in BLANK:
            self.match(BLANKS)
        return char

    def starts(self, markers: Markers, *, after_blank: bool = False) -> Waiting[str]:
        """Return the marker that the text begins with, which is not read; empty if there is none. `after_blank`: white
        space may come before it."""
        skipped = 0  # white space may be long, and is read once
        while True:
            at = self._at + skipped
            if after_blank and (blank := BLANKS.match(self._text, at)):
                at = blank.end()
                skipped = at - self._at
            if self.ended or (at < len(self._text) and not markers.may_go_on(self._text, at)):
                return markers.at(self._text, at)
            yield None

    def accept(self, markers: Markers, *, after_blank: bool = False) -> Waiting[str]:
        """Read the marker that the text begins with, and return it; empty if there is none."""
        marker = yield from self.starts(markers, after_blank=after_blank)
        if not marker and after_blank and self.ended and markers.may_go_on(rest := self.waiting.lstrip(BLANK), 0):
            marker = rest  # the answer ends within the marker
        if marker and after_blank:
            self.match(BLANKS)
        self.take(len(marker))
        return marker

    def before(self, markers: Markers) -> tuple[str, str]:
        """Read the text that is there up to the next marker. Returns it and the marker, which is read too; without one
        an empty string, and the text without what may be the beginning of one."""
        place, marker = markers.first(self._text, self._at)
        # A longer marker may begin at the same place, or before this one.
        if not self.ended and (held := markers.held(self._text, self._at)) <= place:
            place, marker = held, ""
        text = self.take(place - self._at)
        self.take(len(marker))
        return text, marker

    def until_start(self, markers: Markers) -> str:
        """Read a character and what follows it up to the beginning of a marker, as far as the text is there."""
        place, marker = markers.first(self._text, self._at + 1)
        return self.take((place if marker else markers.held(self._text, self._at + 1)) - self._at)

    def until(self, markers: Markers, limit: int, *, one_word: bool = True) -> Waiting[tuple[str, str]]:
        """Read a name up to the next marker within `limit` characters, and return it and the marker, which is read too.
        Raises `NotACall` if there is none, and with `one_word` for text that is more than a name."""
        found = ""
        while True:
            text, marker = self.before(markers)
            found += text
            words = _SEVERAL_WORDS.search(found) if one_word else None
            # What was read when this fails must not depend on how the text was cut.
            end = min(limit, words.start() + 1 if words else limit)
            if words or len(found) > limit:
                self.put_back(found[end:] + marker)
                raise NotACall
            if marker:
                return found, marker
            if self.ended:
                raise NotACall
            yield None


_SEVERAL_WORDS = re.compile(r"[^\s\"]\s+[^\s=\"]|`")
