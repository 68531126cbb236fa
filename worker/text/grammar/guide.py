"""Reads the constraint of a request on its answer, compiles it so that one client's schemas delay no other's, and
creates the grammar state of the answer."""

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn, TypeVar

from llguidance import LLMatcher, LLTokenizer

from schemas import ChatRequest
from schemas.chat import JsonObjectFormat, JsonSchemaFormat, NamedTool
from schemas.messages import Message
from sluice.contract.keys import Lane
from worker.errors import JobFailure
from worker.process.child import ChildCrashed, ChildFailed, Children
from worker.process.frames import LimitExceeded
from worker.text.dialects.values import Parameters
from worker.text.grammar import sandbox, trial
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.lark import param_of, pattern_of_markers
from worker.text.grammar.llg_tokenizer import ForcedText, llguidance_tokenizer
from worker.text.grammar.row.calls import CallMatchers, CallsGrammar, Openings
from worker.text.grammar.row.grammar import AllDraftsTime, RowGrammar
from worker.text.grammar.row.reader import FiniteNumbers
from worker.text.grammar.row.thought import ThoughtMask, ThoughtState
from worker.text.grammar.tool_grammars import (
    ANY_ARGUMENTS,
    HARMONY,
    HeldFunction,
    dialect_named,
    in_json,
    texts_of,
)
from worker.text.grammar.trial import CompiledGrammar, CompileError, RefusedConstraint, Verdict
from worker.text.output.formats import ModelFormat
from worker.text.output.harmony import ANSWER_BEGINS
from worker.text.prompt.normalize import normalize
from worker.text.prompt.prompt import Prompt
from worker.text.prompt.size_limit import cost_in_characters
from worker.text.threads import Pool
from worker.text.tokenizer import Tokenizer, Vocabulary
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


