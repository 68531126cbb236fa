"""Reads the constraint of a request on its answer, and the model's markers for it."""

import json
from typing import Any

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat, NamedTool
from worker.errors import JobFailure
from worker.text.grammar.builder import Markup, OutputConstraint
from worker.text.grammar.tool_grammars import ANY_ARGUMENTS, HARMONY, Function, texts_of
from worker.text.output.formats import ModelFormat
from worker.text.prompt.size_limit import cost_in_characters
from worker.text.tokenizer import Tokenizer

# The slowest of about 5,000 random schemas of these keywords and at most this size compiled in 13 ms.
_QUICK = {
    "type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const",
    "title", "description", "default", "examples", "$schema",
}  # fmt: skip
_QUICK_CHARACTERS = 4_000
_QUICK_WEIGHT = 16 * _QUICK_CHARACTERS  # a value has two characters or more, and `cost_in_characters` counts it as 32


def constraint_of(request: ChatRequest, *, hold_calls: bool = False) -> OutputConstraint | None:
    """Return the request's constraint, or None if the answer is free. A forced call takes precedence over a schema.

    `hold_calls`: calls in free text satisfy the schemas of all functions, as far as possible; else of strict ones.
    Raises `JobFailure` for a `json_schema` without a schema.
    """
    many = request.parallel_tool_calls is not False
    functions = tuple(
        Function(each.name, each.parameters, bool(each.strict))
        for each in (tool.function for tool in request.offered_tools)
    )
    match request.tool_choice:
        case NamedTool(function=named):
            return OutputConstraint(
                None, tuple(each for each in functions if each.name == named.name)[:1], allows_many=False
            )
        case "required":
            return OutputConstraint(None, functions, many)
    match request.response_format:
        case JsonObjectFormat():
            return OutputConstraint({"type": "object"}, functions, many)
        case JsonSchemaFormat(json_schema=asked):
            if asked.json_schema is None:
                message = "response_format: json_schema has no schema; add one."
                raise JobFailure("invalid_request", message, param="response_format")
            return OutputConstraint(asked.json_schema, functions, many)
    return _in_text(request, many, hold_calls=hold_calls)


def _in_text(request: ChatRequest, many: bool, *, hold_calls: bool) -> OutputConstraint | None:
    """Return the constraint on the calls in a free answer; None if there is none."""
    if not (held := {tool.function.name for tool in request.held_tools(every=hold_calls)}):
        return None
    functions = tuple(
        Function(each.name, each.parameters if each.name in held else ANY_ARGUMENTS, bool(each.strict))
        for each in (tool.function for tool in request.offered_tools)
    )
    return OutputConstraint(None, functions, many, in_text=True)


def is_quick(constraint: OutputConstraint) -> bool:
    """True if the constraint compiles fast enough without a trial in a child process. The schema of any object does."""
    schemas = [constraint.schema or {}, *(function.parameters or {} for function in constraint.functions)]
    # Counted first, since dumping a large schema would block the event loop.
    if cost_in_characters(schemas, _QUICK_WEIGHT) > _QUICK_WEIGHT:
        return False
    return len(json.dumps(schemas)) < _QUICK_CHARACTERS and all(map(_is_quick_schema, schemas))


def _is_quick_schema(schema: Any) -> bool:
    """True if the schema compiles fast, given that it has at most `_QUICK_CHARACTERS`."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    if not schema.keys() <= _QUICK:
        return False
    named, branches = schema.get("properties", {}), schema.get("anyOf", [])
    within = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return (
        isinstance(named, dict)
        and isinstance(branches, list)
        and all(map(_is_quick_schema, [*named.values(), *branches, *within]))
    )


def markup_of(tokenizer: Tokenizer, model_format: ModelFormat) -> Markup:
    """Collect the model's markers for grammars."""
    dialect = HARMONY if model_format.harmony else model_format.dialect
    header = model_format.thoughts.header if model_format.thoughts else ()
    opened = model_format.opened
    answers = model_format.thoughts.answer if model_format.thoughts and opened else ()
    answer = next((each for each in answers if each.startswith(opened)), "")
    texts = (*texts_of(dialect), *header)
    added = tokenizer.added_tokens.items()
    markers = {token: id for token, id in added if any(token in text for text in texts)}
    return Markup(markers, dialect.name if dialect else None, header, opened, answer)
