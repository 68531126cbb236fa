"""Stops a command cleanly on Ctrl-C, SIGTERM or the end of stdin."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def stoppable(work: Coroutine[Any, Any, T], *, at_eof: bool = False) -> T | None:
    """Run the coroutine and return its result; None if a signal, or with `at_eof` the end of stdin, cancelled it. A
    second signal ends the process at once."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        task.cancel()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    if at_eof:
        _call_at_eof(stop)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _call_at_eof(stop: Callable[[], None]) -> None:
    """Call `stop` in the event loop at the end of stdin. Uses a daemon thread, since not every stdin can be polled."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        while os.read(0, 4096):
            pass
        try:
            loop.call_soon_threadsafe(stop)
        except RuntimeError:
            pass  # the event loop has ended

    threading.Thread(target=read, daemon=True).start()