class _Compiler:
    """Compiles grammars on threads, after a trial in a child process; a worker has one."""

    def __init__(self) -> None:
        parallel, reserved = 4, 1  # threads, and processes; offline jobs leave the reserved ones free
        self._pool = Pool("grammar", parallel, reserved=reserved, subject="schemas")
        self._turns = Turns(parallel, reserved=reserved)
        # One ahead, since its start takes a tenth of a second: longer than most schemas.
        self._children = Children("worker.text.grammar.trial", parallel, ahead=True)
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
        """Return the verdict of a child process on a question of `trial`. Recent verdicts are cached, and returned
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
            answer = await self._children.ask(None, question, trial.LIMITS)
        except (LimitExceeded, ChildCrashed) as error:
            logger.warning("the trial of a schema: %s", error)
            return CompileError(trial.TOO_EXPENSIVE)
        except (ChildFailed, TimeoutError) as error:  # not caused by the schema
            logger.warning("the trial of a schema: %r", error)
            raise JobFailure(
                "overloaded",
                "The server has no resources to check the request's schema now; try again later.",
                retryable=True,
            ) from None
        return trial.verdict_of(answer.head)


class GrammarStates:
    """Creates the grammar state of each constrained answer; a worker has one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        model_format: ModelFormat,
        width: int,
        *,
        hold_calls: bool = False,
    ) -> None:
        """`width`: tokens in the model's logits, which may exceed the tokenizer's vocabulary. `hold_calls`: see
        `constraint_of`."""
        self._count = max(width, len(tokenizer.tokens))
        self._encode = tokenizer.encode
        self._ends = tokenizer.eos_token_ids
        self._format = model_format
        self._tokenizer = llguidance_tokenizer(tokenizer, vocabulary, self._count)
        self._markup, self._compiler = markup_of(tokenizer, model_format), _Compiler()
        self._grammars = Grammars(self._markup)
        self._marks = pattern_of_markers(self._markup.markers)
        self._thought_mask = _thought_mask(tokenizer, vocabulary, model_format, self._count)
        self._drafts_time = AllDraftsTime()
        self._forced_text = ForcedText(self._tokenizer) if self._tokenizer else None
        self._numbers = FiniteNumbers(
            vocabulary.bytes_of, self._count, self._markup.markers.values(), begun=not model_format.harmony
        )
        self._hold_calls = hold_calls
        reads_calls = self._tokenizer and model_format.reads_calls
        self._openings = Openings(vocabulary, model_format, self._ends) if reads_calls else None
        self._compiling = set[asyncio.Task[CallMatchers | None]]()  # kept until they end: the loop does not

    async def create(
        self,
        request: ChatRequest,
        prompt: Prompt,
        lane: Lane = "interactive",
        *,
        drafts: bool = False,
        resumes: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ) -> "RowGrammar | CallsGrammar | None":
        """Return the grammar of a request, or None if the answer is unconstrained. `drafts`: it may read drafts.
        `resumes`: the answer goes on after an earlier attempt, so that calls may have begun. `warn`: is called with
        each part of a schema that a forced call is not held to. Raises `JobFailure` if the constraint is not supported
        or cannot be satisfied."""
        constraint = constraint_of(request, hold_calls=self._hold_calls)
        if constraint is None:
            return None
        if constraint.in_text:
            return await self._calls_in_text(constraint, request, prompt, lane, drafts=drafts, resumes=resumes)
        try:
            return await self._create(constraint, request, prompt, lane, warn, drafts=drafts)
        except JobFailure as refusal:
            raise refusal.about(constraint.field) from refusal.__cause__

    async def _create(
        self,
        constraint: OutputConstraint,
        request: ChatRequest,
        prompt: Prompt,
        lane: Lane,
        warn: Callable[[str], None],
        *,
        drafts: bool,
    ) -> "RowGrammar":
        if self._tokenizer is None:
            raise JobFailure(
                "unsupported", f"{constraint.field}: this model's tokenizer does not support it; leave it out."
            )
        tenant = request.effective_tenant or ""
        run = partial(self._compiler.run, lane, tenant)
        begun = await run(self._begun, self._tokenizer, request, prompt)
        reasoning = None if begun else self._reasoning_state(prompt)
        matchers = partial(
            self._matchers, self._tokenizer, has_thought=reasoning is not None, lane=lane, tenant=tenant, drafts=drafts
        )
        try:
            matcher, ahead = await matchers(constraint, warn=warn)
        except JobFailure as refusal:
            free = constraint.without([function.name for function in constraint.optional])
            if free == constraint or refusal.retryable:
                raise
            # The process could not find out what takes too long: the arguments of all functions that need not be held
            # are free.
            matcher, ahead = await matchers(free)
            warn(f"{refusal.message} The arguments of calls are not held.")
        new = self._new_grammar(constraint)
        state = await run(partial(new, matcher, thought=reasoning, begun=begun, drafts=ahead))
        if state.error:
            raise JobFailure(
                "invalid_request",
                f"{constraint.field}: it does not allow the beginning of the answer in the last message.",
            )
        return state

    async def _calls_in_text(
        self,
        constraint: OutputConstraint,
        request: ChatRequest,
        prompt: Prompt,
        lane: Lane,
        *,
        drafts: bool,
        resumes: bool,
    ) -> CallsGrammar | None:
        """Return the grammar of the calls in a free answer. Only strict functions, and an answer that resumes, wait for
        it to be compiled."""
        strict = any(function.strict for function in constraint.functions)
        if self._openings is None:
            if strict and self._format.reads_calls:
                message = "tools: this model's tokenizer does not support strict; leave it out."
                raise JobFailure("unsupported", message, param="tools")
            return None
        matchers = Future[CallMatchers | None]()
        compiling = asyncio.ensure_future(
            self._call_matchers(constraint, lane, request.effective_tenant or "", drafts=drafts, strict=strict)
        )
        self._compiling.add(compiling)
        compiling.add_done_callback(self._compiling.discard)
        # A grammar that is quick to compile takes 13 ms if no other is compiled.
        quick_s = 0.05 if is_quick(constraint) else 0.0
        await asyncio.wait({compiling}, timeout=None if strict or resumes else quick_s)
        if compiling.done():
            matchers.set_result(compiling.result())
        else:
            compiling.add_done_callback(lambda task: matchers.set_result(None if task.cancelled() else task.result()))
        functions = {tool.function.name: Parameters(tool.function.parameters) for tool in request.offered_tools}
        return CallsGrammar(self._openings, prompt.thinking, functions, matchers, strict=strict)

    async def _call_matchers(
        self, constraint: OutputConstraint, lane: Lane, tenant: str, *, drafts: bool, strict: bool
    ) -> CallMatchers | None:
        """Return what holds the calls of one row: to the schemas of all functions, else to those of strict ones, else
        None. Raises `JobFailure` if there are strict ones and that fails too."""
        vocabulary = self._tokenizer
        assert vocabulary is not None
        required = constraint.without([function.name for function in constraint.optional])
        for last, each in ((False, constraint), (True, required)):
            if each is constraint is required:
                continue
            try:
                matcher, ahead = await self._matchers(
                    vocabulary, each, has_thought=False, lane=lane, tenant=tenant, drafts=drafts
                )
            except JobFailure as failure:
                if strict and last:
                    raise
                logger.info("calls are held to fewer schemas: %s", failure.message)
                if not strict:
                    return None
            else:
                tokens_of, new = partial(self._tokens_of, vocabulary), self._new_grammar(constraint)
                return CallMatchers(matcher, ahead, tokens_of, new)
        return None

    def _new_grammar(self, constraint: OutputConstraint) -> Callable[..., RowGrammar]:
        """Return `RowGrammar` with what all rows of the constraint have in common."""
        is_json = not constraint.functions or in_json(dialect_named(self._markup.dialect))
        return partial(
            RowGrammar,
            ends=self._ends,
            drafts_time=self._drafts_time,
            forced_text=self._forced_text,
            numbers=self._numbers if is_json else None,
        )

    def _tokens_of(self, vocabulary: LLTokenizer, text: str) -> list[int]:
        """Tokenize the beginning of a call: markers as the tokens that the grammar has for them."""
        parts, found = self._marks.split(text), list[int]()
        for part in filter(None, parts):
            marker = self._markup.markers.get(part)
            found += vocabulary.tokenize_str(part) if marker is None else [marker]
        return found

    def _reasoning_state(self, prompt: Prompt) -> ThoughtState | None:
        if self._thought_mask is None or prompt.thinking == "closed":
            return None
        return ThoughtState(self._thought_mask, begun=prompt.thinking == "open")

    def _begun(self, vocabulary: LLTokenizer, request: ChatRequest, prompt: Prompt) -> list[int]:
        """Return the tokens of the answer, without its thoughts, that the prompt already holds."""
        text, model_format = _continued_text(request), self._format
        if model_format.think:
            text = text.rpartition(model_format.think[1])[2].lstrip()
        if prompt.thinking == "open" or not text.strip():
            return []
        header = self._encode(ANSWER_BEGINS) if model_format.harmony else []
        return [*header, *vocabulary.tokenize_str(text)]

    async def _matchers(
        self,
        vocabulary: LLTokenizer,
        constraint: OutputConstraint,
        *,
        has_thought: bool,
        lane: Lane,
        tenant: str,
        drafts: bool,
        warn: Callable[[str], None] = lambda line: None,
    ) -> tuple[LLMatcher, LLMatcher | None]:
        quick = is_quick(constraint)
        compile_in_child = partial(self._compile_in_child, constraint, has_thought, lane, tenant, warn)
        written = partial(self._grammars.grammar, constraint, has_thought=has_thought)
        compiled = partial(self._compiler.compile, lane, tenant, vocabulary, drafts=drafts)
        if quick:
            with suppress(sandbox.Uncompilable, *[JobFailure] * bool(constraint.optional)):
                return await compiled(await self._compiler.run(lane, tenant, written))
            # The child's error names the cause, and it leaves out schemas that need not be enforced.
        try:
            return await compiled(await compile_in_child())
        except sandbox.Uncompilable as error:
            _refuse(constraint.field, str(error))

    async def _compile_in_child(
        self, constraint: OutputConstraint, has_thought: bool, lane: Lane, tenant: str, warn: Callable[[str], None]
    ) -> str:
        """Return a grammar that a child process has compiled, so compiling it here is safe. Raises `JobFailure`."""
        question_bytes = await self._compiler.run(
            lane, tenant, partial(trial.question, self._markup, constraint, has_thought=has_thought)
        )
        match await self._compiler.verdict(lane, tenant, question_bytes):
            case CompiledGrammar(grammar, not_held):
                if lines := not_held.splitlines():
                    named = [f.name for f in constraint.functions if any(f"tools: {f.name}:" in line for line in lines)]
                    logger.info("these functions' schemas cannot be enforced completely: %s", ", ".join(named))
                for line in lines:
                    warn(line)
                return grammar
            case RefusedConstraint(type, message, param):
                raise JobFailure(type, message, param=param)
            case CompileError(message, place):
                _refuse(place or constraint.field, message)


