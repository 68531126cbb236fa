"""Reads the constraint of a request on its answer, and the markers that the model has for it."""

import json

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat, NamedTool
from worker.errors import Refusal
from worker.text.counting import characters
from worker.text.dialect import Dialect
from worker.text.forced import Function
from worker.text.grammar import Markup, Wish, markers_of
from worker.text.quick import QUICK_CHARACTERS, is_quick_schema
from worker.text.tokenizer import Tokenizer

_QUICK_WEIGHT = 16 * QUICK_CHARACTERS  # a value has two characters or more, and `characters` counts it as 32


def wish_of(request: ChatRequest) -> Wish | None:
    """Return the request's constraint, or None if the answer is free. A forced call takes precedence over a schema.

    Raises `JobFailure` for a `json_schema` without a schema.
    """
    many = request.parallel_tool_calls is not False
    functions = tuple(Function(tool.function.name, tool.function.parameters) for tool in request.offered_tools)
    match request.tool_choice:
        case NamedTool(function=named):
            return Wish(None, tuple(each for each in functions if each.name == named.name)[:1], many=False)
        case "required":
            return Wish(None, functions, many)
    match request.response_format:
        case JsonObjectFormat():
            return Wish({"type": "object"}, functions, many)
        case JsonSchemaFormat(json_schema=asked):
            if asked.json_schema is None:
                raise Refusal("invalid_request", "response_format: json_schema has no schema; add one.")
            return Wish(asked.json_schema, functions, many)
    return None


def is_quick(wish: Wish) -> bool:
    """Return True if it compiles fast enough for the event loop. The schema of any object always does."""
    schemas = [wish.schema or {}, *(function.parameters or {} for function in wish.functions)]
    # Counted first, since dumping a large schema would block the event loop.
    if characters(schemas, _QUICK_WEIGHT) > _QUICK_WEIGHT:
        return False
    return len(json.dumps(schemas)) < QUICK_CHARACTERS and all(map(is_quick_schema, schemas))


def markup_of(tokenizer: Tokenizer, dialect: Dialect) -> Markup:
    """Collect the model's markers for grammars."""
    calls_as = "harmony" if dialect.harmony else tokenizer.tool_format
    single = {text: tokens[0] for text in markers_of(calls_as) if len(tokens := tokenizer.encode(text)) == 1}
    return Markup(single, calls_as, "[ARGS]" in tokenizer.template, tokenizer.tool is not None)
