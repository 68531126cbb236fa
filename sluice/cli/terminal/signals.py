"""Ctrl-C, SIGTERM and the end of stdin as ordinary ways to stop."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def stoppable(work: Coroutine[Any, Any, T], *, at_eof: bool = False) -> T | None:
    """Return the result of the work; None if a signal stopped it. A second signal ends the command at once."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        task.cancel()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    if at_eof:
        _when_stdin_ends(stop)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _when_stdin_ends(stop: Callable[[], None]) -> None:
    """In a thread, since not every stdin can be waited for; it keeps nobody from ending."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        while os.read(0, 4096):
            pass
        try:
            loop.call_soon_threadsafe(stop)
        except RuntimeError:
            pass  # the work was over first

    threading.Thread(target=read, daemon=True).start()
