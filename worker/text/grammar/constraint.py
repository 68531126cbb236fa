"""Reads the constraint of a request on its answer, and compiles it so that one client's schemas delay no other's."""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat, NamedTool
from sluice.contract.keys import Lane
from worker.errors import JobFailure
from worker.process.child import ChildCrashed, ChildFailed, Children
from worker.process.frames import LimitExceeded
from worker.text.grammar import attempt, sandbox
from worker.text.grammar.attempt import TOO_EXPENSIVE, CompileError, Verdict
from worker.text.grammar.builder import Markup, OutputConstraint
from worker.text.grammar.tool_grammars import ANY_ARGUMENTS, HARMONY, HeldFunction, texts_of
from worker.text.output.formats import ModelFormat
from worker.text.prompt.size_limit import cost_in_characters
from worker.text.threads import Pool
from worker.text.tokenizer import Tokenizer
from worker.turns import Turns

logger = logging.getLogger("sluice.text")

T = TypeVar("T")

# The slowest of about 5,000 random schemas of these keywords and at most 4,000 characters compiled in 13 ms.
_QUICK = {
    "type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const",
    "title", "description", "default", "examples", "$schema",
}  # fmt: skip


def constraint_of(request: ChatRequest, *, hold_calls: bool = False) -> OutputConstraint | None:
    """Return the request's constraint, or None if the answer is free. A forced call takes precedence over a schema.

    `hold_calls`: calls in free text satisfy the schemas of all functions, as far as possible; else of strict ones.
    Raises `JobFailure` for a `json_schema` without a schema.
    """
    many = request.parallel_tool_calls is not False
    functions = tuple(
        HeldFunction(each.name, each.parameters, bool(each.strict))
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
        HeldFunction(each.name, each.parameters if each.name in held else ANY_ARGUMENTS, bool(each.strict))
        for each in (tool.function for tool in request.offered_tools)
    )
    return OutputConstraint(None, functions, many, in_text=True)


def is_quick(constraint: OutputConstraint) -> bool:
    """True if the constraint compiles fast enough without a trial in a child process. The schema of any object does."""
    schemas = [constraint.schema or {}, *(function.parameters or {} for function in constraint.functions)]
    # Counted first, since dumping a large schema would block the event loop. A value has two characters or more, and
    # `cost_in_characters` counts it as 32.
    characters, cost = 4_000, 16 * 4_000
    if cost_in_characters(schemas, cost) > cost:
        return False
    return len(json.dumps(schemas)) < characters and all(map(_is_quick_schema, schemas))


def _is_quick_schema(schema: Any) -> bool:
    """True if a schema of limited size compiles fast."""
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


class Compiler:
    """Compiles grammars on threads, after a trial in a child process; a worker has one."""

    def __init__(self) -> None:
        parallel, reserved = 4, 1  # threads, and processes; offline jobs leave the reserved ones free
        self._pool = Pool("grammar", parallel, reserved=reserved, subject="schemas")
        self._turns = Turns(parallel, reserved=reserved)
        # One ahead, since its start takes a tenth of a second: longer than most schemas.
        self._children = Children("worker.text.grammar.attempt", parallel, ahead=True)
        self._verdicts = OrderedDict[bytes, Verdict]()

    async def run(self, lane: Lane, tenant: str, work: Callable[..., T], *given: Any) -> T:
        """Call `work`, which handles a request's schemas, on a thread of the pool. Raises `JobFailure` if it takes too
        long."""
        return await self._pool.run(lane, lambda check: work(*given), tenant)

    async def compile(
        self, lane: Lane, tenant: str, vocabulary: LLTokenizer, grammar: str, *, drafts: bool
    ) -> tuple[LLMatcher, LLMatcher | None]:
        """Return new matchers for one row: of its answer and, if `drafts`, of its drafts. Raises
        `sandbox.Uncompilable`."""
        if drafts:
            return await self.run(lane, tenant, sandbox.compile_twice, vocabulary, grammar)
        return await self.run(lane, tenant, sandbox.compile_grammar, vocabulary, grammar), None

    async def verdict(self, lane: Lane, tenant: str, question: bytes) -> Verdict:
        """Return the verdict of a child process on a question of `attempt`. Recent verdicts are cached, and returned
        without waiting for a process. Raises `JobFailure` if the process cannot run."""
        known = hashlib.blake2b(question).digest()
        if known not in self._verdicts:
            async with self._turns.slot(lane, tenant):
                if known not in self._verdicts:  # another row may have asked the same meanwhile
                    self._verdicts[known] = await self._tried(question)
        self._verdicts.move_to_end(known)
        verdict = self._verdicts[known]
        if len(self._verdicts) > 64:  # a grammar has at most half a million characters
            self._verdicts.popitem(last=False)
        return verdict

    async def _tried(self, question: bytes) -> Verdict:
        try:
            answer = await self._children.ask(None, question, attempt.LIMITS)
        except (LimitExceeded, ChildCrashed) as error:
            logger.warning("the trial of a schema: %s", error)
            return CompileError(TOO_EXPENSIVE)
        except (ChildFailed, TimeoutError) as error:  # not caused by the schema
            logger.warning("the trial of a schema: %r", error)
            raise JobFailure(
                "overloaded",
                "The server has no resources to check the request's schema now; try again later.",
                retryable=True,
            ) from None
        return attempt.verdict_of(answer.head)
