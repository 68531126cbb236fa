"""Readiness of a worker to claim jobs: Redis has answered, still answers regularly, and the worker is not stopping."""

import time
from collections.abc import Awaitable, Callable, Mapping

from redis.exceptions import RedisError

from sluice.contract.refusals import reason_of


class Readiness:
    """State of the readiness checks, written on the event loop and read on other threads."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: interval at which the worker polls Redis for jobs, in seconds."""
        self._late_s = 2 * every_s + 3.0
        self._answered_at: float | None = None
        self._refusal: str | None = None
        self._draining = False

    def record_answer(self) -> None:
        """Record an answer from Redis."""
        self._answered_at = time.monotonic()
        self._refusal = None

    async def watch(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call Redis, and remember why it refused. Raises what the call raises."""
        try:
            await call()
        except RedisError as error:
            self._refusal = reason_of(error)
            raise

    def drain(self) -> None:
        """Report from now on that the worker claims no more jobs."""
        self._draining = True

    def parts(self) -> Mapping[str, Callable[[], str | None]]:
        """Return the checks by name. Each returns the problem, or None."""
        return {"redis": self._redis, "claims": self._claims}

    def _redis(self) -> str | None:
        """Return the problem with Redis, or None. A draining worker does not poll, so silence is no problem then."""
        if self._answered_at is None:
            return self._refusal or "it has not answered yet"
        silent_s = time.monotonic() - self._answered_at
        problem = self._refusal or f"no answer for {silent_s:.0f} s"
        return problem if silent_s > self._late_s and not self._draining else None

    def _claims(self) -> str | None:
        return "the worker is stopping, and claims no more jobs" if self._draining else None
