"""Whether a worker takes jobs: it has met its Redis, has an answer from it now and then, and is not told to stop."""

import time
from collections.abc import Callable, Mapping


class Readiness:
    """Written on the event loop, read on other threads."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: how often the worker asks its Redis for jobs."""
        self._late_s = 2 * every_s + 3.0
        self._answered_at: float | None = None
        self._draining = False

    def answered(self) -> None:
        self._answered_at = time.monotonic()

    def drain(self) -> None:
        self._draining = True

    def parts(self) -> Mapping[str, Callable[[], str | None]]:
        return {"redis": self._redis, "claims": self._claims}

    def _redis(self) -> str | None:
        """What is wrong with it. A worker that drains does not ask any more."""
        if self._answered_at is None:
            return "it has not answered yet"
        silent_s = time.monotonic() - self._answered_at
        return f"no answer for {silent_s:.0f} s" if silent_s > self._late_s and not self._draining else None

    def _claims(self) -> str | None:
        return "the worker is told to stop, and takes no more jobs" if self._draining else None
