"""Grammars of tool calls, one for each class of dialect. The dialect's own reader reads the calls."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from worker.errors import JobFailure
from worker.text.dialects.dialect import Dialect
from worker.text.dialects.header_calls import HeaderCalls
from worker.text.dialects.json_calls import JsonCalls
from worker.text.dialects.pythonic import GemmaCalls, PythonicCalls
from worker.text.dialects.table import by_name
from worker.text.dialects.tag_calls import TagCalls, tag
from worker.text.grammar.lark import Grammar, literal, spaced
from worker.text.grammar.native_values import NativeValues, Unwritable, any_of
from worker.text.grammar.schema.unsupported import Schema
from worker.text.grammar.tag_values import TagParameters
from worker.text.output.harmony import MARKERS as HARMONY


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a request offers."""

    name: str
    parameters: Schema | None = None


_ANNOTATIONS = {"type", "title", "description", "$schema"}
_ID = "[A-Za-z0-9_.:-]{1,64}"  # the model's own id of a call
_INDEX = "[0-9]{1,3}"
_GAP = r"/\n{0,2}/"  # between tags and between calls: templates of one dialect differ in it


def texts_of(calls_as: str | None) -> tuple[str, ...]:
    """Return the texts that grammars of a dialect use, and in which tokens may occur."""
    if calls_as == "harmony":
        return (*HARMONY, "<|constrain|>")
    dialect: Any = by_name(calls_as)
    return tuple(_texts(astuple(dialect))) if dialect else ()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def in_json(calls_as: str | None) -> bool:
    """Return True if a dialect's calls are JSON between markers. `calls_as`: see `tool_calls`."""
    return calls_as in (None, "harmony") or isinstance(by_name(calls_as), JsonCalls | HeaderCalls)


def tool_calls(calls_as: str, grammar: Grammar, functions: Sequence[Function], many: bool, opened: str = "") -> str:
    """Return the rule for a call of one of the functions, or for several calls if `many`. `calls_as`: the dialect's
    name, or "harmony". `opened`: the opening of the first call, if the prompt has it. Raises `JobFailure`."""
    if calls_as == "harmony":
        return harmony(grammar, functions)
    dialect = by_name(calls_as)
    assert dialect is not None
    calls = _CallGrammar(grammar, functions, many, opened).of(dialect)
    return calls if opened else grammar.rule(f"{_GAP} {calls}")


