"""Compiles grammars to matchers, so that one client's schemas do not delay another's."""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from schemas.keys import Lane
from worker.errors import JobFailure
from worker.process.child import ChildCrashed, ChildFailed, Children
from worker.process.frames import LimitExceeded
from worker.text.grammar import attempt, sandbox
from worker.text.grammar.attempt import CompileError, Verdict
from worker.text.grammar.errors import TOO_EXPENSIVE
from worker.text.threads import Pool
from worker.turns import Turns

logger = logging.getLogger("sluice.text")

T = TypeVar("T")

_MAX_PARALLEL = 4
_RESERVED = 1  # threads and processes that offline jobs leave free
_CACHED_VERDICTS = 64  # verdicts; a grammar has at most half a million characters


class Compiler:
    """Compiles grammars on threads, after a trial in a child process; a worker has one."""

    def __init__(self) -> None:
        self._pool = Pool("grammar", _MAX_PARALLEL, reserved=_RESERVED, subject="schemas")
        self._turns = Turns(_MAX_PARALLEL, reserved=_RESERVED)
        # One ahead, since its start takes a tenth of a second: longer than most schemas.
        self._children = Children("worker.text.grammar.attempt", _MAX_PARALLEL, ahead=True)
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
        if len(self._verdicts) > _CACHED_VERDICTS:
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
