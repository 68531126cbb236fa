"""Reads an answer: its content, its reasoning, and its calls in the model's dialect."""

from worker.text.dialects.cursor import BLANK, BLANKS, LONGEST_HEADER, Cursor, Markers, NotACall
from worker.text.dialects.dialect import CallBegan, CallEnded, Dialect, Functions, Repaired
from worker.text.dialects.json_text import Repair
from worker.text.dialects.table import Thoughts
from worker.text.output.events import Content, OutputEvent, OutputEvents, Reasoning


class AnswerReader:
    """Reads one answer at the markers of its model."""

    def __init__(
        self, cursor: Cursor, thoughts: Thoughts | None, dialect: Dialect | None, functions: Functions | None, *,
        reasons: bool, thought: bool, only_before_content: bool, opened: str = "",
    ) -> None:  # fmt: skip
        """`functions`: those that the request offers; None: calls are text. `reasons`: the answer begins within
        reasoning; `thought`: reasoning has ended before it. `only_before_content`: a grammar holds the content to JSON,
        whose strings may hold what looks like a marker. `opened`: the marker with which the prompt has ended."""
        self._cursor = cursor
        self._thoughts = thoughts
        self._dialect = dialect if functions is not None else None
        self._functions: Functions = functions or {}
        self._reasons, self._thought = reasons, thought
        self._only_before_content = only_before_content
        self._opened = opened
        self._begun = False  # content other than white space has come since the last reasoning or call
        self._at_start = True  # of the reasoning
        self._unclosed = False  # the marker that ends calls was missing
        self._called = False  # a call has ended, and no content has come since
        self.weighs = False  # calls are read within reasoning, which may be made
        self._opening: str | None = None  # of the calls that are being read, before the first; None: none are
        self._recording = list[str]()  # of them, up to the event that reports a call

    def read(self) -> OutputEvents:
        """Yield the answer's events."""
        cursor = self._cursor
        if self._opened:
            yield from self._from_within_marker()
        markers = self._markers
        while not (self._only_before_content and self._begun):
            if not self._begun and self.may_be_bare:
                yield from self._bare_calls()
                markers = self._markers
            text, marker = cursor.before(markers)
            if text:
                yield self._kind(text)
                if self._advance(text):
                    markers = self._markers
            if marker and marker not in markers.texts:  # the text before it has changed what it means
                cursor.put_back(marker)  # another may begin within it
            elif marker:
                yield from self._cross(marker)
                markers = self._markers
            elif cursor.ended:
                return
            else:
                yield None
        while not cursor.ended or cursor.waiting:
            yield Content(cursor.take(len(cursor.waiting)))
            if not cursor.ended:
                yield None

    def _advance(self, text: str) -> bool:
        """Take note of text that was read. Returns True if other markers mean something after it."""
        if self._reasons:
            changed = self._at_start and not text.isspace()
            self._at_start = self._at_start and not changed
        else:
            changed = not self._begun and not text.isspace()
            self._begun = self._begun or changed
        return changed

    def _bare_calls(self) -> OutputEvents:
        """Read calls without a marker, as long as the answer begins, or goes on after a call, as they do."""
        while not self._begun:
            while (char := (yield from self._cursor.next())) and char in BLANK:
                yield Content(self._cursor.match(BLANKS))
            if not (self._dialect and char and char in self._dialect.bare):
                return
            yield from self._calls("")

    def _from_within_marker(self) -> OutputEvents:
        """Read what follows the marker with which the prompt has ended: the rest of a longer one, or a call."""
        longer = self._thoughts.answer if self._thoughts else ()
        rests = [each.removeprefix(self._opened) for each in longer if each.startswith(self._opened)]
        if (yield from self._cursor.accept(Markers(rests))):
            yield Content("")
        elif self._dialect:
            yield from self._calls(self._opened, written=False)

    @property
    def _kind(self) -> type[Content | Reasoning]:
        return Reasoning if self._reasons else Content

    @property
    def begun(self) -> str | None:
        """The text of a call so far, from its opening or its beginning up to the event that reports it, and what was
        added to the cursor; None outside of calls. It may turn out to be none."""
        if self._opening is None:
            return None
        return self._opening + "".join(self._recording) + self._cursor.waiting

    @property
    def reasons(self) -> bool:
        """True within reasoning."""
        return self._reasons

    @property
    def may_be_bare(self) -> bool:
        """True if a call may begin without an opening, as the answer begins or after a call."""
        return self._dialect is not None and bool(self._dialect.bare) and not (self._reasons or self._begun)

    @property
    def _markers(self) -> Markers:
        """The markers that mean something here."""
        found = list[str]()
        if self._only_before_content and self._begun:
            return markers_of(())
        if (thoughts := self._thoughts) and self._reasons:
            found += [thoughts.end] + [thoughts.begin] * self._at_start
            found += filter(_is_token, thoughts.answer)
        elif thoughts:
            found += thoughts.answer
            found += [thoughts.begin] * (_is_token(thoughts.begin) or not (self._begun and self._thought))
            found += thoughts.header[:1] * (not self._begun)
            # The end of a thought that was left out, or the end of a message.
            found += [thoughts.end] * (_is_token(thoughts.end) or not self._begun)
        if self._dialect:
            closes = self._unclosed or (self._called and not self._begun)
            found += [*self._dialect.openings, self._dialect.closing * closes]
        return markers_of(tuple(found))

    def _cross(self, marker: str) -> OutputEvents:
        thoughts = self._thoughts
        if thoughts and marker == thoughts.begin:
            self._reasons = self._at_start = True
            yield Reasoning("")
        elif thoughts and marker == thoughts.end:
            self._reasons = self._begun = False
            self._thought = True
            yield Content("")
        elif thoughts and marker in thoughts.answer:
            self._thought, self._reasons = self._thought or self._reasons, False
            yield Content("")
        elif thoughts and marker in thoughts.header[:1]:
            yield from self._skip_header(*thoughts.header)
        elif self._dialect and marker in self._dialect.openings:
            self.weighs = self._reasons
            yield from self._weighed_calls(marker) if self._reasons else self._calls(marker)
            self.weighs = False
        else:
            self._unclosed = False

    def _skip_header(self, begins: str, ends: str) -> OutputEvents:
        recording = self._cursor.record()
        try:
            yield from self._cursor.until(Markers((ends,)), LONGEST_HEADER)
            self._cursor.recorded(recording)
        except NotACall:
            yield Content(begins + self._cursor.recorded(recording))

    def _calls(self, opening: str, *, written: bool = True) -> OutputEvents:
        """Read calls from behind an opening that the model has `written`, or the prompt."""
        called = False
        for event in self._read_calls(opening, written=written):
            match event:
                case CallBegan():
                    called = True
                case Repaired(Repair.CLOSING):
                    self._unclosed = True
                case Content(text):
                    self._begun = self._begun or not text.isspace()
            yield event
        if called:
            self._called, self._begun = True, False
            self._thought = False

    def _read_calls(self, opening: str, *, written: bool = True) -> OutputEvents:
        """Yield the events of calls. What turns out to be none is text, as the model wrote it."""
        assert self._dialect is not None
        self._opening, self._recording = opening if written else "", self._cursor.record()
        try:
            for event in self._dialect.read(opening, self._cursor, self._functions):
                yield event
                if isinstance(event, CallBegan | CallEnded):
                    self._opening = ""
                    self._recording.clear()
            self._cursor.recorded(self._recording)
        except NotACall:
            yield self._kind(self._opening + self._cursor.recorded(self._recording))
        self._opening = None

    def _weighed_calls(self, opening: str) -> OutputEvents:
        """Read calls within reasoning. They are made if nothing follows them but its end, which some models leave out
        before they call. Else the model has only weighed them: they are text of its reasoning."""
        cursor, dialect = self._cursor, self._dialect
        assert dialect is not None
        assert self._thoughts is not None
        cursor.put_back(opening)
        recording, end = cursor.record(), self._thoughts.end
        events = list[OutputEvent]()
        may_follow = Markers((*dialect.openings, end))  # its end is the last
        are_calls = True
        marker = cursor.take(len(opening))
        while are_calls and marker in dialect.openings:
            for event in self._read_calls(marker):
                if event is None:
                    yield None
                else:
                    events.append(event)
                    are_calls = are_calls and not isinstance(event, Content | Reasoning)
            marker = (yield from cursor.accept(may_follow, after_blank=True)) if are_calls else ""
        are_calls = are_calls and not (yield from cursor.skip_blank()) and not cursor.cut_off
        text, ends, after = cursor.recorded(recording).partition(end)
        if are_calls and not after.strip():
            yield from events
            self._reasons = self._begun = self._thought = False
            return
        cursor.put_back(ends + after)
        self._at_start = False
        yield Reasoning(text)


def _is_token(marker: str) -> bool:
    """True for a marker that is a token of its own, and so nothing that prose spells."""
    return "|" in marker


_KNOWN = dict[tuple[str, ...], Markers]()


def markers_of(texts: tuple[str, ...]) -> Markers:
    """Return the markers, which are made once for each set of texts."""
    if texts not in _KNOWN:
        _KNOWN[texts] = Markers(texts)
    return _KNOWN[texts]
