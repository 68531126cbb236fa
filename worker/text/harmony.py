"""gpt-oss's way to answer: messages with headers. analysis is reasoning, a recipient makes a tool call, and all
else is content.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is warm.
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

The recipient may also stand before the channel. The prompt ends with <|start|>assistant.
"""

import json
import re
from typing import Any, Literal

from worker.text.markers import Piece
from worker.text.tokenizer import Splitter, Transitions

_HEADERS, _TEXT, _ENDS = ("<|start|>", "<|channel|>"), "<|message|>", ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (*_HEADERS, _TEXT, *_ENDS)
# A state is the marker that was seen last.
TRANSITIONS: Transitions = {state: [(marker, marker) for marker in MARKERS] for state in MARKERS}
ANSWER_BEGINS = "<|channel|>final<|message|>"
REASONING_BEGINS = "<|channel|>analysis<|message|>"

_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_OPENINGS = ("assistant", "to=")
_LONGEST_HEADER = 256  # characters; a function's name has at most 64

Channel = Literal["content", "reasoning", "call"]


class Harmony:
    """A model that answers without a header, as one does that goes on with a message of the prompt, says content."""

    def __init__(self, splitter: Splitter) -> None:
        """`splitter` by TRANSITIONS."""
        self._splitter = splitter
        self._channel: Channel | None = None  # in a header
        self._header = ""
        self._spoken = set[Channel]()
        self._joint = ""  # before the text that comes next

    def feed(self, text: str) -> list[Piece]:
        segments = self._splitter.feed(text)
        pieces = self._said(segments[0][1])
        for marker, more in segments[1:]:
            pieces += [*self._crossed(marker), *self._said(more)]
        return pieces

    def reopen(self) -> str:
        header, self._header, self._channel = self._header, "", "call"
        return header

    def flush(self) -> list[Piece]:
        _, held = self._splitter.flush()
        if self._channel == "call":
            return [("cut", held)]
        pieces = self._said(held)
        if self._channel is None and "<|" not in self._header:
            pieces.append(("content", self._header))
            self._header = ""
        return pieces

    def _said(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._channel is None:
            self._header += text
            if _may_be_header(self._header):
                return []
            self._channel, text = "content", self._header
        self._spoken.add(self._channel)
        joint, self._joint = self._joint, ""
        return [(self._channel, joint + text)]

    def _crossed(self, marker: str) -> list[Piece]:
        if marker == _TEXT:
            return self._begin() if self._channel is None else [("call", marker)] if self._channel == "call" else []
        if marker == "<|channel|>" and self._channel is None:
            self._header += marker
            return []
        ended, self._channel = self._channel == "call", None
        self._header = marker if marker in _HEADERS else ""
        return [("ends", marker if marker in _ENDS else "")] if ended else []

    def _begin(self) -> list[Piece]:
        header, self._header = self._header, ""
        if _RECIPIENT.search(header):
            self._channel = "call"
            return [("begins", header + _TEXT)]
        self._channel = "reasoning" if _ANALYSIS.search(header) else "content"
        self._joint = "\n\n" if self._channel in self._spoken else ""  # between messages there is no space
        return [(self._channel, "")]


def _may_be_header(text: str) -> bool:
    start = text.removeprefix("<|start|>").lstrip()
    known = "<|channel|>" in start or any(o.startswith(start) or start.startswith(o) for o in _OPENINGS)
    return known and len(text) <= _LONGEST_HEADER


def function_of(opening: str) -> str:
    found = _RECIPIENT.search(opening)
    return found[1].removeprefix("functions.") if found else ""


def parse(opening: str, text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": function_of(opening), "arguments": json.loads(text)}]
