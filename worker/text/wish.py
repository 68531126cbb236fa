"""What a request wants its answer to be held to, and what the model has for that."""

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

_QUICK_WEIGHT = 16 * QUICK_CHARACTERS  # a value takes two characters or more, and counts as 32: see `characters`


def wish_of(request: ChatRequest) -> Wish | None:
    """None where the answer may be anything. A call that must be comes before a schema."""
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
                raise Refusal("invalid_request", "response_format: json_schema needs a schema in it.")
            return Wish(asked.json_schema, functions, many)
    return None


def is_quick(wish: Wish) -> bool:
    """Whether it compiles in no time. What is merely any object always does."""
    schemas = [wish.schema or {}, *(function.parameters or {} for function in wish.functions)]
    # To write a large one would hold up the event loop.
    if characters(schemas, _QUICK_WEIGHT) > _QUICK_WEIGHT:
        return False
    return len(json.dumps(schemas)) < QUICK_CHARACTERS and all(map(is_quick_schema, schemas))


def markup_of(tokenizer: Tokenizer, dialect: Dialect) -> Markup:
    calls_as = "harmony" if dialect.harmony else tokenizer.tool_format
    single = {text: tokens[0] for text in markers_of(calls_as) if len(tokens := tokenizer.encode(text)) == 1}
    return Markup(single, calls_as, "[ARGS]" in tokenizer.template, tokenizer.tool is not None)
