"""Keep a failure to what it belongs to."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("sluice.engine")


@dataclass(slots=True)
class Attempt:
    """Work that may fail."""

    failed: bool = False


@contextmanager
def isolate(action: str) -> Iterator[Attempt]:
    """Log any exception that the body raises instead of raising it; the caller then checks `failed`, and gives up what
    the body may have left incomplete. `action`: what the body does, for the log.

    MLX reports a lack of memory, a shape that does not fit and an error in a kernel as exceptions of several types, at
    whatever forward computes the array. So this and the end of the engine's thread catch every type."""
    attempt = Attempt()
    try:
        yield attempt
    except Exception:
        logger.exception("%s failed", action)
        attempt.failed = True
