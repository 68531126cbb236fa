"""Prints the events of a job: its text on stdout, all else on stderr."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from sluice.contract.events import Cancelled, Delta, Event, Failed, Finished, Progress, Restarted, Resumed, Started
from sluice.wording import counted


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of this width, or else of the terminal's. COLUMNS=0 stands for an unknown width: rich would
    print a line for each character."""
    if width is None and re.fullmatch("0+", os.environ.get("COLUMNS", "")):
        width = 80
    return Console(stderr=stderr, width=width)


notes = console(stderr=True)

# Control characters in a model's text could control the terminal; lone surrogates cannot be encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

ShowEvent = Callable[[bytes, Event], None]  # the event as JSON, and parsed


def event_printer(*, as_json: bool, announce: bool = False) -> AbstractContextManager[ShowEvent]:
    """Return a context that yields a function to print events, as JSON lines or as text. `announce`: also print which
    worker starts the job."""
    return nullcontext(print_line) if as_json else View(announce=announce).active()


def print_line(raw: bytes, event: Event) -> None:
    """Print an event as a JSON line on stdout, and a failure on stderr too."""
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()
    if isinstance(event, Failed):
        note(_failure(event), style="red")


@dataclass
class _ShownAnswer:
    """The answer of the current attempt."""

    text: str = ""
    reasoned: bool = False  # it has reasoning
    called: bool = False  # it has a complete tool call

    def why_empty(self, finish_reason: str) -> str:
        """Return why there is no text."""
        if self.called:
            return "the model needs the result of a tool call first"
        if finish_reason == "length":
            return "the token limit was reached first; increase max_tokens"
        return "the model wrote reasoning only" if self.reasoned else "the answer is empty"


@dataclass
class _Call:
    """A tool call, received as its name and then fragments of its arguments."""

    function: str
    arguments: str = ""

    @property
    def is_complete(self) -> bool:
        """True if the arguments are complete JSON."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


class View:
    """Prints the events of one job for people."""

    def __init__(self, *, announce: bool = False) -> None:
        self.answer = _ShownAnswer()
        self._from_start = False  # True if the events since the start of the attempt were shown
        self._call: _Call | None = None  # incomplete; printed when other output follows
        self._announce = announce
        self._status = notes.status("waiting in the queue", spinner_style="dim")
        self._open_stream: str | None = None  # the output with an unfinished line: "text" or "reasoning"

    @contextmanager
    def active(self) -> Iterator[ShowEvent]:
        """Show a status line while the context is open, and yield `show`."""
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
                self._reset()
                self._note(f"{event.worker} starts over: ignore the text so far")
            case Resumed():
                self._note(f"{event.worker} continues")
            case Started():
                self._start(event)
            case Progress(stored=False, phase="loading"):
                self._status.update(f"loading the model: {event.done / max(1, event.total):.0%}")
            case Progress(stored=False):
                self._waiting(event.workers or 0)
            case Progress():
                self._status.update(f"{event.phase} {event.done:,} of {event.total:,} tokens")
            case Delta():
                self._delta(event)
            case Finished():
                self._finished(event)
            case Failed():
                self._note_last(_failure(event), style="red")
            case Cancelled():
                self._note_last(f"cancelled: {event.reason}")

    def _reset(self) -> None:
        self.answer = _ShownAnswer()
        self._call = None
        self._from_start = True

    def _start(self, event: Started) -> None:
        self._reset()
        self._status.update("computing the prompt")
        if self._announce:
            self._note(f"worker {event.worker}, model {event.model}, seed {event.seed}")

    def _waiting(self, workers: int) -> None:
        """Tell that nobody works on the job, or that somebody may again: in a line of its own if there is text."""
        text = f"waiting; {counted(workers, 'worker')} alive" if workers else "no worker is running; waiting"
        self._status.update(text)
        if self._open_stream or self.answer.text or self.answer.reasoned:
            self._note(text, style="yellow")

    def _delta(self, event: Delta) -> None:
        if event.reasoning:
            self._print_reasoning(event.reasoning)
        if event.content:
            self._print_content(event.content)
        for fragment in event.tool_calls or ():
            self._add_to_call(fragment.get("function", {}))

    def _print_reasoning(self, text: str) -> None:
        self._end_call()
        self._begin_line("reasoning")
        notes.out(printable(text), end="", style="dim italic", highlight=False)
        self._end_line_with(text)
        self.answer.reasoned = True

    def _print_content(self, text: str) -> None:
        self._end_call()
        self._write(text)
        self.answer.text += text

    def _add_to_call(self, function: dict[str, Any]) -> None:
        if name := function.get("name"):
            self._end_call()
            self._call = _Call(name)
            self._status.update("writing a tool call")
        if self._call:
            self._call.arguments += function.get("arguments") or ""

    def _end_call(self) -> None:
        if self._call and self._call.is_complete:
            self._end_line()
            self._write(f"→ {self._call.function}({self._call.arguments})\n")
            self.answer.called = True
        self._call = None

    def _finished(self, event: Finished) -> None:
        self._end_call()
        if self._from_start and not self.answer.text.strip():
            self._note_last(f"no text: {self.answer.why_empty(event.finish_reason)}")
        for warning in event.warnings or ():
            self._note_last(warning, style="yellow")
        self._note_last(_summary(event))

    def _write(self, text: str) -> None:
        self._begin_line("text")
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        self._end_line_with(text)

    def _end_line_with(self, text: str) -> None:
        if text.endswith("\n"):
            self._open_stream = None

    def _begin_line(self, stream: str) -> None:
        self._status.stop()
        if self._open_stream not in (None, stream):
            self._end_line()
        self._open_stream = stream

    def _note(self, text: str, style: str = "dim") -> None:
        self._end_line()
        note(text, style)

    def _note_last(self, text: str, style: str = "dim") -> None:
        self._status.stop()
        self._note(text, style)

    def _end_line(self) -> None:
        match self._open_stream:
            case "text":
                print(flush=True)
            case "reasoning":
                notes.out()
        self._open_stream = None


def note(text: str, style: str = "dim") -> None:
    """Print a line on stderr."""
    notes.print(Text(printable(text), style), soft_wrap=not notes.is_terminal)


def say_that_it_reads(model: str) -> None:
    """Print on a terminal what the next seconds are for: the libraries are imported, and a model's files are read."""
    if notes.is_terminal:
        note(f"reading {model}, without its weights; this takes some seconds")


def printable(text: str) -> str:
    """Replace control characters and lone surrogates."""
    return _UNPRINTABLE.sub("\ufffd", text)


def _failure(event: Failed) -> str:
    again = " The same request may succeed later." if event.error.retryable else ""
    return f"{event.error.type}: {event.error.message}{again}"


def _summary(event: Finished) -> str:
    timings, tokens = event.timings, event.usage.completion_tokens
    return " · ".join([
        f"queue {_duration(timings.queue_s)}",
        *([f"load {_duration(timings.load_s)} of it"] if timings.load_s else []),
        f"ttft {_duration(timings.ttft_s)}",
        *([f"{timings.tokens_per_s:.1f} tokens/s"] if timings.tokens_per_s else []),  # 0: fewer than two tokens
        f"{tokens:,} token{'s' * (tokens != 1)}",
        *([f"{event.usage.reasoning_tokens:,} of reasoning"] if event.usage.reasoning_tokens else []),
        event.finish_reason,
    ])  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