class _CallGrammar:
    """The grammar of the calls of one request."""

    def __init__(self, grammar: Grammar, functions: Sequence[Function], many: bool, opened: str) -> None:
        self._grammar, self._functions = grammar, functions
        self._many, self._opened = many, opened
        self._arguments = dict[str, str]()  # rules for arguments in JSON, by the function's name

    def of(self, dialect: Dialect) -> str:
        """Return the rule for calls in a dialect."""
        match dialect:
            case JsonCalls():
                return self.json(dialect)
            case HeaderCalls():
                return self.headers(dialect)
            case TagCalls():
                return self.tags(dialect)
            case PythonicCalls():
                return self.pythonic(dialect)
            case GemmaCalls():
                return self.gemma(dialect)
        raise TypeError(f"no grammar is written for {type(dialect).__name__}.")

    def _repeated(self, call: str, between: str) -> str:
        """Return the rule for a call, or for several if the request allows them."""
        return self._grammar.rule(f"{call} ({between} {call})*" if self._many else call)

    def json(self, dialect: JsonCalls) -> str:
        r"""Return the rule for objects between markers, in a list or one after the other.

        <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>
        """
        call = self._objects(dialect, self._functions)
        begins, ends = self._grammar.marker(dialect.openings[0]), self._grammar.marker(dialect.closing)
        if dialect.is_list:
            objects = f"({self._listed(call)} | {self._repeated(call, '')})"
            return self._grammar.rule(f"{begins} {objects} {ends}")
        if dialect.bare and not dialect.closing:
            calls = self._repeated(call, f"{literal(dialect.between.strip())}")
            return self._grammar.rule(f"({begins})? {calls}")
        return self._repeated(self._grammar.rule(f"{begins} {call} {ends}"), _GAP)

    def _listed(self, call: str) -> str:
        opens, closes = spaced(r" \["), spaced(r"\] ")
        return self._grammar.rule(f"{opens} {self._repeated(call, '/,/')} {closes}")

    def _objects(self, dialect: JsonCalls, functions: Sequence[Function]) -> str:
        return self._grammar.rule(any_of([self._object(dialect, function) for function in functions]))

    def _object(self, dialect: JsonCalls, function: Function) -> str:
        name, key = re.escape(function.name), dialect.keys[0]
        before, after = dialect.ids
        head = f'"{name}" : ' if dialect.named_by_key else f'"{key}" : "{name}" , "{dialect.keys[1]}" : '
        first = f'(?:"{before}" : "{_ID}" , )?' if before else ""
        last = f'(?: , "{after}" : "{_ID}")?' if after else ""
        begins, ends = spaced(rf" \{{ {first}{head}"), spaced(rf"{last} \}} ")
        return self._grammar.rule(f"{begins} {self._as_json(function)} {ends}")

    def _as_json(self, function: Function) -> str:
        if function.name not in self._arguments:
            self._arguments[function.name] = self._grammar.json(arguments_of(function), _field(function))
        return self._arguments[function.name]

    def headers(self, dialect: HeaderCalls) -> str:
        """Return the rule for calls with a header, alone or in a section: [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}"""
        forms = (dialect.form, *dialect.more_forms)
        each = self._with_headers(forms)
        first = self._with_headers([form.removeprefix(self._opened) for form in forms]) if self._opened else each
        calls = self._grammar.rule(f"{first} ({_GAP} {each})*" if self._many else first)
        if dialect.each:
            ends = self._grammar.marker(dialect.closing)
            calls = self._grammar.rule(f"{self._grammar.marker(dialect.openings[0])} {calls} {ends}")
        return self._grammar.rule(f"{calls} | {self.json(dialect.as_list)}") if dialect.as_list else calls

    def _with_headers(self, forms: Iterable[str]) -> str:
        """Return the rule for one call of any function, in one of the forms."""
        return self._grammar.rule(
            any_of([self._with_header(form, function) for function in self._functions for form in forms])
        )

    def _with_header(self, form: str, function: Function) -> str:
        """Return the rule for one call, from the dialect's form of it."""
        parts = list[str]()
        for part in re.split(r"(\{[a-z]+\})", form):
            match part:
                case "{name}":
                    parts.append(literal(function.name))
                case "{index}":
                    parts.append(f"/{_INDEX}/")
                case "{id}":
                    parts.append(f"/{_ID}/")
                case "{arguments}":
                    parts.append(self._as_json(function))
                case _:
                    parts.append(self._grammar.marker(part))
        return self._grammar.rule(" ".join(parts))

    def tags(self, dialect: TagCalls) -> str:
        r"""Return the rule for calls in tags. A function whose parameters cannot be tags is called in JSON.

        <tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>
        """
        gap, marker = _GAP if dialect.gap else "", self._grammar.marker
        has_marker = dialect.openings[0] != dialect.function[0]
        tags, objects = list[str](), list[Function]()
        for function in self._functions:
            try:
                tags.append(self._in_tags(dialect, function, gap))
            except Unwritable as keyword:
                if not has_marker:
                    self._as_json(function)  # if that fails too, its error says more
                    message = f"tools: {function.name}: this model's calls do not support parameters with {keyword}."
                    raise JobFailure("unsupported", message, param="tools") from None
                objects.append(function)
        begins, ends = marker(dialect.openings[0]) if has_marker else "", marker(dialect.closing)
        ways = list[str]()
        if tags:
            call = self._grammar.rule(any_of(tags))
            within = f"{gap} {self._repeated(call, gap)}" if dialect.function[0] else call
            ways.append(f"{begins} {within} {gap} {ends}")
        if objects:
            ways.append(f"{begins} {self._objects(JsonCalls('', ()), objects)} {ends}")
        return self._repeated(self._grammar.rule(any_of(ways)), gap)

    def _in_tags(self, dialect: TagCalls, function: Function, gap: str) -> str:
        """Return the rule for one call. Raises `Unwritable`."""
        parameters = TagParameters(self._grammar, dialect, arguments_of(function), _field(function), gap).rules()
        heads = [self._grammar.marker(tag(dialect.function, function.name))]
        if dialect.index:
            begins, ends = tag(dialect.function, function.name, dialect.index).split("{index}")
            heads.append(f"{self._grammar.marker(begins)} /{_INDEX}/ {self._grammar.marker(ends)}")
        end = f"{gap} {self._grammar.marker(dialect.end)}" if dialect.end else ""
        return self._grammar.rule(f"{any_of(heads)} {' '.join(parameters)} {end}")

    def pythonic(self, dialect: PythonicCalls) -> str:
        """Return the rule for calls as in Python, or for JSON, which its models write too: [weather(city="Oslo")]"""
        calls = list[str]()
        for function in self._functions:
            try:
                rule = NativeValues(self._grammar, arguments_of(function), _field(function), python=True).keywords()
                calls.append(self._grammar.rule(f"{literal(f'{function.name}(')} {rule} {literal(')')}"))
            except Unwritable:
                pass  # it is called in JSON
        objects = self._objects(dialect.as_json, self._functions)
        ways = [self._listed(objects), self._repeated(objects, "")]
        if calls:
            call = self._grammar.rule(any_of(calls))
            comma = spaced(", ")
            ways.append(f'"[" {self._repeated(call, comma)} "]"')
        marked = [f"/\\n?/ {self._repeated(call, _GAP)} /\\n?/"] if calls else []
        ends = self._grammar.marker(dialect.closing)
        openings = [each for each in dialect.openings if each != dialect.closing]
        begins = [self._grammar.marker(each) for each in openings]
        inside = [f"{begin} {any_of([*ways, *marked])} {ends}" for begin in begins]
        return self._grammar.rule(any_of([*(ways if dialect.bare else []), *inside]))

    def gemma(self, dialect: GemmaCalls) -> str:
        """Return the rule for calls as Gemma writes them: <|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>"""
        calls = list[str]()
        for function in self._functions:
            values = NativeValues(self._grammar, arguments_of(function), _field(function), quote=dialect.quote)
            calls.append(f"{literal(f'call:{function.name}')} {values.whole()}")
        begins, ends = self._grammar.marker(dialect.openings[0]), self._grammar.marker(dialect.closing)
        return self._repeated(self._grammar.rule(f"{begins} {any_of(calls)} {ends}"), "")


