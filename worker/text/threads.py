"""Threads for work whose cost a client chooses: templates, tokenizing and what is planned from them.

The work of a job runs on one thread at a time. Large texts have threads of their own, one for each lane, so a short
prompt never waits for a long one, nor an interactive job for offline work.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event
from typing import TypeVar

from schemas.keys import LANES, Lane
from worker.errors import Refusal

T = TypeVar("T")
Check = Callable[[], None]  # raises `Abandoned` when nobody waits for the work any more

LARGE = 65_536  # characters: the slowest tokenizers read as many in a quarter of a second
_SMALL_AT_ONCE = 2
# A text that fits a context of a million tokens takes some 5 s on a slow machine.
_LONGEST_S = 60.0


class Abandoned(Exception):
    """The job that this work was for has ended."""


def never() -> None:
    """The check of work that is never abandoned."""


class Pool:
    """A few threads. A free one goes to the interactive job that has waited longest, then to an offline one."""

    def __init__(self, name: str, threads: int, *, longest_s: float = _LONGEST_S) -> None:
        self._threads, self._free, self._longest_s = ThreadPoolExecutor(threads, name), threads, longest_s
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in LANES}

    async def run(self, lane: Lane, work: Callable[[Check], T]) -> T:
        """Call `work` on a thread. Native code cannot be interrupted, so work that takes long calls its check between
        two steps. Raises `Refusal` when it has run too long; its thread is free again at its next check."""
        await self._turn(lane)
        abandoned = Event()
        running = self._threads.submit(work, partial(_check, abandoned))
        # Not when the job ends, but when the thread is free.
        running.add_done_callback(partial(self._freed, asyncio.get_running_loop()))
        try:
            async with asyncio.timeout(self._longest_s) as limit:
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Refusal(
                "too_large", f"messages: to prepare them took longer than {self._longest_s:g} s; shorten them."
            ) from None
        finally:
            abandoned.set()

    async def _turn(self, lane: Lane) -> None:
        """Wait until a thread is free, and take it."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _freed(self, loop: asyncio.AbstractEventLoop, _: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        for lane in LANES:
            while self._waiting[lane]:
                turn = self._waiting[lane].popleft()
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1


def _check(abandoned: Event) -> None:
    if abandoned.is_set():
        raise Abandoned


class TextThreads:
    """A worker has one."""

    def __init__(self) -> None:
        self._small = Pool("text", _SMALL_AT_ONCE)
        self._large = {lane: Pool(f"large-text-{lane}", 1) for lane in LANES}

    async def run(self, lane: Lane, characters: int, work: Callable[[Check], T]) -> T:
        """Call `work`, which is on so many characters, on a thread: see `Pool.run`."""
        pool = self._large[lane] if characters > LARGE else self._small
        return await pool.run(lane, work)
