"""Prepares a request's images: decodes and preprocesses them, and locates them in the prompt."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from schemas.keys import LANES
from schemas.messages import Message
from worker.errors import JobFailure
from worker.images.conversation import ImageLoader
from worker.images.image import Image
from worker.schedule.recent import ByteLRU
from worker.schedule.request import Lane, ProcessedImage, PromptImage
from worker.settings import Settings

_KNOWN_BYTES = 300_000_000  # two photos of 12 megapixels after Qwen's preprocessing


class ImageProcessor(Protocol):
    """The model's image processor. See `worker.engine.vision.processors`."""

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Preprocess a PIL image. Raises ValueError."""

    def prompt_images(self, prompt: tuple[int, ...], sights: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        """Locate the images in the prompt's tokens. Raises ValueError."""


class ImageInputs:
    """Prepares images for a worker with a vision model."""

    def __init__(self, settings: Settings, eyes: ImageProcessor) -> None:
        self._images, self._eyes, self._known = ImageLoader(settings), eyes, ByteLRU[ProcessedImage](_KNOWN_BYTES)
        # One for each lane: an offline job may wait long for the engine, and must not block interactive jobs.
        self._ahead: dict[Lane, PixelBudget] = {lane: PixelBudget(settings.image_max_pixels) for lane in LANES}
        # A thread of its own, and one image at a time, even if jobs are cancelled: preprocessing a large image takes
        # seconds, a gigabyte of memory and sometimes the interpreter's lock.
        self._looking = ThreadPoolExecutor(1, "looking")

    async def of(self, messages: list[Message], id: str, lane: Lane, space: str) -> tuple[ProcessedImage, ...]:
        """Return the processed images in the order of the conversation.

        Waits while too many pixels are prepared for other jobs: see `release`. `id`: the id of the job's attempt.
        `space`: the cache namespace. Raises `JobFailure` for the first invalid image.
        """
        looking, sights = asyncio.get_running_loop().run_in_executor, list[ProcessedImage]()
        async for place, image in self._images.of(messages):
            await self._ahead[lane].enter(id, image.width * image.height)
            sights.append(await looking(self._looking, self._look, space, place, image))
        return tuple(sights)

    def release(self, id: str) -> None:
        """Release the attempt's pixels, because the engine has admitted it or it has ended. May be repeated."""
        for ahead in self._ahead.values():
            ahead.leave(id)

    def _look(self, space: str, place: str, image: Image) -> ProcessedImage:
        if known := self._known.get(space, image.digest):
            return known
        try:
            sight = self._eyes.preprocess(image.picture(), image.digest)
        except ValueError as error:
            raise JobFailure("invalid_request", f"{place}: the model's image processor refuses it: {error}") from None
        self._known.put(space, image.digest, sight)
        return sight

    def placed(self, prompt: tuple[int, ...], sights: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        """Locate the images in a prompt that holds their texts. Raises `JobFailure`."""
        if not sights:
            return ()
        try:
            return self._eyes.prompt_images(prompt, sights)
        except ValueError as error:
            raise JobFailure("invalid_request", f"messages: {error}.") from None

    def close(self) -> None:
        """Stop loading and preprocessing. No job may use this object any more."""
        self._images.close()
        self._looking.shutdown(wait=False, cancel_futures=True)


class PixelBudget:
    """Limits the pixels of images that wait for the engine, which does not count their memory before admission."""

    def __init__(self, most: int) -> None:
        """`most`: the limit in pixels. The oldest job may exceed it, so that one job can always proceed."""
        self._most, self._pixels, self._left = most, dict[str, int](), asyncio.Event()

    async def enter(self, id: str, pixels: int) -> None:
        """Add pixels to the job's share. Waits until the limit allows it."""
        self._pixels.setdefault(id, 0)
        while sum(self._pixels.values()) + pixels > self._most and next(iter(self._pixels)) != id:
            self._left.clear()
            await self._left.wait()
        self._pixels[id] += pixels

    def leave(self, id: str) -> None:
        """Remove all of the job's pixels."""
        self._pixels.pop(id, None)
        self._left.set()


def images_digest(sights: Sequence[ProcessedImage]) -> str:
    """Return a digest of all images; empty without images.

    A URL may serve another image to a later attempt, which then must not continue the answer to this one.
    """
    return hashlib.sha256(b"".join(sight.digest for sight in sights)).hexdigest() if sights else ""
