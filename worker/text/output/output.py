"""Turns an answer's tokens into content, reasoning and tool calls for the client."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat
from sluice.contract.events import FinishReason
from worker.outcomes import StopReason
from worker.text.dialects.cursor import BLANK, Cursor
from worker.text.dialects.dialect import CallArguments, CallBegan, CallEnded, Repaired
from worker.text.dialects.json_text import Repair
from worker.text.dialects.values import Parameters
from worker.text.output.events import (
    Content,
    DeltaFields,
    OutputEvent,
    OutputEvents,
    Reasoning,
    ToolCalls,
    merge_deltas,
)
from worker.text.output.formats import ModelFormat
from worker.text.output.harmony import unescape_markers
from worker.text.output.thought import ANSWER_LOOP, LoopDetector, Thought
from worker.text.prompt.prompt import Thinking
from worker.text.tokenizer import Vocabulary


class StopStrings:
    """Ends a text at the stop string that is complete first, and holds back text that may be the start of one. The
    result does not depend on how the text was split into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = _Matcher(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._held = deque[str]()  # characters
        self.matched: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """True after a stop string."""
        return self.matched is not None

    def feed(self, text: str) -> str:
        """Return the text that can be no part of a stop string. Returns nothing once `stopped`."""
        if self.stopped:
            return ""
        if not self._held and self._starts.isdisjoint(text):
            return text
        for char in text:
            self._held.append(char)
            if matched := self._matcher.feed(char):
                return self._stop(matched)
        return self._release(len(self._held) - self._matcher.depth)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        self._matcher.reset()
        return self._release(len(self._held))

    def _stop(self, matched: int) -> str:
        text = self._release(len(self._held) - matched)
        self.matched = "".join(self._held)
        self._held.clear()
        return text

    def _release(self, count: int) -> str:
        return "".join([self._held.popleft() for _ in range(count)])


class _Matcher:
    """Automaton over all stop strings (Aho and Corasick 1975). A character costs O(1) amortized, for any number and
    length of the strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Indexed by node. A node is a prefix of a stop string; node 0 is the empty prefix.
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matched = [0]  # length of the longest stop string that ends here
        self._fallback = [0]  # node of the longest proper suffix
        self._node = 0
        for stop in stops:
            self._add(stop)
        self._link()

    @property
    def depth(self) -> int:
        """Length of the longest prefix of a stop string that the text ends with."""
        return self._depths[self._node]

    def feed(self, char: str) -> int:
        """Return the length of the longest stop string that ends with this character, or 0."""
        self._node = self._after(self._node, char)
        return self._matched[self._node]

    def reset(self) -> None:
        """Forget the text so far."""
        self._node = 0

    def _after(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            found = self._next[node].get(char)
            if found is None:
                found = self._next[node][char] = len(self._next)
                self._next.append({})
                self._depths.append(depth)
                self._matched.append(0)
                self._fallback.append(0)
            node = found
        self._matched[node] = len(stop)

    def _link(self) -> None:
        """Set the fallbacks, shorter nodes first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            fallback = self._fallback[node]
            self._matched[node] = self._matched[node] or self._matched[fallback]
            for char, child in self._next[node].items():
                self._fallback[child] = self._after(fallback, char)
                queue.append(child)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of some tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[DeltaFields, ...] = ()  # one for each call

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
    whitespace of each kind next to them belongs to the format and is dropped.
    """

    def __init__(
        self, vocabulary: Vocabulary, model_format: ModelFormat, request: ChatRequest, thinking: Thinking, job_id: str,
        *, thought: Thought | None = None, loop_guard: bool = False,
    ) -> None:  # fmt: skip
        """`thought`: before the first token; None if the model has none. `loop_guard`: an answer that repeats itself
        ends."""
        self._format = model_format
        self._detokenizer, self._cursor = vocabulary.detokenizer(), Cursor()
        # A grammar constrains such an answer to JSON, whose strings may hold text that looks like a marker.
        by_schema = isinstance(request.response_format, JsonObjectFormat | JsonSchemaFormat)
        # With `tool_choice: none` calls are read too, and left out: their markup would be of no use to the client.
        self._leaves_out_calls = request.tool_choice == "none" and not by_schema
        tools = request.tools or () if self._leaves_out_calls else request.offered_tools
        functions = {tool.function.name: Parameters(tool.function.parameters) for tool in tools}
        continues = request.messages[-1].role == "assistant"
        reader = model_format.reader(
            self._cursor, thinking, functions or None, only_before_content=by_schema, continues=continues
        )
        self._events: OutputEvents | None = reader.read() if reader else None
        self._calls = ToolCalls(job_id, parallel=request.parallel_tool_calls is not False)
        self.left_out_calls = False  # the answer has calls, which the request does not allow
        self._repairs = set[Repair]()
        self._thought = thought
        self._loops = LoopDetector(ANSWER_LOOP) if loop_guard else None
        self._cycle = 0  # tokens of the cycle for which the answer ended
        self._content, self._reasoning = _Channel(request.stop or ()), _Channel(())
        self._current: type[Content | Reasoning] = Content
        if thinking == "open":
            self._current = Reasoning
            if not continues:  # the prompt ends with the think marker
                self._reasoning.mark()

    @property
    def stopped(self) -> bool:
        """True after a stop string, after the one call that the request allows, or in a loop."""
        return self._content.stopped or self._calls.is_complete or self._cycle > 0

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer; None if another event did, or nothing yet."""
        return self._content.stop_sequence

    @property
    def repaired(self) -> list[str]:
        """What was wrong with the answer's calls and was put right, in a fixed order."""
        return [repair.value for repair in Repair if repair in self._repairs]

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning so far, with its markers; None if the model has no markers around it."""
        return self._thought.tokens if self._thought else None

    @property
    def warnings(self) -> list[str]:
        """What was ended since it repeated itself."""
        ended = {"reasoning was closed": self._thought.cycle if self._thought else 0, "answer was ended": self._cycle}
        return [
            f"loop_guard: the {what}, since it repeated the same {cycle:,} token{'s' * (cycle > 1)} over and over; "
            "send loop_guard: false if that is wanted."
            for what, cycle in ended.items()
            if cycle
        ]

    def finish_reason(self, engine: StopReason) -> FinishReason:
        """Return OpenAI's finish reason: "tool_calls" for an answer that stopped and has a call, as agents expect;
        "length" for one that ended in a loop, since it is cut off."""
        if self._cycle:
            return "length"
        return "tool_calls" if engine == "stop" and self._calls.num_made else engine

    def feed(self, token: int) -> OutputDelta:
        """Return the output that this token releases; nothing once `stopped`."""
        if self.stopped:
            return _NOTHING
        if self._thought:
            self._thought.append(token)
        delta = self._feed_text(self._format.text_of(token, self._detokenizer.feed(token)))
        if self._loops and not self.stopped and (cycle := self._loops.append(token)):
            delta += self.flush("length")
            self._cycle = cycle
        return delta

    def _feed_text(self, text: str) -> OutputDelta:
        if self._events is None:
            return OutputDelta(self._content.feed_plain(text))
        if not text:
            return _NOTHING
        self._cursor.add(text)
        return self._read(self._events)

    def flush(self, engine: StopReason = "stop") -> OutputDelta:
        """Return the rest, at the end of the answer. A call that "length" cut off is kept, incomplete."""
        if self.stopped:
            return _NOTHING
        text = self._detokenizer.flush()
        if self._events is None:
            return OutputDelta(self._content.feed_plain(text) + self._content.flush())
        self._cursor.add(text)
        self._cursor.end(cut_off=engine == "length")
        delta = self._read(self._events)
        return delta if self.stopped else delta + self._delta(self._channel.flush())

    def _read(self, events: OutputEvents) -> OutputDelta:
        delta = _NOTHING
        for event in events:
            if event is None:
                break
            delta += self._handle(event)
            if self.stopped:
                break
        return delta

    @property
    def _channel(self) -> "_Channel":
        return self._content if self._current is Content else self._reasoning

    def _delta(self, text: str) -> OutputDelta:
        return OutputDelta(text) if self._current is Content else OutputDelta(reasoning=text)

    def _handle(self, event: OutputEvent) -> OutputDelta:
        match event:
            case Content(text) | Reasoning(text):
                kind = type(event)
                crossed = self._switch(kind) if kind is not self._current or not text else _NOTHING
                return crossed + self._delta(self._channel.feed(unescape_markers(text)))
            case CallBegan() if self._leaves_out_calls:
                self.left_out_calls = True
                return self._switch(Content)
            case CallArguments() | CallEnded() | Repaired() if self._leaves_out_calls:
                return _NOTHING
            case CallBegan():
                return self._switch(Content) + OutputDelta(tool_calls=self._calls.read(event))
            case CallArguments(text):
                return OutputDelta(tool_calls=self._calls.read(CallArguments(unescape_markers(text))))
            case CallEnded():
                return OutputDelta(tool_calls=self._calls.read(event))
            case Repaired(repair) if not self._cursor.cut_off:  # else the model would have written on
                self._repairs.add(repair)
        return _NOTHING

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
                text = text.lstrip(BLANK)
            self.begun = bool(text.strip(BLANK))
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
        words = text if self.stopped else text.rstrip(BLANK)
        emitted = words
        if words or self.stopped:
            emitted = "".join([*self._blank, words])
            self._blank.clear()
        if blank := text[len(words) :]:
            self._blank.append(blank)
        if emitted:
            self._at_marker = False
        return emitted
