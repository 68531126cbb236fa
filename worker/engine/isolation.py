"""Keep a failure to what it belongs to."""

import logging
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger("sluice.engine")

# Parts of what MLX 0.32.4 says when Metal, CUDA or the system has no memory left: it has no type for that.
_NO_MEMORY = ("[malloc]", "[metal::malloc]", "Insufficient Memory", "out of memory")


class _Failures:
    """Counts of the failures that were isolated, since the process began."""

    def __init__(self) -> None:
        self.device = 0  # that the device may have caused, maybe with an earlier forward
        self.memory = 0  # of these, for lack of memory

    def count(self, error: Exception) -> None:
        """Count a failure."""
        self.device += isinstance(error, MemoryError) or type(error) is RuntimeError  # all that MLX raises late
        self.memory += lacks_memory(error)


failures = _Failures()  # of all isolated work: only the engine's thread has any


def lacks_memory(error: Exception) -> bool:
    """Return True if the device or the system had no memory left."""
    texts = str(error) if type(error) is RuntimeError else ""
    return isinstance(error, MemoryError) or any(part in texts for part in _NO_MEMORY)


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
        failures.count(error)
        if self._on_failure:
            self._on_failure()
        return True


def isolate(action: str, on_failure: Callable[[], None] | None = None) -> _Isolation:
    """Log any exception that the body raises instead of raising it, and call `on_failure`, or let the caller check
    `failed`, to give up what the body may have left incomplete. `action`: what the body does, for the log.

    MLX reports a lack of memory, a shape that does not fit and an error in a kernel as exceptions of several types, at
    whatever forward computes the array. So this and the end of the engine's thread catch every type. An error of the
    device is raised once, by whatever is read first, and the arrays that were computed meanwhile can be read all the
    same (MLX 0.32.4): what was in progress then must not be used, and `failures` tells its owner."""
    return _Isolation(action, on_failure)
