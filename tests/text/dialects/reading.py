"""Reads texts in a dialect, cut at any places."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from schemas import ChatRequest
from worker.text.dialects.cursor import Cursor
from worker.text.dialects.dialect import CallArguments, CallBegan, CallEnded, Repaired
from worker.text.dialects.table import DIALECTS, Thoughts
from worker.text.dialects.values import Parameters
from worker.text.output.answer import AnswerReader
from worker.text.output.events import Content, Reasoning
from worker.text.output.formats import ModelFormat
from worker.text.output.output import Output

BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
THINK = Thoughts("<think>", "</think>")
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
FUNCTIONS = {"weather": Parameters({"type": "object", "properties": PROPERTIES}), "now": Parameters({"type": "object"})}


class Answer:
    """What was read of an answer."""

    def __init__(
        self, name: str, functions: dict[str, Parameters] | None = FUNCTIONS, *, reasons: bool = False
    ) -> None:
        self._cursor = Cursor()
        self._events = AnswerReader(
            self._cursor, THINK, BY_NAME[name], functions, reasons=reasons, thought=False, only_before_content=False
        ).read()
        self.content = self.reasoning = ""
        self.written = list[tuple[str, str]]()  # each call with its arguments as text
        self.complete = list[bool]()
        self.repaired = list[str]()

    def add(self, text: str) -> None:
        self._cursor.add(text)
        self._read()

    def end(self, *, cut_off: bool = False) -> "Answer":
        self._cursor.end(cut_off=cut_off)
        self._read()
        return self

    def _read(self) -> None:
        for event in self._events:
            match event:
                case None:
                    return
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegan(function):
                    self.written.append((function, ""))
                case CallArguments(text):
                    function, before = self.written[-1]
                    self.written[-1] = function, before + text
                case CallEnded(complete):
                    self.complete.append(complete)
                case Repaired(repair):
                    self.repaired.append(repair.name)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(function, json.loads(arguments)) for function, arguments in self.written]

    @property
    def whole(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, self.written, self.complete, self.repaired


def read(name: str, text: str | Sequence[str], *, cut_off: bool = False, **more: Any) -> Answer:
    answer = Answer(name, **more)
    for piece in [text] if isinstance(text, str) else text:
        answer.add(piece)
    return answer.end(cut_off=cut_off)


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


class Pieces:
    """Texts in the place of tokens."""

    def detokenizer(self) -> "Pieces":
        return self

    def feed(self, text: str) -> str:
        return text

    def flush(self) -> str:
        return ""


class AnyFunction(dict[str, Parameters]):
    """The functions of a request that names none, for suites which read calls of any."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return True


def output(model_format: ModelFormat, tools: dict[str, Any], thinking: Any = "none") -> Any:
    """Return the parser of an answer, which is fed with pieces of text. `tools`: the schemas of functions by name; if
    there are none, any may be called."""
    offered = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": offered or None})
    made = Output(Pieces(), model_format, asked, thinking, "suite")  # type: ignore[arg-type]
    if not tools:
        reader = model_format.reader(made._cursor, thinking, AnyFunction(), only_before_content=False)
        made._events = reader.read() if reader else None
    return made
