"""Grammars of tool calls, one for each class of dialect. The dialect's own reader reads the calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from worker.errors import JobFailure
from worker.text.dialects.header_calls import HeaderCalls
from worker.text.dialects.json_calls import JsonCalls
from worker.text.dialects.table import by_name
from worker.text.dialects.tag_calls import TagCalls
from worker.text.grammar.lark import Grammar, literal, spaced
from worker.text.grammar.qwen_coder import parameters
from worker.text.grammar.schema.unsupported import Schema
from worker.text.output.harmony import MARKERS as HARMONY


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a request offers."""

    name: str
    parameters: Schema | None = None


# Returns the rule for a call of one of the functions, or for several calls if the last argument is true.
Form = Callable[[Grammar, Sequence[Function], bool], str]

_ANNOTATIONS = {"type", "title", "description", "$schema"}


def markers_of(calls_as: str | None) -> tuple[str, ...]:
    """Return the markers that grammars of a dialect use, and that may be tokens."""
    if calls_as == "harmony":
        return (*HARMONY, "<|constrain|>")
    match by_name(calls_as):
        case HeaderCalls() as dialect:
            marks = (*dialect.openings, dialect.arguments, dialect.each, dialect.end, dialect.closing, "[CALL_ID]")
            return tuple(mark for mark in marks if len(mark) > 1)
        case None:
            return ()
        case dialect:
            return (*dialect.openings, dialect.closing)


def form_of(calls_as: str | None, *, names_arguments: bool) -> Form | None:
    """Return the grammar of a dialect's calls, or None if they cannot be forced. `names_arguments`: Mistral's form with
    [ARGS]."""
    match by_name(calls_as):
        case JsonCalls() as dialect:
            return partial(json_calls, dialect)
        case HeaderCalls(as_list=JsonCalls()):  # Mistral's
            return mistral if names_arguments else mistral_list
        case HeaderCalls() as dialect:
            return partial(header_calls, dialect)
        case TagCalls(name="qwen3_coder"):
            return qwen3_coder
    return harmony if calls_as == "harmony" else None


