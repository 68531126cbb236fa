"""The end of the process, whatever its threads do: native code cannot be interrupted, and Python waits for it."""

import logging
import os
import threading

logger = logging.getLogger("sluice")

EXIT_HURRIED = 5  # a second signal, and not every job was handed back


class Ending:
    """Ends the process after a time limit, if it has not ended by itself. A process has one."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def within(self, limit_s: float, code: int) -> None:
        """Returns at once. Replaces what was set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(limit_s, _end, (code,))
        self._timer.daemon = True
        self._timer.start()


def _end(code: int) -> None:
    logger.warning("a thread is still at work: ending without it")
    logging.shutdown()
    os._exit(code)
