"""Keep a failure to what it belongs to."""

import logging
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger("sluice.engine")


class EngineBroken(Exception):
    """Several failures without a decoded token between them: the rows are not the cause."""


class _Isolation:
    """Work that may fail: see `isolate`. A class, since a generator takes three times as long, several times a step."""

    __slots__ = ("_action", "_on_failure", "failed")

    def __init__(self, action: str, on_failure: Callable[[], None] | None) -> None:
        self._action = action
        self._on_failure = on_failure
        self.failed = False

    def __enter__(self) -> "_Isolation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):  # there is none, or one that ends the thread
            return False
        logger.error("%s failed", self._action, exc_info=error)
        self.failed = True
        if self._on_failure:
            self._on_failure()
        return True


def isolate(action: str, on_failure: Callable[[], None] | None = None) -> _Isolation:
    """Log any exception that the body raises instead of raising it, and call `on_failure`, or let the caller check
    `failed`, to give up what the body may have left incomplete. `action`: what the body does, for the log.

    MLX reports a lack of memory, a shape that does not fit and an error in a kernel as exceptions of several types, at
    whatever forward computes the array. So this and the end of the engine's thread catch every type."""
    return _Isolation(action, on_failure)
