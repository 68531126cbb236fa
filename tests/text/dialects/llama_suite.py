"""The cases of llama.cpp's tests/test-chat.cpp: what a model writes, and what the suite expects to be read of it."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\])*)"'
    r"|(?P<name>[A-Za-z_][\w:]*)|(?P<number>[0-9]+)|(?P<sign>[^\s])",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)


@dataclass
class Case:
    """One `tst.test(…).run()`."""

    template: str
    given: dict[str, Any] = field(default_factory=dict)  # the arguments of each method by its name

    @property
    def expected(self) -> tuple[str, str, list[tuple[str, str]]]:
        """Content, reasoning, and calls with their arguments."""
        content, reasoning, calls = self.given.get("expect", ("", "", []))
        more = [(call[0], call[1]) for call in self.given.get("expect_tool_calls", [])]
        return self.given.get("expect_content", content), self.given.get("expect_reasoning", reasoning), more or calls


class Unread(Exception):
    """An expression that is no case's text."""


def tokens_of(source: str) -> list[tuple[str, str]]:
    """Return the tokens of C++ as (kind, text), without comments."""
    found = list[tuple[str, str]]()
    for each in _TOKEN.finditer(source):
        for kind in ("raw", "text", "name", "number", "sign"):
            if (text := each[kind]) is not None:
                found.append(
                    ("text", text if kind == "raw" else _unescaped(text)) if kind in ("raw", "text") else (kind, text)
                )
    return found


def _unescaped(text: str) -> str:
    data = _ESCAPED.sub(
        lambda each: chr(int(each[1] or each[2], 16)) if each[1] or each[2] else _ESCAPES.get(each[3], each[3]), text
    )
    return data


class Suite:
    """Reads the source in its order."""

    def __init__(self, source: str) -> None:
        self._tokens, self._at = tokens_of(source), 0
        self.names: dict[str, Any] = {"true": True, "false": False}
        self.cases, self.unread = list[Case](), 0
        self._templates = list[str]()
        self._functions = dict[str, list[str]]()  # templates that a function of tests is called with

    def read(self) -> "Suite":
        """Read all cases."""
        self._find_functions()
        while self._at < len(self._tokens) - 3:
            texts = [text for _, text in self._tokens[self._at : self._at + 3]]
            if texts[0] == "static" and texts[1] == "void":
                self._function = texts[2]
            if texts[:2] == ["peg_tester", "("]:
                path = self._tokens[self._at + 2]
                self._templates = [path[1]] if path[0] == "text" else self._functions.get(self._function, [])
            elif texts == ["tst", ".", "test"]:
                self._case()
                continue
            elif self._tokens[self._at][0] == "name" and texts[1] in ("=", "{") and texts[0] not in ("return", "tools"):
                self._assignment(texts[0], texts[1])
            self._at += 1
        return self

    _function = ""

    def _find_functions(self) -> None:
        for at, (_, name) in enumerate(self._tokens[:-2]):
            if (
                re.fullmatch(r"test_\w+_parser", name)
                and self._tokens[at + 1][1] == "("
                and self._tokens[at + 2][0] == "text"
            ):
                self._functions.setdefault(name, []).append(self._tokens[at + 2][1])

    def _assignment(self, name: str, sign: str) -> None:
        before = self._at
        self._at += 1 if sign == "{" else 2
        try:
            self.names[name] = self._value()
        except (Unread, IndexError):
            pass
        self._at = before

    def _case(self) -> None:
        cases = [Case(template) for template in self._templates]
        self._at += 2
        try:
            for name, given in self._chain():
                for case in cases:
                    case.given[name] = given
            self.cases += cases
        except Unread:
            self.unread += 1

    def _chain(self) -> Iterator[tuple[str, Any]]:
        while True:
            name = self._next()
            values = self._arguments("(", ")")
            if name == "run":
                return
            yield name, values[0] if len(values) == 1 else values or True
            if self._next() != ".":
                raise Unread

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at]

    def _arguments(self, opens: str, closes: str) -> list[Any]:
        if self._next() != opens:
            raise Unread
        values = list[Any]()
        while self._peek()[1] != closes or self._peek()[0] == "text":
            values.append(self._value())
            if self._peek() == ("sign", ","):
                self._at += 1
        self._at += 1
        return values

    def _value(self) -> Any:
        value = self._term()
        while self._peek() == ("sign", "+") or (isinstance(value, str) and self._peek()[0] == "text"):
            self._at += self._peek()[0] == "sign"
            value += self._term()
        return value

    def _term(self) -> Any:
        kind, text = self._peek()
        if kind == "text":
            self._at += 1
            return text
        if (kind, text) == ("sign", "{"):
            return self._arguments("{", "}")
        if kind != "name":
            raise Unread
        self._at += 1
        if self._peek() == ("sign", "("):
            return self._call(text, self._arguments("(", ")"))
        if text.startswith("COMMON_"):
            return text
        if text not in self.names:
            raise Unread
        return self.names[text]

    def _call(self, name: str, given: list[Any]) -> Any:
        match name:
            case "simple_assist_msg":
                content, reasoning, function, arguments = (*given, "", "", "", "")[:4]
                return content, reasoning, [(function, arguments)] if function else []
            case "message_with_tool_calls":
                return "", "", [(given[0], given[1])]
            case "message_with_tool_calls_and_reasoning":
                return "", given[2], [(given[0], given[1])]
            case "message_with_reasoning_content_and_multiple_tool_calls":
                return given[1], given[0], [(call[0], call[1]) for call in given[2]]
            case "message_with_content_and_tool_call":
                return given[0], "", [(given[1], given[2])]
            case "message_with_reasoning_and_tool_call":
                return "", given[0], [(given[1], given[2])]
            case "std::string":
                return given[0]
        raise Unread


def as_tool(given: list[Any]) -> dict[str, Any]:
    """Return a tool of the suite (name, description, parameters) in OpenAI's form."""
    parameters = json.loads(given[2]) if given[2] else {"type": "object"}
    return {"type": "function", "function": {"name": given[0], "description": given[1], "parameters": parameters}}
