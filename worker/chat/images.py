"""Prepares a request's images: decodes and preprocesses them, and locates them in the prompt."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from schemas.messages import Message
from sluice.contract.keys import LANES, Lane
from worker.byte_lru import ByteLRU
from worker.errors import JobFailure
from worker.images.conversation import REQUEST_FACTOR, ImageLoader
from worker.images.image import Image
from worker.request import ProcessedImage, PromptImage
from worker.settings import Settings


class _Preprocessor(Protocol):
    """The model's image processor. See `worker.engine.vision.families`."""

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        """Preprocess a PIL image. Raises ValueError."""

    def prompt_images(self, prompt: tuple[int, ...], images: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        """Locate the images in the prompt's tokens. Raises ValueError."""


class ImageInputs:
    """Prepares images for a worker with a vision model."""

    def __init__(self, settings: Settings, processor: _Preprocessor) -> None:
        self._loader, self._processor = ImageLoader(settings), processor
        self._max_prepared_pixels = REQUEST_FACTOR * settings.image_max_pixels
        self._cache = ByteLRU[ProcessedImage](300_000_000)  # two photos of 12 megapixels after Qwen's preprocessing
        # One for each lane: an offline job may wait long for the engine, and must not block interactive jobs.
        self._budgets: dict[Lane, PixelBudget] = {lane: PixelBudget(settings.image_max_pixels) for lane in LANES}
        # A thread of its own, and one image at a time, even if jobs are cancelled: preprocessing a large image takes
        # seconds, a gigabyte of memory and sometimes the interpreter's lock.
        self._thread = ThreadPoolExecutor(1, "preprocess")

    async def process(self, messages: list[Message], id: str, lane: Lane, namespace: str) -> tuple[ProcessedImage, ...]:
        """Return the processed images in the order of the conversation.

        Waits while too many pixels are prepared for other jobs: see `release`. `id`: the id of the job's attempt.
        `namespace`: of the cache. Raises `JobFailure` for the first invalid image.
        """
        run = asyncio.get_running_loop().run_in_executor
        processed, total = list[ProcessedImage](), 0
        async for place, image in self._loader.load(messages):
            pixels = image.width * image.height
            await self._budgets[lane].acquire(id, pixels)
            processed.append(await run(self._thread, self._preprocess, namespace, place, image))
            prepared = processed[-1].nbytes // 12  # bytes of a pixel: three channels in float32
            # A processor enlarges what is smaller than its model needs: hundreds of icons may be gigabytes.
            await self._budgets[lane].acquire(id, max(0, prepared - pixels))
            total += prepared
            if total > self._max_prepared_pixels:
                raise _too_many_pixels(place, self._max_prepared_pixels)
        return tuple(processed)

    def release(self, id: str) -> None:
        """Release the attempt's pixels, because the engine has admitted it or it has ended. May be repeated."""
        for budget in self._budgets.values():
            budget.release(id)

    def _preprocess(self, namespace: str, place: str, image: Image) -> ProcessedImage:
        if cached := self._cache.get(namespace, image.digest):
            return cached
        try:
            processed = self._processor.preprocess(image.to_pillow(), image.digest)
        except ValueError as error:
            message = f"{place}: the model's image processor refuses it: {error}"
            raise JobFailure("invalid_request", message, param=place) from None
        self._cache.put(namespace, image.digest, processed)
        return processed

    def locate(self, prompt: tuple[int, ...], images: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        """Locate the images in a prompt that holds their texts. Raises `JobFailure`."""
        if not images:
            return ()
        try:
            return self._processor.prompt_images(prompt, images)
        except ValueError as error:
            raise JobFailure("invalid_request", f"messages: {error}.", param="messages") from None

    def close(self) -> None:
        """Stop loading and preprocessing. No job may use this object any more."""
        self._loader.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _too_many_pixels(place: str, limit: int) -> JobFailure:
    message = (
        f"{place}: with this image the request's images, as this model prepares them, have more than {limit:,} pixels; "
        "leave the oldest out."
    )
    return JobFailure("too_large", message, param=place)


class PixelBudget:
    """Limits the pixels of images that wait for the engine, which does not count their memory before admission."""

    def __init__(self, limit: int) -> None:
        """`limit`: the limit in pixels. The oldest job may exceed it, so that one job can always proceed."""
        self._limit = limit
        self._pixels = dict[str, int]()
        self._released = asyncio.Event()

    async def acquire(self, id: str, pixels: int) -> None:
        """Add pixels to the job's share. Waits until the limit allows it."""
        self._pixels.setdefault(id, 0)
        while sum(self._pixels.values()) + pixels > self._limit and next(iter(self._pixels)) != id:
            self._released.clear()
            await self._released.wait()
        self._pixels[id] += pixels

    def release(self, id: str) -> None:
        """Remove all of the job's pixels."""
        self._pixels.pop(id, None)
        self._released.set()


def images_digest(images: Sequence[ProcessedImage]) -> str:
    """Return a digest of all images; empty without images.

    A URL may serve another image to a later attempt, which then must not continue the answer to this one.
    """
    return hashlib.sha256(b"".join(image.digest for image in images)).hexdigest() if images else ""
