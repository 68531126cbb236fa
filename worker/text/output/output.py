"""Turns an answer's tokens into content, reasoning and tool calls for the client."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat
from worker.schedule.outcomes import FinishReason
from worker.text.output.events import (
    CallClosed,
    CallCutOff,
    CallOpened,
    CallText,
    Content,
    OutputParser,
    ParseEvent,
    Reasoning,
    ToolCallEvent,
    Tools,
)
from worker.text.output.formats import ModelFormat
from worker.text.output.markers import PlainParser
from worker.text.output.stop import StopStrings
from worker.text.output.tool_calls import Calls, Delta, InvalidCall, as_deltas, merge_deltas
from worker.text.prompt.prompt import Thinking
from worker.text.vocabulary import Vocabulary

_BLANK = " \t\r\n"
_MARKER_PARTS = re.compile(r"[^>\]]*[>\]]|[^>\]]+")  # parts that end after > or ], as markers do


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of some tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[Delta, ...] = ()  # one for each call

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, later: "OutputDelta") -> "OutputDelta":
        if not later:
            return self
        if not self:
            return later
        calls = merge_deltas((*self.tool_calls, *later.tool_calls)) if later.tool_calls else self.tool_calls
        return OutputDelta(self.content + later.content, self.reasoning + later.reasoning, calls)


_NOTHING = OutputDelta()


def concat(parts: Iterable[OutputDelta]) -> OutputDelta:
    """Return the sum of the parts, in linear time."""
    deltas = list(parts)
    calls = merge_deltas(call for delta in deltas for call in delta.tool_calls)
    return OutputDelta("".join(each.content for each in deltas), "".join(each.reasoning for each in deltas), calls)


class Output:
    """Parses one answer. Feeding the delivered tokens again restores its state, which resuming relies on.

    Stop strings match within content only, never across a marker. If an answer has markers, leading and trailing
    whitespace of each kind next to them belongs to the format and is dropped. An invalid tool call is content, as the
    model wrote it. If it was already announced, `retracted` holds its index: the client has fragments of it, but it is
    not in the result and does not make the finish reason "tool_calls".
    """

    def __init__(
        self, vocabulary: Vocabulary, model_format: ModelFormat, request: ChatRequest, thinking: Thinking, job_id: str
    ) -> None:
        tools = _functions(request)
        self._detokenizer = vocabulary.detokenizer()
        self._parser = model_format.parser(thinking, calls=bool(tools))
        # A grammar constrains such an answer to JSON, whose strings may hold text that looks like a marker.
        self._by_schema = isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat)
        self._calls = Calls(model_format.calls, tools, job_id, parallel=request.parallel_tool_calls is not False)
        self._content, self._reasoning = _Channel(request.stop or ()), _Channel(())
        self._current: type[Content | Reasoning] = Content
        self._closing = ""  # beginning of an end marker that the answer's end cut off
        if thinking == "open":
            self._current = Reasoning
            # The prompt ends with the think marker, unless it continues an assistant message.
            if request.messages[-1].role != "assistant":
                self._reasoning.mark()

    @property
    def stopped(self) -> bool:
        """True after a stop string, or after the one call that the request allows."""
        return self._content.stopped or self._calls.is_complete

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer; None if another event did, or nothing yet."""
        return self._content.stop_sequence

    @property
    def retracted(self) -> frozenset[int]:
        """Indices of announced tool calls that turned out to be invalid."""
        return frozenset(self._calls.retracted)

    def finish_reason(self, engine: FinishReason) -> Literal["stop", "length", "tool_calls"]:
        """Return OpenAI's finish reason: "tool_calls" for an answer that stopped and has a call, as agents expect."""
        return "tool_calls" if engine == "stop" and self._calls.num_made else engine

    def feed(self, token: int) -> OutputDelta:
        """Return the output that this token releases; nothing once `stopped`."""
        if self.stopped:
            return _NOTHING
        text = self._detokenizer.feed(token)
        if self._parser is None:
            return OutputDelta(self._content.feed_plain(text))
        return self._read(self._parser, text) if text else _NOTHING

    def flush(self, engine: FinishReason = "stop") -> OutputDelta:
        """Return the rest, at the end of the answer. A call that "length" cut off is kept, incomplete."""
        if self.stopped:
            return _NOTHING
        text = self._detokenizer.flush()
        if self._parser is None:
            return OutputDelta(self._content.feed_plain(text) + self._content.flush())
        delta = self._read(self._parser, text)
        if not self.stopped:
            delta += self._handle_all(self._parser.flush())
        return delta if self.stopped else delta + self._end(engine)

    def _read(self, parser: OutputParser, text: str) -> OutputDelta:
        delta = _NOTHING
        # A marker ends the open call only outside of JSON strings, so all text before it is parsed first.
        for part in _MARKER_PARTS.findall(text) if self._calls.open else [text]:
            delta += self._handle_all(parser.feed(part))
            if self.stopped:
                return delta
        if self._by_schema and self._content.begun:
            self._by_schema, self._parser = False, PlainParser()
            delta += self._handle_all(parser.flush())
        return delta

    def _end(self, engine: FinishReason) -> OutputDelta:
        delta = _NOTHING
        if self._calls.open:
            delta = self._delta(self._channel.flush_stops())
            delta += self._emit_closed(self._calls.cut_off(self._closing, keep=engine == "length"))
        return delta if self.stopped else delta + self._delta(self._channel.flush())

    @property
    def _channel(self) -> "_Channel":
        return self._content if self._current is Content else self._reasoning

    def _delta(self, text: str) -> OutputDelta:
        return OutputDelta(text) if self._current is Content else OutputDelta(reasoning=text)

    def _handle_all(self, events: list[ParseEvent]) -> OutputDelta:
        if len(events) == 1:
            return self._handle(events[0])
        delta = _NOTHING
        for event in events:
            delta += self._handle(event)
            if self.stopped:
                break
        return delta

    def _handle(self, event: ParseEvent) -> OutputDelta:
        match event:
            case Content(text) | Reasoning(text):
                kind = type(event)
                crossed = self._switch(kind) if kind is not self._current or not text else _NOTHING
                return crossed + self._delta(self._channel.feed(text))
            case CallOpened(marker) if not self._calls.open:
                self._calls.begin(marker)
            case CallText(text) | CallOpened(text):
                return OutputDelta(tool_calls=as_deltas(self._calls.feed(text)))
            case CallClosed(marker) if self._calls.in_string and self._parser:
                return self._handle(CallText(marker + self._parser.reopen()))
            case CallClosed(marker):
                return self._emit_closed(self._calls.end(marker))
            case CallCutOff(marker):
                self._closing += marker
        return _NOTHING

    def _emit_closed(self, closed: list[ToolCallEvent] | InvalidCall) -> OutputDelta:
        if isinstance(closed, InvalidCall):
            return self._handle(Content(closed.text))
        return self._switch(Content) + OutputDelta(tool_calls=as_deltas(closed))

    def _switch(self, kind: type[Content | Reasoning]) -> OutputDelta:
        """End the present channel at a marker; the following text is of this kind."""
        delta = self._delta(self._channel.mark())
        self._current = kind
        self._channel.mark()
        return delta