def json_calls(dialect: JsonCalls, grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    r"""Return the rule for objects between markers, in a list or one after the other.

    <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>
    """
    call = grammar.rule(" | ".join(_as_json(grammar, function, dialect=dialect) for function in functions))
    begins, ends = _marked(grammar, dialect.openings[0]), _marked(grammar, dialect.closing)
    if dialect.is_list:
        calls = f'{call} ("," {call})*' if many else call
        return grammar.rule(f'{begins} /\\n?/ "[" {calls} "]" /\\n?/ {ends}')
    if dialect.bare and not dialect.closing:
        return grammar.rule(f"{call} (/;[ \\n]?/ {call})*") if many else call
    marked = grammar.rule(f"{begins} {call} {ends}")
    return grammar.rule(rf"{marked} (/\n?/ {marked})*") if many else marked


def _marked(grammar: Grammar, marker: str) -> str:
    return grammar.marker(marker) if marker else ""


def header_calls(dialect: HeaderCalls, grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """Return the rule for calls with a header, alone or in a section."""
    each = grammar.rule(" | ".join(_with_header(dialect, grammar, function) for function in functions))
    if not dialect.each:
        return grammar.rule(rf"{each} (/\n?/ {each})*") if many else each
    calls = rf"{each} (/\n?/ {each})*" if many else each
    return grammar.rule(f"{grammar.marker(dialect.openings[0])} {calls} {_marked(grammar, dialect.closing)}")


def _with_header(dialect: HeaderCalls, grammar: Grammar, function: Function) -> str:
    """Return the rule for one call, from the dialect's form of it."""
    parts = list[str]()
    split = re.compile("(" + "|".join(map(re.escape, filter(None, markers_of(dialect.name)))) + r"|\{[a-z]+\})")
    for part in filter(None, split.split(dialect.form)):
        match part:
            case "{name}":
                parts.append(literal(function.name))
            case "{index}":
                parts.append("/[0-9]{1,3}/")
            case "{arguments}":
                parts.append(_arguments_of(grammar, function))
            case _:
                parts.append(grammar.marker(part))
    return grammar.rule(" ".join(parts))


def _between_tags(grammar: Grammar, each: Sequence[str], many: bool) -> str:
    begins, ends = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    call = grammar.rule(f"{begins} ({' | '.join(each)}) {ends}")
    return grammar.rule(rf"{call} (/\n?/ {call})*") if many else call


_HERMES = JsonCalls("", ("",))  # the members that most dialects have


def _as_json(grammar: Grammar, function: Function, more: str = "", *, dialect: JsonCalls = _HERMES) -> str:
    name, key = re.escape(function.name), dialect.keys[0]
    if dialect.named_by_key:
        head = spaced(rf' \{{ "{name}" : ')
    else:
        head = spaced(rf' \{{ "{key}" : "{name}" , "{dialect.keys[1]}" : ')
    tail = spaced(r" \} ")
    return grammar.rule(f"{head} {_arguments_of(grammar, function)} {more} {tail}")


def mistral(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """Return the rule for [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}. Raises `JobFailure` for a dot in a name."""
    if dotted := [function.name for function in functions if "." in function.name]:
        message = f"tools: this model cannot call {dotted[0]}; use a name without a dot."
        raise JobFailure("unsupported", message, param="tools")
    begins, arguments = grammar.marker("[TOOL_CALLS]"), grammar.marker("[ARGS]")
    each = [f"{literal(function.name)} {arguments} {_arguments_of(grammar, function)}" for function in functions]
    return grammar.rule(f"({begins} ({' | '.join(each)})){'+' if many else ''}")


def mistral_list(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """Return the rule for a list of calls.

    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}]
    """
    id = spaced(', "id" : "[A-Za-z0-9]{9}"')
    call = grammar.rule(" | ".join(_as_json(grammar, function, f"({id})?") for function in functions))
    calls = f'{call} ("," {call})*' if many else call
    return grammar.rule(f'{grammar.marker("[TOOL_CALLS]")} "[" {calls} "]"')


def harmony(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """Return the rule for <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}

    It allows one call even if `many`, because the token that ends a call ends the answer.
    """
    each = [
        f"{literal(f'commentary to=functions.{function.name}')} "
        f"{harmony_json(grammar, _arguments(function), _field(function))}"
        for function in functions
    ]
    return grammar.rule(f"{grammar.marker('<|channel|>')} ({' | '.join(each)})")


def harmony_json(grammar: Grammar, schema: Schema, field: str) -> str:
    """Return the rule for the rest of a harmony message, from within its header on. `field`: for errors."""
    kind = f'({grammar.marker("<|constrain|>")} "json")?'
    return f"/ ?/ {kind} {grammar.marker('<|message|>')} {grammar.json(schema, field)}"


def qwen3_coder(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    r"""Return the rule for a call in tags.

    <tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>
    """
    return _between_tags(grammar, [_as_tags(grammar, function) for function in functions], many)


def _as_tags(grammar: Grammar, function: Function) -> str:
    head = literal(f"\n<function={function.name}>\n")
    rules = parameters(grammar, function.name, _arguments(function))
    return grammar.rule(f'{head} {" ".join(rules)} "</function>\\n"')


def _field(function: Function) -> str:
    return f"tools: {function.name}"


def _arguments_of(grammar: Grammar, function: Function) -> str:
    return grammar.json(_arguments(function), _field(function))


def _arguments(function: Function) -> Schema:
    """Return the schema of a function's arguments: an object, without properties if the function names none."""
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] != "object":
        message = f"tools: the parameters of {function.name} must be of type object."
        raise JobFailure("invalid_request", message, param="tools")
    constraints = {key for key, value in schema.items() if key not in _ANNOTATIONS and value not in ({}, [])}
    return schema if constraints else {**schema, "additionalProperties": False}
