"""Ends the process even if a thread does not: native code cannot be interrupted, and Python waits for it."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from worker.errors import CannotStart

logger = logging.getLogger("sluice")

EXIT_FAILED = 1  # Python's own code for an exception
EXIT_CANNOT_START = 2
EXIT_FORCED = 5  # after a second signal, with jobs that were not requeued
_EXIT_INTERRUPTED = 128 + signal.SIGINT


class ExitTimer:
    """Ends the process after a time limit, unless it ends before. A process has one."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._watch: asyncio.Task[None] | None = None

    def exit_after(self, limit_s: float, code: int, error: BaseException | None = None) -> None:
        """Start the timer in place of an earlier one. Returns at once. `error` is logged if the limit is reached."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(limit_s, _end, (code, error))
        self._timer.daemon = True
        self._timer.start()

    def when(self, event: asyncio.Event, limit_s: float, code: int) -> None:
        """Start the timer when the event is set. Replaces an earlier call."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._await(event, limit_s, code))

    @contextmanager
    def after_error(self, limit_s: float) -> Iterator[None]:
        """Start the timer if the block raises: the clean-up that follows may wait for a thread."""
        try:
            yield
        except BaseException as error:
            self.exit_after(limit_s, _exit_code(error), error)
            raise

    async def _await(self, event: asyncio.Event, limit_s: float, code: int) -> None:
        await event.wait()
        self.exit_after(limit_s, code)


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends by this error."""
    match error:
        case CannotStart():
            return EXIT_CANNOT_START
        case KeyboardInterrupt() | asyncio.CancelledError():
            return _EXIT_INTERRUPTED
    return EXIT_FAILED


def _end(code: int, error: BaseException | None) -> None:
    if error is not None and code == EXIT_FAILED:
        logger.critical("the worker failed", exc_info=error)
    elif code == EXIT_CANNOT_START:
        logger.critical("%s", error)
    logger.warning("a thread still runs: ending without it")
    logging.shutdown()
    os._exit(code)
