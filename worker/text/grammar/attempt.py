"""Child process that writes the grammar of a client's constraint and compiles it: see `compiler`.

It reads a marshalled question from stdin, and writes a line of JSON with the verdict. If the grammar does not compile,
a second line names the part of the request that causes it. The search for that part has a time limit.
"""

import json
import marshal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

from llguidance import LLTokenizer

from worker.errors import ErrorType, JobFailure
from worker.process.rlimits import limit_resources, lower_priority
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.sandbox import Uncompilable, compile_grammar
from worker.text.grammar.tool_grammars import Function

PANICKED = 3  # exit status if llguidance panicked
_CPU_S = 2  # CPU time; real schemas take a tenth of it, process start included
_SEARCH_CPU_S = 1.0  # CPU time after which no further part is tried
_STACK_BYTES = 4 << 20  # at most half of the stack of the worker's own threads
_BYTES = 2 << 30  # limit of address space
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


@dataclass(frozen=True, slots=True)
class CompileError:
    """The grammar does not compile. `place`: the part of the request that causes it; empty if unknown."""

    message: str  # llguidance's message
    place: str = ""


Verdict = CompiledGrammar | RefusedConstraint | CompileError


def question(markup: Markup, constraint: OutputConstraint, *, reasoned: bool) -> bytes:
    """Return the input of the process: equal bytes for equal arguments."""
    functions = [(function.name, function.parameters) for function in constraint.functions]
    return marshal.dumps((astuple(markup), (constraint.schema, functions, constraint.allows_many), reasoned), _STABLE)


def verdict_of(output: bytes) -> Verdict | None:
    """Parse the output of the process. Returns None if it ended without a verdict."""
    lines = [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    match lines:
        case [["written", grammar]]:
            return CompiledGrammar(grammar)
        case [["unwanted", type, message]]:
            return RefusedConstraint(type, message)
        case [["complaint", message], *places]:
            return CompileError(message, *places)
    return None


def _main() -> None:
    lower_priority()
    limit_resources(cpu_s=_CPU_S, address_bytes=_BYTES)
    threading.stack_size(_STACK_BYTES)
    markup, (schema, functions, many), reasoned = marshal.loads(sys.stdin.buffer.read())
    constraint = OutputConstraint(schema, tuple(Function(*each) for each in functions), many)
    done = list[bool]()
    attempt = threading.Thread(
        target=lambda: done.append(_answer(Grammars(Markup(*markup)), constraint, reasoned, _print_line))
    )
    attempt.start()
    attempt.join()
    if not done:
        sys.exit(PANICKED)


def _print_line(line: str | list[str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _answer(
    grammars: Grammars, constraint: OutputConstraint, reasoned: bool, write: Callable[[str | list[str]], None]
) -> bool:
    vocabulary = LLTokenizer("byte")
    try:
        spelled, grammar = grammars.both(constraint, reasoned=reasoned)
        compile_grammar(vocabulary, spelled)
    except JobFailure as refusal:
        write(["unwanted", refusal.type, refusal.message])
    except Uncompilable as error:
        write(["complaint", str(error)])
        if place := _cause(grammars, vocabulary, constraint):
            write(place)
    else:
        write(["written", grammar])
    return True


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
    _main()
