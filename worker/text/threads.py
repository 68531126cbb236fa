"""Runs work whose cost a client chooses on threads: chat templates, tokenization, and plans made from their results.

A job uses one thread at a time. Large texts have their own threads, one for each lane, so a short prompt never waits
for a long one, nor an interactive job for offline work. Within a lane tenants take turns. Work that has used up its
time slice pauses at its next check, and lets work go first that has used less time.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TypeVar

from sluice.contract.keys import LANES, Lane
from worker.errors import JobFailure
from worker.turns import Turn, Turns

T = TypeVar("T")
Check = Callable[[], None]  # raises `WorkAbandoned` if the result is no longer needed

LARGE = 65_536  # characters: the slowest tokenizers take a quarter of a second for them
_MAX_PAUSED = 6  # paused calls: each keeps its thread and its memory while others run


class WorkAbandoned(Exception):
    """The job that this work was for has ended."""


def never() -> None:
    """The check of work that is never abandoned."""


class Pool:
    """A few threads. A free one takes the interactive job of the next tenant in turn, else offline work."""

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        reserved: int = 0,
        subject: str = "messages",
        timeout_s: float = 60.0,
        slice_s: float = 0.1,
    ) -> None:
        """`reserved`: threads that offline jobs leave free. `subject`: the field that the error for a timeout names.
        `timeout_s`: timeout of a call, without its waits and pauses; a text that fills a context of a million tokens
        takes about 5 s on a slow machine. `slice_s`: the time slice."""
        self._threads = ThreadPoolExecutor(threads + _MAX_PAUSED, name)
        self._turns = Turns(threads, reserved=reserved)
        self._timeout_s = timeout_s
        self._slice_s = slice_s
        self._paused = 0
        self._subject = subject

    async def run(self, lane: Lane, work: Callable[[Check], T], tenant: str = "") -> T:
        """Call `work` on a thread. Native code cannot be interrupted, so long work must call its argument, the check,
        between steps. Raises `JobFailure` after the timeout; the thread becomes free at the next check."""
        await self._turns.take(lane, tenant)
        running = _Running(partial(self._pause, lane, tenant), self._slice_s)
        future = self._threads.submit(work, running.check)
        # The slot is free when the thread is, which may be after the job has ended.
        future.add_done_callback(partial(self._freed, running))
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                running.limit = limit
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not limit.expired():
                raise
            raise JobFailure(
                "too_large", f"{self._subject}: preparing them took longer than {self._timeout_s:g} s; shorten them."
            ) from None
        finally:
            running.abandon()

    def _pause(self, lane: Lane, tenant: str, running: "_Running") -> None:
        """Give the slot to other work that waits for one, or let this work continue."""
        if running.is_over or self._paused >= _MAX_PAUSED or not self._turns.wanted:
            running.resume()
            return
        self._paused += 1
        turn = self._turns.queue(lane, tenant, running.used_s)
        turn.add_done_callback(partial(self._continue, running))
        running.pause(turn)
        self._turns.give_back()

    def _continue(self, running: "_Running", turn: Turn) -> None:
        self._paused -= 1
        running.resume()

    def _freed(self, running: "_Running", _: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop has closed: no job waits
            running.loop.call_soon_threadsafe(self._end, running)

    def _end(self, running: "_Running") -> None:
        if running.has_slot:
            self._turns.give_back()


class _Running:
    """One call of `Pool.run`. Only `check` runs on its thread; all else belongs to the event loop, which reads `used_s`
    while the work is paused."""

    def __init__(self, request_pause: Callable[["_Running"], None], slice_s: float) -> None:
        self.loop, self.limit = asyncio.get_running_loop(), asyncio.timeout(None)
        self._request_pause, self._slice_s = request_pause, slice_s
        self._abandoned, self._continues = Event(), Event()
        self._began = time.monotonic()  # of the time slice
        self.used_s = 0.0  # in earlier slices
        self._turn: Turn | None = None  # of the last pause; None before the first
        self._left_s = 0.0

    @property
    def abandoned(self) -> bool:
        return self._abandoned.is_set()

    @property
    def is_over(self) -> bool:
        """True if its job no longer waits for it."""
        return self.abandoned or self.limit.expired()

    @property
    def has_slot(self) -> bool:
        return self._turn is None or (self._turn.done() and not self._turn.cancelled())

    def pause(self, turn: Turn) -> None:
        self._turn, ends = turn, self.limit.when()
        self._left_s = ends - self.loop.time() if ends is not None else 0.0
        self.limit.reschedule(None)

    def resume(self) -> None:
        if not self.is_over and self.limit.when() is None:
            self.limit.reschedule(self.loop.time() + self._left_s)
        self._continues.set()

    def abandon(self) -> None:
        self._abandoned.set()
        if self._turn is not None:
            self._turn.cancel()
        self._continues.set()

    def check(self) -> None:
        """Pause if the time slice is over. The work calls it on its thread. Raises `WorkAbandoned`."""
        had_s = time.monotonic() - self._began
        if not self.abandoned and had_s >= self._slice_s:
            self.used_s += had_s
            self._wait()
            self._began = time.monotonic()
        if self.abandoned:
            raise WorkAbandoned

    def _wait(self) -> None:
        self._continues.clear()
        if self.abandoned:
            return
        try:
            self.loop.call_soon_threadsafe(self._request_pause, self)
        except RuntimeError:  # the loop has closed
            raise WorkAbandoned from None
        while not self._continues.wait(1.0):
            if self.loop.is_closed():
                raise WorkAbandoned


class TextThreads:
    """The text threads of a worker: a few for small texts, and one per lane for large ones."""

    def __init__(self, subject: str = "messages") -> None:
        """`subject`: as for `Pool`."""
        self._small = Pool("text", 2, subject=subject)
        self._large = {lane: Pool(f"large-text-{lane}", 1, subject=subject) for lane in LANES}

    async def run(self, lane: Lane, characters: int, work: Callable[[Check], T], tenant: str = "") -> T:
        """Call `work` on a thread for small or for large texts, by the length of its input: see `Pool.run`."""
        pool = self._large[lane] if characters > LARGE else self._small
        return await pool.run(lane, work, tenant)
