"""One job on the terminal: its text on stdout, everything about it on stderr."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from sluice.wire import Cancelled, Delta, Event, Failed, Finished, Progress, Restarted, Resumed, Started

notes = Console(stderr=True)

# A model's text must not steer the terminal, and a lone surrogate has no bytes.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

Show = Callable[[bytes, Event], None]  # an event as it was written, and as it was read


def showing(*, as_json: bool, announce: bool = False) -> AbstractContextManager[Show]:
    """Return a context that yields a printer of events: JSON lines or text. `announce` also prints starts."""
    return nullcontext(print_line) if as_json else View(announce=announce).shown()


def print_line(raw: bytes, event: Event) -> None:
    """Print an event as a JSON line; failures also on stderr."""
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
    if isinstance(event, Failed):
        note(_failure(event), style="red")


@dataclass
class Answer:
    """The answer of the current attempt."""

    text: str = ""
    thought: bool = False
    called: bool = False

    def why_silent(self, finish_reason: str) -> str:
        """Return why there is no text."""
        if self.called:
            return "the model asks for the result of a tool first"
        if finish_reason == "length":
            return "the limit came before it; give the model more max_tokens"
        return "the model only thought" if self.thought else "the answer is empty"


@dataclass
class Call:
    """A tool call. Its name comes first, then its arguments in fragments."""

    function: str
    arguments: str = ""

    @property
    def whole(self) -> bool:
        """True if the arguments are complete JSON."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


class View:
    """Prints the events of one job for people."""

    def __init__(self, *, announce: bool = False) -> None:
        self.answer = Answer()
        self._from_start = False  # has all of the answer been shown?
        self._call: Call | None = None  # under way, to be shown when something else follows
        self._announce = announce
        self._status = notes.status("waiting in the queue", spinner_style="dim")
        self._open: str | None = None  # the stream on which a line has begun: text, or thoughts

    @contextmanager
    def shown(self) -> Iterator[Show]:
        """Show a status line and yield `show`."""
        try:
            self._status.start()
            yield self.show
        finally:
            self._status.stop()
            self._end_line()

    def show(self, raw: bytes, event: Event) -> None:
        """Print one event."""
        match event:
            case Restarted():
                self._begin_anew()
                self._remark(f"{event.worker} starts over; what was said so far does not count")
            case Resumed():
                self._remark(f"{event.worker} goes on")
            case Started():
                self._started(event)
            case Progress():
                self._status.update(f"{event.phase} {event.done:,} of {event.total:,} tokens")
            case Delta():
                self._delta(event)
            case Finished():
                self._finished(event)
            case Failed():
                self._last(_failure(event), style="red")
            case Cancelled():
                self._last(f"cancelled: {event.reason}")

    def _begin_anew(self) -> None:
        self.answer, self._call, self._from_start = Answer(), None, True

    def _started(self, event: Started) -> None:
        self._begin_anew()
        self._status.update("reading the prompt")
        if self._announce:
            self._remark(f"{event.worker} answers as {event.model} with seed {event.seed}")

    def _delta(self, event: Delta) -> None:
        if event.reasoning:
            self._think(event.reasoning)
        if event.content:
            self._say(event.content)
        for fragment in event.tool_calls or ():
            self._gather(fragment.get("function", {}))

    def _think(self, text: str) -> None:
        self._end_call()
        self._begin("thoughts")
        notes.out(printable(text), end="", style="dim italic", highlight=False)
        self._end_line_with(text)
        self.answer.thought = True

    def _say(self, text: str) -> None:
        self._end_call()
        self._write(text)
        self.answer.text += text

    def _gather(self, function: dict[str, Any]) -> None:
        if name := function.get("name"):
            self._end_call()
            self._call = Call(name)
            self._status.update("writing a tool call")
        if self._call:
            self._call.arguments += function.get("arguments") or ""

    def _end_call(self) -> None:
        if self._call and self._call.whole:
            self._end_line()
            self._write(f"→ {self._call.function}({self._call.arguments})\n")
            self.answer.called = True
        self._call = None

    def _finished(self, event: Finished) -> None:
        self._end_call()
        if self._from_start and not self.answer.text.strip():
            self._last(f"no text: {self.answer.why_silent(event.finish_reason)}")
        self._last(_summary(event))

    def _write(self, text: str) -> None:
        self._begin("text")
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        self._end_line_with(text)

    def _end_line_with(self, text: str) -> None:
        if text.endswith("\n"):
            self._open = None

    def _begin(self, stream: str) -> None:
        self._status.stop()
        if self._open not in (None, stream):
            self._end_line()
        self._open = stream

    def _remark(self, text: str, style: str = "dim") -> None:
        self._end_line()
        note(text, style)

    def _last(self, text: str, style: str = "dim") -> None:
        self._status.stop()
        self._remark(text, style)

    def _end_line(self) -> None:
        match self._open:
            case "text":
                print(flush=True)
            case "thoughts":
                notes.out()
        self._open = None


def note(text: str, style: str = "dim") -> None:
    """Print a line on stderr."""
    notes.print(Text(printable(text), style), soft_wrap=not notes.is_terminal)


def printable(text: str) -> str:
    """Replace control characters and lone surrogates."""
    return _UNPRINTABLE.sub("\ufffd", text)


def _failure(event: Failed) -> str:
    again = " The same request may go well later." if event.error.retryable else ""
    return f"{event.error.type}: {event.error.message}{again}"


def _summary(event: Finished) -> str:
    took, tokens = event.timings, event.usage.completion_tokens
    return " · ".join([
        f"queue {_duration(took.queue_s)}",
        f"ttft {_duration(took.ttft_s)}",
        *([f"{took.tokens_per_s:.1f} tokens/s"] if took.tokens_per_s else []),  # 0: too little to measure
        f"{tokens:,} token{'s' * (tokens != 1)}",
        event.finish_reason,
    ])  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