class _Channel:
    """Content or reasoning of one answer, with markers in between."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = StopStrings(stops)
        self.begun = False  # True after the first character that is not whitespace
        self._blank = list[str]()  # trailing whitespace, held back: it belongs to the format if a marker follows
        self._at_marker = False  # True if no text followed the last marker

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    @property
    def stop_sequence(self) -> str | None:
        return self._stops.matched

    def feed_plain(self, text: str) -> str:
        """Return the text to emit, for a format without markers: no whitespace is dropped."""
        return self._stops.feed(text)

    def feed(self, text: str) -> str:
        """Return the text to emit now."""
        if not self.begun:
            if self._at_marker:
                text = text.lstrip(_BLANK)
            self.begun = bool(text.strip(_BLANK))
        return self._hold_back(self._stops.feed(text))

    def flush_stops(self) -> str:
        """Return the text that was held back as the possible start of a stop string."""
        return self._hold_back(self._stops.flush())

    def mark(self) -> str:
        """Return the text before a marker. Its trailing space is emitted only if more text of this kind follows."""
        text = self.flush_stops()
        if not self.begun:
            self._blank.clear()
        self._at_marker = True
        return text

    def flush(self) -> str:
        text = self.flush_stops()
        blank = "" if self._at_marker else "".join(self._blank)
        self._blank.clear()
        return text + blank

    def _hold_back(self, text: str) -> str:
        words = text if self.stopped else text.rstrip(_BLANK)
        emitted = words
        if words or self.stopped:
            emitted = "".join([*self._blank, words])
            self._blank.clear()
        if blank := text[len(words) :]:
            self._blank.append(blank)
        if emitted:
            self._at_marker = False
        return emitted


def _functions(request: ChatRequest) -> Tools:
    functions = [tool.function.model_dump(exclude_none=True) for tool in request.offered_tools]
    # Some of mlx-lm's parsers require parameters even if a function has none.
    return [{"type": "function", "function": {"parameters": {}, **function}} for function in functions]
