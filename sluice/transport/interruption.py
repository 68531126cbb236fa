"""Ends a block of one task from another place, with an error, as `asyncio.timeout` ends one after a time."""

import asyncio
from types import TracebackType
from typing import Self


class Interruption:
    """A block that can be interrupted. It needs no task of its own:

    with Interruption() as block:
        timer = loop.call_later(5, block.interrupt, TooLate())
        await work()
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: Exception | None = None
        self._cancelling = 0
        self._interruptions = 0

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "only a task can be interrupted"
        self._cancelling = self._task.cancelling()
        return self

    def interrupt(self, error: Exception) -> None:
        """Cancel what the block awaits; the block raises `error` instead of the cancellation. Without effect before and
        after the block. To be called from outside of its task; again, if what the block awaits can lose a
        cancellation."""
        if self._task is not None:
            self._error = error
            self._interruptions += 1
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        for _ in range(self._interruptions):
            task.uncancel()
        # The task may have been cancelled by others, too: then it remains cancelled.
        if task.cancelling() <= self._cancelling and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error from None
