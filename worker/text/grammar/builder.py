"""Writes the grammar of an answer, from a constraint and the model's format."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from worker.errors import JobFailure
from worker.text.grammar import tool_grammars
from worker.text.grammar.lark import Grammar
from worker.text.grammar.schema.unsupported import Schema
from worker.text.grammar.tool_grammars import ANY_ARGUMENTS, AnyDialect, HeldFunction
from worker.text.output.harmony import MARKERS, HarmonyCalls


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """Constraint of a request on its answer: a schema, a call of a function, or one of both; or, if `in_text`, on the
    calls in its answer, whose other text is free."""

    schema: Schema | None
    functions: tuple[HeldFunction, ...]
    allows_many: bool  # more than one call is allowed
    in_text: bool = False

    def without(self, names: Collection[str]) -> "OutputConstraint":
        """Return the constraint that leaves the arguments of these functions free."""
        functions = tuple(
            replace(each, parameters=ANY_ARGUMENTS) if each.name in names else each for each in self.functions
        )
        return replace(self, functions=functions)

    @property
    def optional(self) -> list[HeldFunction]:
        """Functions whose schemas need not be enforced, if that is not possible."""
        return [each for each in self.functions if not each.strict and each.parameters != ANY_ARGUMENTS]

    @property
    def field(self) -> str:
        """Name of the request's field that sets the constraint."""
        if self.in_text:
            return "tools"
        return "tool_choice" if self.schema is None else "response_format"

    def parts(self) -> Iterator[tuple[str, "OutputConstraint"]]:
        """Yield (field, constraint) for each schema alone."""
        if self.schema is not None:
            yield "response_format", replace(self, functions=())
        for function in self.functions:
            yield f"tools: {function.name}", replace(self, schema=None, functions=(function,))


@dataclass(frozen=True, slots=True)
class Markup:
    """Markers of a model's calls and answers."""

    markers: dict[str, int]  # tokens that occur in markers, by their text
    dialect: (
        str | None
    )  # the name of its dialect, since a child process is asked about it, too; None: the model writes no calls
    header: tuple[str, ...] = ()  # around the recipient of a message, which may precede calls
    opened: str = ""  # the opening of a call, with which the prompt ends
    answer: str = ""  # what then precedes a text that is no call


class Grammars:
    """Grammars of one model's answers, in llguidance's format."""

    def __init__(self, markup: Markup) -> None:
        self._markup, self._dialect = markup, tool_grammars.dialect_named(markup.dialect)
        self._harmony = isinstance(
            self._dialect, HarmonyCalls
        )  # a thought is a message like others, in the grammar too

    def grammar(self, constraint: OutputConstraint, *, has_thought: bool, rewritten: Sequence[Schema] = ()) -> str:
        """Return the grammar. Raises `JobFailure` if it cannot be written.

        `has_thought`: the answer may follow a think marker, after which models write empty lines. `rewritten`: the
        schemas of `grammar_as_text`, if they are known.
        """
        return self._written(Grammar(self._markup.markers, rewritten), constraint, has_thought)

    def grammar_as_text(self, constraint: OutputConstraint) -> tuple[str, Grammar]:
        """Return the grammar with its markers as text, for a vocabulary of single bytes, and its parts."""
        parts = Grammar({})
        return self._written(parts, constraint, has_thought=False), parts

    def _written(self, grammar: Grammar, constraint: OutputConstraint, has_thought: bool) -> str:
        if constraint.in_text and self._dialect:
            calls = tool_grammars.calls_in_text
            return grammar.starting_with(calls(self._dialect, grammar, constraint.functions, constraint.allows_many))
        ways = list[str]()
        if constraint.schema is not None:
            ways.append(self._answer(grammar, constraint.schema))
        if constraint.functions and self._dialect:
            ways.append(self._calls(grammar, self._dialect, constraint))
        if not ways:
            raise JobFailure("unsupported", "tool_choice: this model cannot call tools; leave it out.")
        return grammar.starting_with(f"{self._before(grammar, has_thought)} ({' | '.join(ways)})")

    def _before(self, grammar: Grammar, has_thought: bool) -> str:
        if self._harmony:
            return _analysis(grammar)
        return "/[ \\n]{0,4}/" if has_thought else ""

    def _answer(self, grammar: Grammar, schema: Schema) -> str:
        if self._harmony:
            answer = tool_grammars.harmony_json(grammar, schema, "response_format")
            return f'{grammar.marker("<|channel|>")} "final" {answer}'
        before = grammar.marker(self._markup.answer.removeprefix(self._markup.opened))
        return f"{before} {grammar.json(schema, 'response_format')}"

    def _calls(self, grammar: Grammar, dialect: AnyDialect, constraint: OutputConstraint) -> str:
        opened = self._markup.opened
        calls = tool_grammars.tool_calls(dialect, grammar, constraint.functions, constraint.allows_many, opened)
        if not self._markup.header:
            return calls
        begins, ends = map(grammar.marker, self._markup.header)
        return f"(/ ?/ {begins} /[A-Za-z0-9_.-]{{1,128}}/ {ends})? {calls}"


def _analysis(grammar: Grammar) -> str:
    """Return the rule for harmony's analysis messages.

    Their text must not spell a marker, since the output parser detects markers in the text.
    """
    channel, text, end, start = map(grammar.marker, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
    words = grammar.terminal(f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(re.escape, MARKERS))})(?s:.*)/")
    return grammar.rule(f'({channel} "analysis" {text} {words} {end} {start} "assistant")*')
