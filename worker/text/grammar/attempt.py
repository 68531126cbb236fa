"""Child process that writes the grammar of a client's constraint and compiles it: see `compiler`.

It answers a marshalled question with its verdict. If the grammar does not compile, further answers name the part of the
request that causes it, each more exactly than the one before. The search for that part has a time limit.
"""

import marshal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import chain

from llguidance import LLTokenizer

from worker.errors import ErrorType, JobFailure
from worker.process.frames import LimitExceeded, Limits
from worker.process.serve import Send, serve
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.errors import TOO_EXPENSIVE, grammar_error
from worker.text.grammar.lark import Grammar
from worker.text.grammar.sandbox import Uncompilable, compile_grammar
from worker.text.grammar.schema.references import References, members
from worker.text.grammar.schema.relaxed import names_alone, relaxed
from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword
from worker.text.grammar.tool_grammars import ANY_ARGUMENTS, Function
from worker.text.grammar.trial import try_strings

LIMITS = Limits(cpu_s=2, address_bytes=2 << 30, wall_s=60.0)  # real schemas take 0.2 s, process start included
_SEARCH_CPU_S = 1.0  # CPU time after which no further part is tried
_STACK_BYTES = 4 << 20  # at most half of the stack of the worker's own threads
_STABLE = 2  # version of marshal's format that writes equal values as equal bytes


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The grammar, which compiles. `not_held`: what it does not enforce of functions' schemas, a line for each."""

    grammar: str
    not_held: str = ""


@dataclass(frozen=True, slots=True)
class RefusedConstraint:
    """No grammar can be written: the error for the client."""

    type: ErrorType
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CompileError:
    """The grammar does not compile. `place`: the part of the request, and of its schema, that causes it; empty if
    unknown."""

    message: str  # llguidance's message
    place: str = ""


Verdict = CompiledGrammar | RefusedConstraint | CompileError
_VERDICTS: dict[str, Callable[..., Verdict]] = {
    kind.__name__: kind for kind in (CompiledGrammar, RefusedConstraint, CompileError)
}


def question(markup: Markup, constraint: OutputConstraint, *, reasoned: bool) -> bytes:
    """Return the body of a request to the process: equal bytes for equal arguments."""
    functions = [(function.name, function.parameters, function.strict) for function in constraint.functions]
    asked = constraint.schema, functions, constraint.allows_many, constraint.in_text
    return marshal.dumps((astuple(markup), asked, reasoned), _STABLE)


def verdict_of(answer: list[str]) -> Verdict:
    """Return the verdict that an answer of the process stands for."""
    kind, *fields = answer
    return _VERDICTS[kind](*fields)


