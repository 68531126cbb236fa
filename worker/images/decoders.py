"""The processes that decode, shared among all jobs."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from worker.errors import Refusal
from worker.images.decoder import Decoder, DecoderDied, Task
from worker.images.image import Image

logger = logging.getLogger("sluice.images")

T = TypeVar("T")

_MOST = 2  # at once: each takes up to 24 bytes a pixel, a WebP's, while it works, and the engine wants its cores
_LONGEST_S = 30.0  # a slow machine takes 5 s for the largest file that is let in


class Decoders:
    """Each is started when there is work for it, and stays."""

    def __init__(self) -> None:
        self._seconds = _LONGEST_S
        # For those that decode, and as many that start or end.
        self._threads = ThreadPoolExecutor(3 * _MOST, "decoders")
        self._room = asyncio.Semaphore(_MOST)
        self._idle: list[Decoder] = []

    async def decode(self, task: Task, source: bytes) -> Image:
        """Raises `Refusal`."""
        async with self._room:
            answer = await self._answer(task, source)
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def _answer(self, task: Task, source: bytes) -> Image | Refusal:
        decoder, answer = await self._ready(), None
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._thread(decoder.decode, task, source)
        except TimeoutError:
            return Refusal("too_large", f"the image took longer to decode than {self._seconds:g} s.")
        except DecoderDied:
            logger.error("The decoder %d died on an image of %d bytes.", decoder.pid, task.length)
            return Refusal("internal", "the image's decoder died on it; the worker's log says when.")
        finally:
            if answer is not None:
                self._idle.append(decoder)
            else:  # it may still be at work on what nobody waits for
                self._end(decoder)
        return answer

    async def _ready(self) -> Decoder:
        while self._idle:
            decoder = self._idle.pop()
            if decoder.alive:
                return decoder
            self._end(decoder)
        # Off the event loop: with many gigabytes in memory, it takes a moment to start another process.
        starting = self._thread(Decoder)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda started: self._idle.append(started.result()))
            raise

    def _end(self, decoder: Decoder) -> None:
        decoder.kill()
        # Until it has gone a moment passes, or seconds on a machine that swaps.
        self._thread(decoder.close)

    def _thread(self, work: Callable[..., T], *given: Any) -> asyncio.Future[T]:
        """Not a thread of the event loop's own pool, where others would wait for images."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        while self._idle:
            self._idle.pop().close()
