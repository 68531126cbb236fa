"""Reads harmony, the output format of gpt-oss: messages with headers.

The channel "analysis" is reasoning, a message with a recipient is a tool call, and all other text is content.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is warm.
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

The recipient may also come before the channel. The prompt ends with <|start|>assistant.
"""

import re
from dataclasses import dataclass

from worker.text.dialects.cursor import Cursor, Markers
from worker.text.dialects.dialect import CallBegan, CallEnded, Functions, read_arguments, repaired
from worker.text.dialects.json_text import JsonText, Repair
from worker.text.dialects.table import Thoughts
from worker.text.output.events import Content, OutputEvents, Reasoning

_HEADERS = ("<|start|>", "<|channel|>")
_TEXT = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (*_HEADERS, _TEXT, *_ENDS)
ANSWER_BEGINS = "<|channel|>final<|message|>"
RECIPIENT = "to="  # begins the name of the function in the header of a call
ANALYSIS = Thoughts("<|channel|>analysis<|message|>", "<|end|>")
ANSWERS = ("<|channel|>final", "to=functions.")  # in headers of messages that are no thoughts

_ANALYSIS_HEADER = re.compile(r"<\|channel\|>\s*analysis")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ROLES = ("assistant", "user", "self", "system", "developer")  # recipients that are no functions
_ROLE = re.compile(r"<\|start\|>\s*([\w.:/-]+)")
_ROLE_BEGINS = re.compile(r"[\w.:/-]*(\s+\S*)?")  # and a recipient
_CALL_BEGINS = re.compile(rf"\b{RECIPIENT}")
_OPENINGS = ("assistant", RECIPIENT)
_QUOTE = "\ud800"  # half of a surrogate pair, which no decoded text holds
_ALL, _END = Markers(MARKERS), Markers(_ENDS)
_AFTER_CALL = Markers((*_ENDS, *_HEADERS))

Channel = type[Content | Reasoning]


@dataclass(frozen=True)
class HarmonyCalls:
    """The dialect of harmony's calls, for grammars. `HarmonyReader` reads them, with the messages around them."""

    name: str = "harmony"
    markers: tuple[str, ...] = (*MARKERS, "<|constrain|>")


def escape_markers(text: str) -> str:
    """Return a text in which the reader finds no marker: the model's markers are tokens of their own, and it may write
    about them in others."""
    return text.replace("<", "<" + _QUOTE) if "<" in text else text


def unescape_markers(text: str) -> str:
    """Return a text as it was before `escape_markers`."""
    return text.replace(_QUOTE, "") if _QUOTE in text else text


def after_thought(*, calls: bool, forced: bool) -> tuple[str, ...]:
    """Return what follows the end of a thought that is closed: of the first one, and of those after it. `calls`: the
    model may answer or call a function, and chooses once by itself. `forced`: it has to call one."""
    header = "<|start|>assistant"
    if forced:
        return (f"{header}<|channel|>commentary to=functions.",)
    return (*((header,) if calls else ()), header + ANSWER_BEGINS)


class HarmonyReader:
    """Reads one answer. An answer without a header is content: it continues a message of the prompt."""

    def __init__(self, cursor: Cursor, functions: Functions | None, *, only_before_content: bool = False) -> None:
        """`functions`: those that the request offers; None: calls are text. `only_before_content`: see
        `AnswerReader`."""
        self._only_before_content, self._has_content = only_before_content, False
        self._cursor, self._offered = cursor, functions is not None
        self._functions: Functions = functions or {}
        self._channel: Channel | None = None  # None in a header
        self._header = ""
        self._used_channels = set[Channel]()
        self._separator = ""  # separator before the next text
        self._is_call = False  # the text of a call that is not read
        self._in_call = False

    @property
    def begun(self) -> str | None:
        """The text of a call so far, from the recipient in its header on: see `AnswerReader.begun`."""
        if self._in_call:
            return ""
        recipient = _CALL_BEGINS.search(self._header) if self._offered and self._channel is None else None
        return self._header[recipient.start() :] + self._cursor.waiting if recipient else None

    @property
    def reasons(self) -> bool:
        """True within reasoning."""
        return self._channel is Reasoning

    @property
    def may_be_bare(self) -> bool:
        """False: each call has a header."""
        return False

    def read(self) -> OutputEvents:
        """Yield the answer's events."""
        while not (self._only_before_content and self._has_content):
            text, marker = self._cursor.before(_ALL)
            if text:
                yield from self._text(text)
            if marker:
                yield from self._marker(marker)
            elif self._cursor.ended:
                break
            else:
                yield None
        else:
            yield from self._rest()
        if self._channel is None and "<|" not in self._header:
            yield Content(self._header)

    def _rest(self) -> OutputEvents:
        while not self._cursor.ended or self._cursor.waiting:
            yield Content(self._cursor.take(len(self._cursor.waiting)))
            if not self._cursor.ended:
                yield None

    def _text(self, text: str) -> OutputEvents:
        if self._channel is None:
            self._header += text
            if _may_be_header(self._header):
                return
            self._channel = Content
            text, self._header = self._header, ""
        if not self._is_call:
            self._used_channels.add(self._channel)
        self._has_content = self._has_content or (self._channel is Content and not text.isspace())
        text, self._separator = self._separator + text, ""
        yield self._channel(text)

    def _marker(self, marker: str) -> OutputEvents:
        if marker == _TEXT:
            if self._channel is None:
                yield from self._begin()
            elif self._is_call:
                yield Content(marker)
            return
        if marker == "<|channel|>" and self._channel is None:
            self._header += marker
            return
        if self._is_call and marker in _ENDS:
            yield Content(marker)
        self._channel, self._is_call = None, False
        self._header = marker if marker in _HEADERS else ""

    def _begin(self) -> OutputEvents:
        """Begin the message whose header has ended."""
        header, self._header = self._header, ""
        recipient = _RECIPIENT.search(header)
        role = _ROLE.match(header)
        is_other = (
            role is not None and role[1] != "assistant"
        )  # the model speaks for a function, or calls it in this way
        if recipient and (is_other or recipient[1] in _ROLES):
            recipient = None
        elif role and is_other and role[1].removeprefix("functions.") in self._functions:
            recipient = role
        if recipient and self._offered:
            yield from self._call(recipient[1].removeprefix("functions."))
            return
        is_thought = is_other or _ANALYSIS_HEADER.search(header) is not None
        self._channel = Reasoning if is_thought and not recipient else Content
        self._is_call = recipient is not None
        if self._is_call:
            yield Content(header + _TEXT)
            return
        # Messages of a channel are separate texts.
        self._separator = "\n\n" if self._channel in self._used_channels else ""
        yield self._channel("")

    def _call(self, function: str) -> OutputEvents:
        self._in_call = True
        yield CallBegan(function)
        repairs = set[Repair]()
        complete = yield from read_arguments(
            self._cursor, JsonText(self._cursor, repairs, stops=_AFTER_CALL), _AFTER_CALL
        )
        yield from self._cursor.accept(_END, after_blank=True)
        yield from repaired(repairs)
        self._in_call = False
        yield CallEnded(complete)


def _may_be_header(text: str) -> bool:
    start = text.removeprefix("<|start|>").lstrip()
    names_role = text.startswith("<|start|>") and _ROLE_BEGINS.fullmatch(start) is not None
    known = names_role or "<|channel|>" in start or any(o.startswith(start) or start.startswith(o) for o in _OPENINGS)
    return known and len(text) <= 256  # a function's name has at most 128 characters
