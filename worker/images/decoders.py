"""Decodes images in child processes.

A thread would not do: decoding a large WebP holds the interpreter's lock for tens of milliseconds, which the engine's
thread needs; a thread that takes minutes for a malicious file cannot be stopped; and a crash in a decoder's C code
would end every job of the worker."""

import logging

from worker.errors import JobFailure
from worker.images.image import Image
from worker.process.child import ChildFailed, Children
from worker.process.frames import LimitExceeded, Limits

logger = logging.getLogger("sluice.images")

_MAX_DECODERS = 2  # they compete with the engine for cores
_LONGEST_S = 30  # a slow machine takes 5 s for the largest accepted file
_PIXEL_BYTES = 64  # of address space for each pixel; decoding a WebP takes 24
_BASE_BYTES = 1 << 30


class Decoders:
    """A bounded pool of processes, shared by all jobs. For the event loop's thread."""

    def __init__(self) -> None:
        self._timeout_s: float = _LONGEST_S
        self._children = Children("worker.images", _MAX_DECODERS, reused=True)

    async def decode(self, source: bytes, *, is_url: bool, max_bytes: int, max_pixels: int, low: bool) -> Image:
        """Decode an image in a process of the pool; waits for a free one. Raises `JobFailure` for an invalid image, one
        that takes too long, or a crash of the decoder.

        `is_url`: the source is a data: URL, not a file. `max_bytes`: of the file. `low`: reduce it to `detail: low`.
        """
        task = {"is_url": is_url, "max_bytes": max_bytes, "max_pixels": max_pixels, "low": low}
        memory = _BASE_BYTES + _PIXEL_BYTES * max_pixels + 4 * len(source)
        try:
            answer = await self._children.ask(task, source, Limits(_LONGEST_S, memory, self._timeout_s))
        except TimeoutError:
            raise JobFailure("too_large", f"the image took longer to decode than {self._timeout_s:g} s.") from None
        except LimitExceeded:
            raise JobFailure("too_large", "the image takes too much time or memory to decode.") from None
        except ChildFailed as error:
            logger.error("an image of %d bytes: %s", len(source), error)
            raise JobFailure("internal", "the image's decoder crashed; the worker's log has its process id.") from None
        return Image(
            answer.head["width"], answer.head["height"], bytes.fromhex(answer.head["digest"]), pixels=answer.body
        )

    def close(self) -> None:
        """End idle processes and release the threads. Blocks until the processes have ended. No image may be
        decoding."""
        self._children.close()
