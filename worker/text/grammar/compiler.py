"""Grammars to matchers, without one client's schemas holding up another's."""

import hashlib
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from schemas.keys import Lane
from worker.errors import JobFailure
from worker.process.child import Ended, run_child
from worker.text.grammar import attempt, sandbox
from worker.text.grammar.attempt import Complaint, Verdict
from worker.text.grammar.errors import TOO_MUCH
from worker.text.threads import Pool
from worker.turns import Turns

logger = logging.getLogger("sluice.text")

T = TypeVar("T")

_AT_ONCE = 4
_RESERVED = 1  # which offline jobs leave free
_KEPT = 64  # verdicts, of which a grammar has at most half a million characters
# How an attempt ends that is too much; any other end is not the schema's fault.
_ITS_OWN_FAULT = {attempt.PANICKED, -signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


class Compiler:
    """A worker has one."""

    def __init__(self) -> None:
        self._pool = Pool("grammar", _AT_ONCE, reserved=_RESERVED, subject="schemas")
        self._turns = Turns(_AT_ONCE, reserved=_RESERVED)
        self._verdicts = OrderedDict[bytes, Verdict]()

    async def run(self, lane: Lane, tenant: str, work: Callable[..., T], *given: Any) -> T:
        """Call `work`, which is on a request's schemas, on a thread that does nothing else."""
        return await self._pool.run(lane, lambda check: work(*given), tenant)

    async def compiled(self, lane: Lane, tenant: str, vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
        """Return a new matcher for each row: copies of one share its lexer and its errors. Raises
        `sandbox.Uncompilable`."""
        return await self.run(lane, tenant, sandbox.compile_grammar, vocabulary, grammar)

    async def verdict(self, lane: Lane, tenant: str, question: bytes) -> Verdict:
        """Return what a process found out about a question of `attempt`'s. Only what is new waits its turn.
        Raises `JobFailure` if it could not be tried."""
        known = hashlib.blake2b(question).digest()
        if known not in self._verdicts:
            async with self._turns.slot(lane, tenant):
                if known not in self._verdicts:  # it may have been another row's meanwhile
                    self._verdicts[known] = _verdict(await run_child("worker.text.grammar.attempt", question))
        self._verdicts.move_to_end(known)
        verdict = self._verdicts[known]
        if len(self._verdicts) > _KEPT:
            self._verdicts.popitem(last=False)
        return verdict


def _verdict(ended: Ended) -> Verdict:
    if verdict := attempt.verdict_of(ended.output):
        return verdict
    logger.warning("the attempt at a schema ended with %d: %s", ended.status, ended.errors[-500:])
    if ended.status not in _ITS_OWN_FAULT:
        raise JobFailure("overloaded", "The server has no room to try the request's schema now.", retryable=True)
    return Complaint(TOO_MUCH)
