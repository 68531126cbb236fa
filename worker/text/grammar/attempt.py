"""Child process that writes the grammar of a client's constraint and compiles it: see `compiler`.

It answers a marshalled question with its verdict. If the grammar does not compile, a second answer names the part of
the request that causes it. The search for that part has a time limit.
"""

import marshal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass

from llguidance import LLTokenizer

from worker.errors import ErrorType, JobFailure
from worker.process.frames import LimitExceeded, Limits
from worker.process.serve import Send, serve
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.sandbox import Uncompilable, compile_grammar
from worker.text.grammar.tool_grammars import Function

LIMITS = Limits(cpu_s=2, address_bytes=2 << 30, wall_s=60.0)  # real schemas take 0.2 s, process start included
_SEARCH_CPU_S = 1.0  # CPU time after which no further part is tried
_STACK_BYTES = 4 << 20  # at most half of the stack of the worker's own threads
_STABLE = 2  # version of marshal's format that writes equal values as equal bytes


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The grammar, which compiles."""

    grammar: str


@dataclass(frozen=True, slots=True)
class RefusedConstraint:
    """No grammar can be written: the error for the client."""

    type: ErrorType
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CompileError:
    """The grammar does not compile. `place`: the part of the request that causes it; empty if unknown."""

    message: str  # llguidance's message
    place: str = ""


Verdict = CompiledGrammar | RefusedConstraint | CompileError
_VERDICTS: dict[str, Callable[..., Verdict]] = {
    kind.__name__: kind for kind in (CompiledGrammar, RefusedConstraint, CompileError)
}


def question(markup: Markup, constraint: OutputConstraint, *, reasoned: bool) -> bytes:
    """Return the body of a request to the process: equal bytes for equal arguments."""
    functions = [(function.name, function.parameters) for function in constraint.functions]
    return marshal.dumps((astuple(markup), (constraint.schema, functions, constraint.allows_many), reasoned), _STABLE)


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
    markup, (schema, functions, many), reasoned = marshal.loads(question)
    constraint = OutputConstraint(schema, tuple(Function(*each) for each in functions), many)
    for verdict in _verdicts(Grammars(Markup(*markup)), constraint, reasoned):
        send([type(verdict).__name__, *astuple(verdict)], b"")


def _verdicts(grammars: Grammars, constraint: OutputConstraint, reasoned: bool) -> Iterator[Verdict]:
    vocabulary = LLTokenizer("byte")
    try:
        spelled, grammar = grammars.both(constraint, reasoned=reasoned)
        compile_grammar(vocabulary, spelled)
    except JobFailure as refusal:
        yield RefusedConstraint(refusal.type, refusal.message, refusal.param)
    except Uncompilable as error:
        yield CompileError(str(error))
        if place := _cause(grammars, vocabulary, constraint):
            yield CompileError(str(error), place)
    else:
        yield CompiledGrammar(grammar)


def _cause(grammars: Grammars, vocabulary: LLTokenizer, constraint: OutputConstraint) -> str | None:
    for place, part in constraint.parts():
        if time.process_time() > _SEARCH_CPU_S:
            return None
        try:
            compile_grammar(vocabulary, grammars.grammar_as_text(part))
        except Uncompilable:
            return place
    return None


if __name__ == "__main__":
    serve(answer)
