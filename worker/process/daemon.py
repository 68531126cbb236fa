"""The process of a worker: its exit, and its garbage collections."""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

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


def default_signals() -> None:
    """Let the next SIGINT or SIGTERM end the process at once. Handlers of the loop still run for those that came."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


def execute_again() -> NoReturn:
    """Replace this process by a new one with its id, command line and environment. Threads end wherever they are.
    Raises `CannotStart`."""
    # The new process ignores it until it serves: by default it ends one that loads its model.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.shutdown()
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError as error:
        raise CannotStart(f"{sys.executable}: cannot be executed again ({error.strerror}); start the worker") from None


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


# Runs Python's full garbage collections, which hold the interpreter's lock for as long as they visit all live objects.
#
# Python starts them by itself while a large request is read, since that allocates many objects: 10,000 messages make
# each one take 0.2 s, in which no token is delivered. Here they run on a timer, and wait while there are many objects.
# Young objects are still collected as usual, and reference counts still free most objects at once.


def pause_collections() -> None:
    """Collect nothing until `resume_collections`. Imports and the load of a model create hundreds of thousands of
    objects and hardly any garbage; visiting them again and again would lengthen the start."""
    gc.disable()


def resume_collections() -> None:
    """End the pause. Objects alive now are not visited again."""
    gc.freeze()
    gc.enable()


@asynccontextmanager
async def collect_on_a_timer(interval_s: float = 5.0) -> AsyncIterator[None]:
    """Take over full collections within the context. Objects alive at its start are not visited again."""
    thresholds = gc.get_threshold()
    gc.freeze()
    never = 1_000_000_000  # collections of the middle generation before Python starts a full one
    gc.set_threshold(*thresholds[:2], never)
    collecting = asyncio.create_task(_collect(interval_s))
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _collect(interval_s: float) -> None:
    remaining = 0
    while True:
        await asyncio.sleep(interval_s)
        objects = count_old()
        if is_due(objects, remaining):
            gc.collect()
            remaining = count_old()
            logger.debug("garbage collection: %d objects before, %d after", objects, remaining)


def count_old() -> int:
    """Return the number of objects that a full collection would visit, without the youngest."""
    return len(gc.get_objects(generation=2))


def is_due(objects: int, remaining: int) -> bool:
    """Return True if a full collection is quick, or can wait no longer. `objects`: number now. `remaining`: number
    after the last collection."""
    few = 50_000  # visiting them takes some 10 ms; a worker with 32 streams has 10,000
    many_more = 2_000_000  # some hundred bytes each: memory would run out otherwise
    return objects <= few or objects - remaining >= many_more
