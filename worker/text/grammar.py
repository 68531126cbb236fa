"""From a request to the grammar of its answer."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from schemas import ChatRequest
from schemas.chat import Function, JsonObjectFormat, JsonSchemaFormat, NamedTool
from worker.errors import Refusal
from worker.text import forced
from worker.text.compiler import QUICK_CHARACTERS, is_quick
from worker.text.counting import characters
from worker.text.dialect import Dialect
from worker.text.harmony import MARKERS
from worker.text.lark import Grammar, Schema
from worker.text.tokenizer import Tokenizer

_QUICK_WEIGHT = 16 * QUICK_CHARACTERS  # a value takes two characters or more, and counts as 32: see `characters`


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants: an answer by a schema, or a call of a function, or either."""

    schema: Schema | None
    functions: tuple[Function, ...]
    many: bool  # calls in a row

    @property
    def field(self) -> str:
        """The request's, that says so."""
        return "tool_choice" if self.schema is None else "response_format"

    @property
    def quick(self) -> bool:
        """Whether it compiles in no time. What is merely any object always does."""
        schemas = [self.schema or {}, *(function.parameters or {} for function in self.functions)]
        # To write a large one would hold up the event loop.
        if characters(schemas, _QUICK_WEIGHT) > _QUICK_WEIGHT:
            return False
        return len(json.dumps(schemas)) < QUICK_CHARACTERS and all(map(is_quick, schemas))

    def parts(self) -> Iterator[tuple[str, "Wish"]]:
        """Each schema by itself, and where it stands in the request."""
        if self.schema is not None:
            yield "response_format", replace(self, functions=())
        for function in self.functions:
            yield f"tools: {function.name}", replace(self, schema=None, functions=(function,))


def wish_of(request: ChatRequest) -> Wish | None:
    """None where the answer may be anything. A call that must be comes before a schema."""
    many = request.parallel_tool_calls is not False
    functions = tuple(tool.function for tool in request.offered_tools)
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


class Grammars:
    """Of a model's answers."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._encode, self._has_calls = tokenizer.encode, tokenizer.tool is not None
        self._harmony = dialect.harmony  # its reasoning is a message among others, so the grammar holds it too
        self._calls_as = "harmony" if self._harmony else tokenizer.tool_format
        self._form = forced.form_of(self._calls_as, tokenizer.template)

    def of(self, wish: Wish, *, reasoned: bool) -> str:
        """`reasoned`: the answer may follow a think marker, after which models leave a line or two."""
        return self._written(Grammar(self._encode), wish, reasoned)

    def spelled(self, wish: Wish) -> str:
        """With its markers as text, for a vocabulary of bytes alone."""
        return self._written(Grammar(lambda text: []), wish, reasoned=False)

    def _written(self, grammar: Grammar, wish: Wish, reasoned: bool) -> str:
        ways = list[str]()
        if wish.schema is not None:
            ways.append(self._answer(grammar, wish.schema))
        if wish.functions and (form := self._form_for(wish)):
            ways.append(form(grammar, wish.functions, wish.many))
        before = _analysis(grammar) if self._harmony else "/[ \\n]{0,4}/" if reasoned else ""
        return grammar.starting_with(f"{before} ({' | '.join(ways)})")

    def _answer(self, grammar: Grammar, schema: Schema) -> str:
        if self._harmony:
            return f'{grammar.marker("<|channel|>")} "final" {forced.harmony_json(grammar, schema, "response_format")}'
        return grammar.json(schema, "response_format")

    def _form_for(self, wish: Wish) -> forced.Form | None:
        """None where an answer cannot be a call anyway."""
        if self._form or (wish.schema is not None and not self._has_calls):
            return self._form
        if not self._has_calls:
            raise Refusal("unsupported", "tool_choice: this model cannot call tools; leave it out.")
        writes = f"this model writes its calls as {self._calls_as}, which cannot be forced"
        instead = "use 'auto'" if wish.schema is None else "leave out the tools, or response_format"
        raise Refusal("unsupported", f"{wish.field}: {writes}; {instead}.")


def _analysis(grammar: Grammar) -> str:
    """The reader of its text sees a marker wherever one is spelled out."""
    channel, text, end, start = map(grammar.marker, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    words = grammar.terminal(f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(re.escape, MARKERS))})(?s:.*)/")
    return grammar.rule(f'({channel} "analysis" {text} {words} {end} {start} "assistant")*')
