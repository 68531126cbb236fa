"""Grammars, compiled by llguidance. What a client sends is tried in a process of its own first.

A schema can overflow the compiler's stack, which ends the process, or keep it busy for minutes and fill gigabytes
meanwhile. llguidance (1.9) has limits for neither, but a process can be ended.
"""

import logging
import resource
import subprocess
import sys
import threading
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger("sluice.text")

_CPU_S = 2  # schemas from practice take a tenth of it, the start of the process included
_STACK_BYTES = 4 << 20  # half of what the worker's own threads have, or less
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)  # the states take some 2 kB each
_TOO_MUCH = "it is too large, too deep or too slow to compile."


class Uncompilable(ValueError):
    """In llguidance's words."""


def compiled(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """Raises `Uncompilable`."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # only this finds out that nothing satisfies a schema
    if wrong := error_of(matcher):
        raise Uncompilable(wrong)
    return matcher


def error_of(matcher: LLMatcher) -> str | None:
    return matcher.get_error().removesuffix("<non-verbose/>").strip() if matcher.is_error() else None


@lru_cache(maxsize=64)
def complaint(grammar: str) -> str | None:
    """What is wrong with it. None where `compiled` may be called."""
    tried = subprocess.run(
        # A session of its own: an interrupt from the terminal is not the grammar's fault.
        [sys.executable, "-P", __file__], input=grammar.encode(), capture_output=True, start_new_session=True
    )  # fmt: skip
    if tried.returncode:
        logger.info("a schema's trial ended with %d: %s", tried.returncode, tried.stderr[-500:])
        return _TOO_MUCH
    return tried.stdout.decode() or None


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S + 1))
    threading.stack_size(_STACK_BYTES)
    grammar, found = sys.stdin.buffer.read().decode(), list[str]()
    attempt = threading.Thread(target=lambda: found.append(_tried(grammar)))
    attempt.start()
    attempt.join()
    (words,) = found  # none where llguidance panicked: then this fails, too
    sys.stdout.buffer.write(words.encode())


def _tried(grammar: str) -> str:
    try:
        compiled(LLTokenizer("byte"), grammar)
    except Uncompilable as error:
        return str(error)
    return ""


if __name__ == "__main__":
    _main()
