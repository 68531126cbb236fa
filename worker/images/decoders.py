"""The pool of decoder processes, shared by all jobs."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from worker.errors import JobFailure
from worker.images.decoder import Decoder, DecoderDied, DecodeRequest
from worker.images.image import Image

logger = logging.getLogger("sluice.images")

T = TypeVar("T")

_MAX_DECODERS = 2  # each uses up to 24 bytes per pixel (WebP), and competes with the engine for cores
_LONGEST_S = 30.0  # a slow machine takes 5 s for the largest accepted file


class Decoders:
    """A bounded pool. Processes are started on demand and reused. For the event loop's thread."""

    def __init__(self) -> None:
        self._timeout_s = _LONGEST_S
        # For each decoder one that decodes, one that starts and one that ends.
        self._threads = ThreadPoolExecutor(3 * _MAX_DECODERS, "decoders")
        self._free = asyncio.Semaphore(_MAX_DECODERS)
        self._idle: list[Decoder] = []

    async def decode(self, task: DecodeRequest, source: bytes) -> Image:
        """Decode an image in a process of the pool; waits for a free one. Raises `JobFailure` for an invalid image, a
        timeout, or a crash of the decoder."""
        async with self._free:
            answer = await self._answer(task, source)
        if isinstance(answer, JobFailure):
            raise answer
        return answer

    async def _answer(self, task: DecodeRequest, source: bytes) -> Image | JobFailure:
        decoder, answer = await self._ready(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._thread(decoder.decode, task, source)
        except TimeoutError:
            return JobFailure("too_large", f"the image took longer to decode than {self._timeout_s:g} s.")
        except DecoderDied:
            logger.error("decoder process %d died on an image of %d bytes", decoder.pid, task.length)
            return JobFailure("internal", "the image's decoder crashed; the worker's log has its process id.")
        finally:
            if answer is not None:
                self._idle.append(decoder)
            else:  # it may still be decoding an image that is no longer wanted
                self._end(decoder)
        return answer

    async def _ready(self) -> Decoder:
        while self._idle:
            decoder = self._idle.pop()
            if decoder.alive:
                return decoder
            self._end(decoder)
        # Off the event loop: starting a process takes a while if the worker holds many gigabytes.
        starting = self._thread(Decoder)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda started: self._idle.append(started.result()))
            raise

    def _end(self, decoder: Decoder) -> None:
        decoder.kill()
        # Off the event loop: ending takes a moment, or seconds on a machine that swaps.
        self._thread(decoder.close)

    def _thread(self, work: Callable[..., T], *given: Any) -> asyncio.Future[T]:
        """Run in the pool's own threads, so that other users of the event loop's threads do not wait for images."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *given)

    def close(self) -> None:
        """End idle processes and release the threads. Blocks until the processes have ended. No image may be
        decoding."""
        self._threads.shutdown(wait=False)
        while self._idle:
            self._idle.pop().close()
