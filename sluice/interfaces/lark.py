"""Lark grammars without recursion, as regular expressions. In this form a JSON schema, and so the contract, can hold
the input of a custom tool to them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_CHARACTERS = 20_000  # of an expression: rules that double each other grow without a bound
# A letter after a string or an expression is a flag of Lark's, not the name of a rule.
_TOKEN = re.compile(
    r"(?P<space>[ \t\f]+|//[^\n]*)"
    r"|(?P<line>\r?\n)"
    r'|(?P<string>"(?:[^"\\\n]|\\.)*")(?!i)'
    r"|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/)(?![imslux])"
    r"|(?P<import>%import[ \t]+common\.[A-Z_]+)(?![ \t]*->)"
    r"|(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)"
    r"|(?P<alias>->[ \t]*\w+)"
    r"|(?P<name>[!?]?_?[A-Za-z]\w*)(?:\.-?\d+)?"
    r"|(?P<mark>\.\.|[:|()\[\]?*+])"
)
_LETTERS, _DIGIT = "[A-Za-z]", "[0-9]"
_INT = f"{_DIGIT}+"
_FLOAT = rf"(?:{_INT}[eE][+-]?{_INT}|(?:{_INT}\.(?:{_INT})?|\.{_INT})(?:[eE][+-]?{_INT})?)"
# Lark's own library of terminals.
_COMMON = {
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "CR": r"\r",
    "DIGIT": _DIGIT,
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": _FLOAT,
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": _INT,
    "LCASE_LETTER": "[a-z]",
    "LETTER": _LETTERS,
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": f"(?:{_FLOAT}|{_INT})",
    "SIGNED_INT": f"[+-]?{_INT}",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_INT})",
    "UCASE_LETTER": "[A-Z]",
    "WORD": f"{_LETTERS}+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_SPECIAL, _SPECIAL_IN_CLASS = r"\^$.|?*+()[]{}", r"\]^-"
_WRITTEN = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f"}


class _NoPattern(Exception):
    """The grammar is recursive, too large, invalid, or uses what no regular expression here stands for."""


def lark_pattern(definition: str) -> str | None:
    """Return a regular expression for the texts of a grammar, from its rule `start`; None if there is none.

    Unlike Lark's parsers, it takes a text however it can be cut into terminals.
    """
    try:
        return _Grammar(list(_tokens(definition))).pattern("start")
    except (_NoPattern, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def _tokens(definition: str) -> Iterator[_Token]:
    """Yield the tokens without spaces, comments and aliases. Raises `_NoPattern` for what is not understood."""
    at = 0
    while at < len(definition):
        token = _TOKEN.match(definition, at)
        if token is None:
            raise _NoPattern
        at = token.end()
        kind = str(token.lastgroup)
        if kind not in ("space", "alias"):
            yield _Token(kind, token[kind])


class _Grammar:
    """The rules of a grammar, each turned into an expression at its first use."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._patterns: dict[str, str | None] = {}  # None while the rule is being turned
        for line in _statements(tokens):
            self._define(line)

    def _define(self, line: list[_Token]) -> None:
        if [token.kind for token in line] == ["import"]:
            name = line[0].text.rpartition(".")[2]
            if name not in _COMMON:
                raise _NoPattern
            self._patterns[name] = _COMMON[name]
        elif len(line) > 2 and line[0].kind == "name" and line[1].text == ":":
            self._rules[line[0].text.lstrip("!?")] = line[2:]
        else:
            raise _NoPattern

    def pattern(self, name: str) -> str:
        """Return the expression of a rule or terminal. Raises `_NoPattern`."""
        if name not in self._patterns:
            if name not in self._rules:
                raise _NoPattern
            self._patterns[name] = None
            self._patterns[name] = _Rule(self, self._rules[name]).pattern()
        pattern = self._patterns[name]
        if pattern is None:  # the rule needs itself
            raise _NoPattern
        return pattern


def _statements(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield the tokens of each rule or import; a line that begins with `|` continues the one before."""
    lines: list[list[_Token]] = [[]]
    for token in tokens:
        if token.kind == "line":
            lines.append([])
        else:
            lines[-1].append(token)
    statement: list[_Token] = []
    for line in filter(None, lines):
        if line[0].text != "|" and statement:
            yield statement
            statement = []
        statement += line
    yield statement


class _Rule:
    """Turns the right side of one rule into an expression."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token]) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._at = 0

    def pattern(self) -> str:
        """Return the expression of the whole right side. Raises `_NoPattern`."""
        found = self._alternatives()
        if self._peek() is not None:
            raise _NoPattern
        return found

    def _peek(self) -> str | None:
        return self._tokens[self._at].text if self._at < len(self._tokens) else None

    def _take(self) -> _Token:
        if self._at == len(self._tokens):
            raise _NoPattern
        self._at += 1
        return self._tokens[self._at - 1]

    def _alternatives(self) -> str:
        found = [self._sequence()]
        left = _MAX_CHARACTERS - len(found[0])
        while self._peek() == "|":
            self._take()
            found.append(self._sequence())
            left = _without(left, found[-1])
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        found, left = list[str](), _MAX_CHARACTERS
        while self._peek() not in (None, "|", ")", "]"):
            found.append(self._repeated(self._one()))
            left = _without(left, found[-1])
        return "".join(found)

    def _repeated(self, one: str) -> str:
        following = self._peek() or ""
        if following in ("?", "*", "+"):
            return f"(?:{one}){self._take().text}"
        if following.startswith("~"):
            least, _, most = self._take().text[1:].replace(" ", "").partition("..")
            return f"(?:{one}){{{least},{most or least}}}"
        return one

    def _one(self) -> str:
        token = self._take()
        match token:
            case _Token("name", name):
                return self._grammar.pattern(name)
            case _Token("regex", text):
                return "(?:" + text[1:-1].replace(r"\/", "/") + ")"
            case _Token("string", text):
                return self._string(_unquoted(text))
            case _Token("mark", "(" | "[" as opening):
                inner = self._alternatives()
                if self._take().text != {"(": ")", "[": "]"}[opening]:
                    raise _NoPattern
                return inner if opening == "(" else f"(?:{inner})?"
        raise _NoPattern

    def _string(self, text: str) -> str:
        if self._peek() != "..":
            return "".join(map(_escaped, text))
        self._take()
        last = _unquoted(self._take().text)
        if len(text) != 1 or len(last) != 1:
            raise _NoPattern
        return f"[{_escaped(text, _SPECIAL_IN_CLASS)}-{_escaped(last, _SPECIAL_IN_CLASS)}]"


def _without(left: int, part: str) -> int:
    """Return the characters that an expression has left after a part of it. Raises `_NoPattern` if there are none."""
    if len(part) >= left:
        raise _NoPattern
    return left - len(part) - 1


def _escaped(character: str, special: str = _SPECIAL) -> str:
    if character in _WRITTEN:
        return _WRITTEN[character]
    return f"\\{character}" if character in special else character


def _unquoted(text: str) -> str:
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        raise _NoPattern from None
