"""Parses harmony, the output format of gpt-oss: messages with headers.

The channel "analysis" is reasoning, a message with a recipient is a tool call, and all other text is content.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is warm.
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

The recipient may also come before the channel. The prompt ends with <|start|>assistant.
"""

import json
import re
from typing import Any, Literal

from worker.text.output.markers import ParseEvent
from worker.text.tokenizer import Splitter, Transitions

_HEADERS, _TEXT, _ENDS = ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (*_HEADERS, _TEXT, *_ENDS)
# The state is the last marker.
TRANSITIONS: Transitions = {state: [(marker, marker) for marker in MARKERS] for state in MARKERS}
ANSWER_BEGINS = "<|channel|>final<|message|>"
REASONING_BEGINS = "<|channel|>analysis<|message|>"

_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_OPENINGS = ("assistant", "to=")
_MAX_HEADER = 256  # characters; a function's name has at most 64

Channel = Literal["content", "reasoning", "call"]


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
        pieces = self._text_events(segments[0][1])
        for marker, more in segments[1:]:
            pieces += [*self._marker_events(marker), *self._text_events(more)]
        return pieces

    def reopen(self) -> str:
        """Continue the last call: its end marker was a part of it. Returns the header that the event did not hold."""
        header, self._header, self._channel = self._header, "", "call"
        return header

    def flush(self) -> list[ParseEvent]:
        """Return the events of the text that was held back, at the end of the answer."""
        _, held = self._splitter.flush()
        if self._channel == "call":
            return [("cut", held)]
        pieces = self._text_events(held)
        if self._channel is None and "<|" not in self._header:
            pieces.append(("content", self._header))
            self._header = ""
        return pieces

    def _text_events(self, text: str) -> list[ParseEvent]:
        if not text:
            return []
        if self._channel is None:
            self._header += text
            if _may_be_header(self._header):
                return []
            self._channel, text = "content", self._header
        self._used_channels.add(self._channel)
        joint, self._separator = self._separator, ""
        return [(self._channel, joint + text)]

    def _marker_events(self, marker: str) -> list[ParseEvent]:
        if marker == _TEXT:
            return self._begin() if self._channel is None else [("call", marker)] if self._channel == "call" else []
        if marker == "<|channel|>" and self._channel is None:
            self._header += marker
            return []
        ended, self._channel = self._channel == "call", None
        self._header = marker if marker in _HEADERS else ""
        return [("ends", marker if marker in _ENDS else "")] if ended else []

    def _begin(self) -> list[ParseEvent]:
        header, self._header = self._header, ""
        if _RECIPIENT.search(header):
            self._channel = "call"
            return [("begins", header + _TEXT)]
        self._channel = "reasoning" if _ANALYSIS.search(header) else "content"
        self._separator = (
            "\n\n" if self._channel in self._used_channels else ""
        )  # messages of a channel are separate texts
        return [(self._channel, "")]


def _may_be_header(text: str) -> bool:
    start = text.removeprefix("<|start|>").lstrip()
    known = "<|channel|>" in start or any(o.startswith(start) or start.startswith(o) for o in _OPENINGS)
    return known and len(text) <= _MAX_HEADER


def function_of(opening: str) -> str:
    """Return the function's name in a call's header; empty if there is none."""
    found = _RECIPIENT.search(opening)
    return found[1].removeprefix("functions.") if found else ""


def parse(opening: str, text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parse a call, as `Format.parse` does. Raises ValueError if the text is not JSON."""
    return [{"name": function_of(opening), "arguments": json.loads(text)}]