def _refuse(place: str, wrong: str) -> NoReturn:
    message = f"{place}: this schema cannot be enforced: {trial.grammar_error(wrong)}"
    raise JobFailure("invalid_request", message, param=param_of(place))


def _continued_text(request: ChatRequest) -> str:
    """Return the text of the trailing assistant messages, which the answer continues; empty if there are none.

    Raises `JobFailure` for a text in several parts.
    """
    last = list(takewhile(_is_answer_text, reversed(request.messages)))[::-1]
    if not last:
        return ""
    (message,) = normalize(last)
    content = message["content"]
    if isinstance(content, str):
        return content
    if len(content) > 1:
        raise JobFailure(
            "unsupported",
            "response_format: an assistant message in several parts cannot be continued; send one string.",
        )
    return "".join(part["text"] for part in content)


def _is_answer_text(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def _thought_mask(
    tokenizer: Tokenizer, vocabulary: Vocabulary, model_format: ModelFormat, count: int
) -> ThoughtMask | None:
    """Return the mask of thoughts, or None if the model has none or writes them within the grammar."""
    if model_format.harmony or not model_format.think:
        return None
    start, ends = model_format.think
    begins, *more = tokenizer.encode(start)
    banned = tokenizer.eos_token_ids
    return ThoughtMask(vocabulary, count, begins=None if more else begins, ends=ends, banned=banned)
