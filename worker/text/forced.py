"""Tool calls as grammars: each form is how some models write them, so that mlx-lm's parser for these takes them."""

import json
import re
from collections.abc import Callable, Sequence

from schemas.chat import Function
from worker.errors import Refusal
from worker.text.lark import Grammar, Schema, literal, spaced

# The rule for a call of one of the functions; for several calls where the last argument says so.
Form = Callable[[Grammar, Sequence[Function], bool], str]

_TEXT = r"/(?s:.*)/ & ~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/"
_NOT_NULL = r" & ~/[nN][uU][lL][lL]/"  # qwen3_coder's parser reads it as null, whatever the schema says
_EXACT = {"minimum": -(2**53), "maximum": 2**53}  # and numbers as floats
_DEFINITIONS = ("$defs", "definitions")
_SAY_NOTHING = {"type", "title", "description", "$schema"}


def form_of(tool_format: str | None, template: str) -> Form | None:
    match tool_format:
        case "json_tools":
            return json_tools
        case "mistral":
            return mistral if "[ARGS]" in template else mistral_list
        case "qwen3_coder":
            return qwen3_coder
        case "harmony":
            return harmony
    return None


def json_tools(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    r"""<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>"""
    each = [_as_json(grammar, function) for function in functions]
    return _between_tags(grammar, each, many)


def _between_tags(grammar: Grammar, each: Sequence[str], many: bool) -> str:
    begins, ends = grammar.marker("<tool_call>"), grammar.marker("</tool_call>")
    call = grammar.rule(f"{begins} ({' | '.join(each)}) {ends}")
    return grammar.rule(rf"{call} (/\n?/ {call})*") if many else call


def _as_json(grammar: Grammar, function: Function, more: str = "") -> str:
    head, tail = spaced(rf' \{{ "name" : "{re.escape(function.name)}" , "arguments" : '), spaced(r" \} ")
    return grammar.rule(f"{head} {grammar.json(_arguments(function))} {more} {tail}")


def mistral(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}"""
    if dotted := [function.name for function in functions if "." in function.name]:
        raise Refusal("unsupported", f"tools: this model's calls cannot name {dotted[0]}, for its dot.")
    begins, arguments = grammar.marker("[TOOL_CALLS]"), grammar.marker("[ARGS]")
    each = [f"{literal(function.name)} {arguments} {grammar.json(_arguments(function))}" for function in functions]
    return grammar.rule(f"({begins} ({' | '.join(each)})){'+' if many else ''}")


def mistral_list(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}]"""
    id = spaced(', "id" : "[A-Za-z0-9]{9}"')
    call = grammar.rule(" | ".join(_as_json(grammar, function, f"({id})?") for function in functions))
    calls = f'{call} ("," {call})*' if many else call
    return grammar.rule(f'{grammar.marker("[TOOL_CALLS]")} "[" {calls} "]"')


def harmony(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    """<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}

    There is one at most: the token that ends it ends the answer."""
    each = [
        f"{literal(f'commentary to=functions.{function.name}')} {harmony_json(grammar, _arguments(function))}"
        for function in functions
    ]
    return grammar.rule(f"{grammar.marker('<|channel|>')} ({' | '.join(each)})")


def harmony_json(grammar: Grammar, schema: Schema) -> str:
    """The rest of a message, from within its header."""
    kind = f'({grammar.marker("<|constrain|>")} "json")?'
    return f"/ ?/ {kind} {grammar.marker('<|message|>')} {grammar.json(schema)}"


def qwen3_coder(grammar: Grammar, functions: Sequence[Function], many: bool) -> str:
    r"""<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>

    A string stands there as it is, so of its schema only an enum and a const are held to."""
    return _between_tags(grammar, [_as_tags(grammar, function) for function in functions], many)


def _as_tags(grammar: Grammar, function: Function) -> str:
    whole = _arguments(function)
    try:
        parameters = _parameters(grammar, _resolved(whole, whole))
    except (TypeError, AttributeError, LookupError) as error:  # a client's JSON may be of any form
        raise Refusal("invalid_request", f"tools: the parameters of {function.name} are no JSON schema.") from error
    head = literal(f"\n<function={function.name}>\n")
    return grammar.rule(f'{head} {" ".join(parameters)} "</function>\\n"')


def _parameters(grammar: Grammar, whole: Schema) -> list[str]:
    """In the schema's order: they cannot come in any other."""
    if unnamed := sorted(whole.keys() & {"allOf", "anyOf", "oneOf", "patternProperties"}):
        raise Refusal("unsupported", f"tools: this model's calls cannot be held to parameters by {unnamed[0]}.")
    properties, required = whole.get("properties", {}), whole.get("required", [])
    return [
        _parameter(grammar, name, properties.get(name, {}), whole) + ("" if name in required else "?")
        for name in dict.fromkeys([*properties, *required])
    ]


def _parameter(grammar: Grammar, name: str, schema: Schema, whole: Schema) -> str:
    if re.search(r"[\s<>]", name):
        raise Refusal("unsupported", f"tools: this model's calls cannot name a parameter {name!r}.")
    head = literal(f"<parameter={name}>\n")
    return grammar.rule(f'{head} {_value(grammar, schema, whole)} "\\n"')


def _value(grammar: Grammar, schema: Schema, whole: Schema) -> str:
    """And the tag that ends it."""
    types, end = _types(schema, whole), "\n</parameter>"
    if words := _words(_resolved(schema, whole)):
        return f"({' | '.join(map(literal, words))}) {literal(end)}"
    if "string" in types:
        return grammar.text(_TEXT if "null" in types else _TEXT + _NOT_NULL, until=end)
    exact = _EXACT if types & {"integer", "number"} else {}
    definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
    return f"{grammar.json({**exact, **definitions, **schema})} {literal(end)}"


def _words(schema: Schema) -> list[str]:
    """All that it may be, if the schema lists it."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return [word if isinstance(word, str) else json.dumps(word) for word in listed]


def _types(schema: Schema, whole: Schema) -> set[str]:
    """What it may be. A schema that does not say it may be a string."""
    meant, found = _resolved(schema, whole), set[str]()
    for branch in meant.get("anyOf", [meant]):
        types = _resolved(branch, whole).get("type", "string")
        found.update([types] if isinstance(types, str) else types)
    return found


def _resolved(schema: Schema, whole: Schema) -> Schema:
    """With what its reference says, if that stands among the definitions."""
    match schema.get("$ref", "").split("/"):
        case ["#", ("$defs" | "definitions") as where, name]:
            return {**schema, **whole[where][name]}
    return schema


def _arguments(function: Function) -> Schema:
    """Their schema: an object, and an empty one where none are named."""
    schema = {"type": "object", **(function.parameters or {})}
    if schema["type"] != "object":
        raise Refusal("invalid_request", f"tools: the parameters of {function.name} must be of type object.")
    says = {key for key, value in schema.items() if key not in _SAY_NOTHING and value not in ({}, [])}
    return schema if says else {**schema, "additionalProperties": False}
