"""Grammars of tool calls, one for each format that models write. mlx-lm's parser of the format accepts the calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.errors import JobFailure
from worker.text.grammar.lark import Grammar, literal, spaced
from worker.text.grammar.qwen_coder import parameters
from worker.text.grammar.schema.unsupported import Schema

MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")  # of all formats except harmony


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a request offers."""

    name: str
    parameters: Schema | None = None


# Returns the rule for a call of one of the functions, or for several calls if the last argument is true.
Form = Callable[[Grammar, Sequence[Function], bool], str]

_ANNOTATIONS = {"type", "title", "description", "$schema"}


def form_of(tool_format: str | None, *, names_arguments: bool) -> Form | None:
    """Return the grammar of a tool format, or None. `names_arguments`: Mistral's format with [ARGS]."""
    match tool_format:
        case "json_tools":
            return json_tools
        case "mistral":
            return mistral if names_arguments else mistral_list
        case "qwen3_coder":
            return qwen3_coder
        case "harmony":
            return harmony
    return None


def json_tools(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    r"""Return the rule for <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>"""
    each = [_as_json(grammar, function) for function in functions]
    return _between_tags(grammar, each, many)


def _between_tags(grammar: Grammar, each: Sequence[str], many: bool) -> str:
    begins, ends = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    call = grammar.rule(f"{begins} ({' | '.join(each)}) {ends}")
    return grammar.rule(rf"{call} (/\n?/ {call})*") if many else call


def _as_json(grammar: Grammar, function: Function, more: str = "") -> str:
    head, tail = spaced(rf' \{{ "name" : "{re.escape(function.name)}" , "arguments" : '), spaced(r" \} ")
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
