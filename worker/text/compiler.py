"""Grammars to matchers, without one client's schemas holding up another's."""

import asyncio
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from worker.child import run_child
from worker.errors import Refusal
from worker.text import trial
from worker.text.complaints import TOO_MUCH

logger = logging.getLogger("sluice.text")

T = TypeVar("T")

_AT_ONCE = 4
_KEPT = 64  # verdicts, under grammars of at most half a million characters
# How a trial ends that is too much; any other end is not the grammar's fault.
_ITS_OWN_FAULT = {trial.PANICKED, -signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
# Of some five thousand random schemas of these keywords and this size the slowest compiled in 13 ms.
_QUICK = {
    "type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const",
    "title", "description", "default", "examples", "$schema",
}  # fmt: skip
QUICK_CHARACTERS = 4_000


class Compiler:
    """A worker has one."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grammar")
        self._trials = asyncio.Semaphore(_AT_ONCE)
        self._verdicts = OrderedDict[str, str | None]()

    async def run(self, work: Callable[..., T], *given: Any) -> T:
        """Call `work`, which is on a request's schemas, on a thread that does nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    async def compiled(self, vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        """Anew for each row: copies of a matcher share its lexer, and what breaks it. Raises `trial.Uncompilable`."""
        return await self.run(trial.compiled, vocabulary, grammar)

    async def complaint(self, grammar: str) -> str | None:
        """What is wrong with it. None where it may be compiled in this process. Only what is new waits its turn.
        Raises `Refusal` where it could not be tried."""
        if grammar not in self._verdicts:
            async with self._trials:
                if grammar not in self._verdicts:  # it may have been another row's meanwhile
                    self._verdicts[grammar] = await _tried(grammar)
        self._verdicts.move_to_end(grammar)
        verdict = self._verdicts[grammar]
        if len(self._verdicts) > _KEPT:
            self._verdicts.popitem(last=False)
        return verdict


def is_quick(schema: Any) -> bool:
    """Whether it needs no trial, if it is short."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    if not schema.keys() <= _QUICK:
        return False
    named, branches = schema.get("properties", {}), schema.get("anyOf", [])
    within = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return (
        isinstance(named, dict)
        and isinstance(branches, list)
        and all(map(is_quick, [*named.values(), *branches, *within]))
    )


async def _tried(grammar: str) -> str | None:
    ended = await run_child("worker.text.trial", grammar.encode())
    if not ended.status:
        return ended.output.decode() or None
    logger.info("a schema's trial ended with %d: %s", ended.status, ended.errors[-500:])
    if ended.status not in _ITS_OWN_FAULT:
        raise Refusal("overloaded", "The server has no room to try the request's schema now.", retryable=True)
    return TOO_MUCH