def harmony(grammar: Grammar, functions: Sequence[Function]) -> str:
    """Return the rule for <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}

    It allows one call, because the token that ends a call ends the answer.
    """
    each = [
        f"{literal(f'commentary to=functions.{function.name}')} "
        f"{harmony_json(grammar, arguments_of(function), _field(function))}"
        for function in functions
    ]
    return grammar.rule(f"{grammar.marker('<|channel|>')} {any_of(each)}")


def harmony_json(grammar: Grammar, schema: Schema, field: str) -> str:
    """Return the rule for the rest of a harmony message, from within its header on. `field`: for errors."""
    kind = f'({grammar.marker("<|constrain|>")} "json")?'
    return f"/ ?/ {kind} {grammar.marker('<|message|>')} {grammar.json(schema, field)}"


def _field(function: Function) -> str:
    return f"tools: {function.name}"


def arguments_of(function: Function) -> Schema:
    """Return the schema of a function's arguments: an object, without properties if the function names none."""
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] != "object":
        message = f"tools: the parameters of {function.name} must be of type object."
        raise JobFailure("invalid_request", message, param="tools")
    constraints = {key for key, value in schema.items() if key not in _ANNOTATIONS and value not in ({}, [])}
    return schema if constraints else {**schema, "additionalProperties": False}
