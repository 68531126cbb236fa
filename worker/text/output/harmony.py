"""Parses harmony, the output format of gpt-oss: messages with headers.

The channel "analysis" is reasoning, a message with a recipient is a tool call, and all other text is content.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is warm.
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

The recipient may also come before the channel. The prompt ends with <|start|>assistant.
"""

import json
import re
from typing import Any

from worker.text.output.events import (
    CallClosed,
    CallCutOff,
    CallOpened,
    CallText,
    Content,
    ParseEvent,
    Reasoning,
    Tools,
)
from worker.text.tokenizer import Splitter, Transitions

_HEADERS = ("<|start|>", "<|channel|>")
_TEXT = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (*_HEADERS, _TEXT, *_ENDS)
# The state is the last marker.
TRANSITIONS: Transitions = {state: [(marker, marker) for marker in MARKERS] for state in MARKERS}
ANSWER_BEGINS = "<|channel|>final<|message|>"

_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_OPENINGS = ("assistant", "to=")
_MAX_HEADER = 256  # characters; a function's name has at most 64

Channel = type[Content | Reasoning | CallText]  # the event for a text of the channel


class Harmony:
    """Parses one answer.

    An answer without a header is content: it continues a message of the prompt.
    """

    def __init__(self, splitter: Splitter) -> None:
        """`splitter`: a splitter that uses `TRANSITIONS`."""
        self._splitter = splitter
        self._channel: Channel | None = None  # None in a header
        self._header = ""
        self._used_channels = set[Channel]()
        self._separator = ""  # separator before the next text

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the events of the next text."""
        segments = self._splitter.feed(text)
        events = self._text_events(segments[0][1])
        for marker, more in segments[1:]:
            events += [*self._marker_events(marker), *self._text_events(more)]
        return events

    def reopen(self) -> str:
        """Continue the last call: its end marker was a part of it. Returns the header that the event did not hold."""
        self._channel = CallText
        return self._take_header()

    def flush(self) -> list[ParseEvent]:
        """Return the events of the text that was held back, at the end of the answer."""
        _, held = self._splitter.flush()
        if self._channel is CallText:
            return [CallCutOff(held)]
        events = self._text_events(held)
        if self._channel is None and "<|" not in self._header:
            events.append(Content(self._take_header()))
        return events

    def _take_header(self) -> str:
        header, self._header = self._header, ""
        return header

    def _text_events(self, text: str) -> list[ParseEvent]:
        if not text:
            return []
        if self._channel is None:
            self._header += text
            if _may_be_header(self._header):
                return []
            self._channel, text = Content, self._header
        self._used_channels.add(self._channel)
        text, self._separator = self._separator + text, ""
        return [self._channel(text)]

    def _marker_events(self, marker: str) -> list[ParseEvent]:
        if marker == _TEXT:
            return self._message_events()
        if marker == "<|channel|>" and self._channel is None:
            self._header += marker
            return []
        ended, self._channel = self._channel, None
        self._header = marker if marker in _HEADERS else ""
        if ended is CallText:
            return [CallClosed(marker if marker in _ENDS else "")]
        return []

    def _message_events(self) -> list[ParseEvent]:
        """Return the events of the marker that ends a header; within a call it is text, elsewhere it is dropped."""
        if self._channel is None:
            return self._begin()
        return [CallText(_TEXT)] if self._channel is CallText else []

    def _begin(self) -> list[ParseEvent]:
        header = self._take_header()
        if _RECIPIENT.search(header):
            self._channel = CallText
            return [CallOpened(header + _TEXT)]
        self._channel = Reasoning if _ANALYSIS.search(header) else Content
        # Messages of a channel are separate texts.
        self._separator = "\n\n" if self._channel in self._used_channels else ""
        return [self._channel("")]


def _may_be_header(text: str) -> bool:
    start = text.removeprefix("<|start|>").lstrip()
    known = "<|channel|>" in start or any(o.startswith(start) or start.startswith(o) for o in _OPENINGS)
    return known and len(text) <= _MAX_HEADER


def _function_of(opening: str) -> str:
    """Return the function's name in a call's header; empty if there is none."""
    found = _RECIPIENT.search(opening)
    return found[1].removeprefix("functions.") if found else ""


def named(function: str, arguments: str) -> str:
    """Return the beginning of a JSON object with the name and the arguments, which may be incomplete."""
    return f'{{"name": {json.dumps(function)}, "arguments": {arguments}'


class HarmonyCalls:
    """Calls whose header names the function, and whose text is the arguments. Implements `CallFormat`."""

    is_json = True

    def as_json(self, opening: str, text: str) -> str | None:
        """Return the header's function and the arguments so far as one JSON object."""
        return named(_function_of(opening), text)

    def parse(self, opening: str, text: str, tools: Tools) -> list[dict[str, Any]]:
        """Return the one call. Raises ValueError if the text is not JSON."""
        return [{"name": _function_of(opening), "arguments": json.loads(text)}]