def answer(task: None, question: bytes, send: Send) -> None:
    """Send the verdict on a question, and a better one if there is. Raises `LimitExceeded`."""
    threading.stack_size(_STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        panic = thread.submit(_answer, question, send).exception()
    if panic:
        raise LimitExceeded from panic


def _answer(question: bytes, send: Send) -> None:
    markup, (schema, functions, *more), reasoned = marshal.loads(question)
    constraint = OutputConstraint(schema, tuple(Function(*each) for each in functions), *more)
    grammars = Grammars(Markup(*markup))
    verdicts, not_held = _verdicts(grammars, constraint, reasoned), list[str]()
    first = next(verdicts)
    if not isinstance(first, CompiledGrammar):
        functions = tuple(_enforceable(grammars, constraint, function, not_held) for function in constraint.functions)
        if functions != constraint.functions:
            verdicts = _verdicts(grammars, replace(constraint, functions=functions), reasoned)
            first = next(verdicts)
    for verdict in chain([first], verdicts):
        if isinstance(verdict, CompiledGrammar):
            verdict = replace(verdict, not_held="\n".join(not_held))
        send([type(verdict).__name__, *astuple(verdict)], b"")


def _verdicts(grammars: Grammars, constraint: OutputConstraint, reasoned: bool) -> Iterator[Verdict]:
    vocabulary = LLTokenizer("byte")
    try:
        text, parts = grammars.grammar_as_text(constraint)
        grammar = grammars.grammar(constraint, reasoned=reasoned, rewritten=parts.schemas)
        _compile(vocabulary, text, parts)
    except JobFailure as refusal:
        yield RefusedConstraint(refusal.type, refusal.message, refusal.param)
    except Uncompilable as error:
        yield CompileError(str(error))
        yield from (CompileError(str(error), place) for place in _places(grammars, vocabulary, constraint))
    else:
        yield CompiledGrammar(grammar)


def _enforceable(grammars: Grammars, constraint: OutputConstraint, function: Function, not_held: list[str]) -> Function:
    """Return the function with as much of its schema as can be enforced, and add what is left out to `not_held`. Of a
    strict one that is unknown formats alone."""
    if function.parameters in (None, ANY_ARGUMENTS) or (function.strict and _search_ended()):
        return function
    wrong = "" if function.strict else _wrong(grammars, constraint, function)
    if not (wrong or function.strict):
        return function
    with suppress(UnsupportedKeyword):
        schema, left_out = relaxed(function.parameters or {}, strict=function.strict)
        looser = replace(function, parameters=schema)
        if function.strict or not _wrong(grammars, constraint, looser):
            not_held += [f"tools: {function.name}: {each}." for each in left_out]
            return looser
    if function.strict:
        return function
    not_held.append(f"{wrong} Its arguments are not held.")
    looser = replace(function, parameters=names_alone(function.parameters or {}))
    if constraint.in_text or _wrong(grammars, constraint, looser):
        return replace(function, parameters=ANY_ARGUMENTS)
    return looser


def _wrong(grammars: Grammars, constraint: OutputConstraint, function: Function) -> str:
    """Return why a function's schema cannot be enforced; empty if it can be. After the time for searches, none can."""
    place = f"tools: {function.name}"
    if _search_ended():
        return f"{place}: {TOO_EXPENSIVE}"
    alone = replace(constraint, schema=None, functions=(function,))
    try:
        _compile(LLTokenizer("byte"), *grammars.grammar_as_text(alone))
    except JobFailure as refusal:
        return refusal.message
    except Uncompilable as error:
        return f"{place}: this schema cannot be enforced: {grammar_error(str(error))}"
    return ""


def _compile(vocabulary: LLTokenizer, grammar: str, parts: Grammar) -> None:
    """Compile a grammar, and try it. Raises `Uncompilable`."""
    compile_grammar(vocabulary, grammar)
    try_strings(parts)


def _places(grammars: Grammars, vocabulary: LLTokenizer, constraint: OutputConstraint) -> Iterator[str]:
    """Yield the part of the request that does not compile, then the places in its schema, each within the one before
    it, that do not compile alone for the same reason."""
    for place, part in constraint.parts():
        if _search_ended():
            return
        try:
            _compile(vocabulary, *grammars.grammar_as_text(part))
        except Uncompilable as error:
            yield place
            schema = part.schema if part.schema is not None else part.functions[0].parameters
            within = _places_within(schema or {}, vocabulary, grammar_error(str(error)))
            yield from (f"{place}: {pointer}" for pointer in within)
            return


def _places_within(root: Schema, vocabulary: LLTokenizer, reason: str) -> Iterator[str]:
    references, seen = References(root), set[str]()

    def is_wrong(pointer: str, member: Schema) -> bool:
        if pointer in seen or _search_ended():
            return False
        seen.add(pointer)
        return _reason(member, root, vocabulary) == reason

    found: tuple[str, Schema] | None = ("#", root)
    while found is not None:
        at, schema = found
        found = next((each for each in members(schema, at, references) if is_wrong(*each)), None)
        if found is not None:
            yield found[0]


def _reason(schema: Schema, root: Schema, vocabulary: LLTokenizer) -> str | None:
    """Return why a part of a schema does not compile alone, or None."""
    grammar = Grammar({})
    try:
        _compile(vocabulary, grammar.starting_with(grammar.json(schema, "", root)), grammar)
    except JobFailure:
        return None
    except Uncompilable as error:
        return grammar_error(str(error))
    return None


def _search_ended() -> bool:
    return time.process_time() > _SEARCH_CPU_S


if __name__ == "__main__":
    serve(answer)
