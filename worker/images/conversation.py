"""Prepares the images of a conversation: loads, decodes and preprocesses them, and locates them in the prompt."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from schemas.messages import ImagePart, ImageUrl, Message
from sluice.contract.keys import LANES, Lane
from worker.byte_lru import ByteLRU
from worker.errors import JobFailure
from worker.images.image import Image
from worker.process.child import ChildFailed, Children
from worker.process.frames import FrameLimits, LimitExceeded
from worker.request import ProcessedImage, PromptImage
from worker.settings import Settings

if TYPE_CHECKING:
    from worker.images.fetch import Fetcher

logger = logging.getLogger("sluice.images")

_LONGEST_S = 30  # a slow machine takes 5 s for the largest accepted file


class Decoders:
    """A bounded pool of child processes that decode images, shared by all jobs. For the event loop's thread.

    A thread would not do: decoding a large WebP holds the interpreter's lock for tens of milliseconds, which the
    engine's thread needs; a thread that takes minutes for a malicious file cannot be stopped; and a crash in a
    decoder's C code would end every job of the worker."""

    def __init__(self) -> None:
        self._timeout_s: float = _LONGEST_S
        self._children = Children("worker.images.decode", most=2, reused=True)  # they compete with the engine for cores

    async def decode(self, source: bytes, *, is_url: bool, max_bytes: int, max_pixels: int, low: bool) -> Image:
        """Decode an image in a process of the pool; waits for a free one. Raises `JobFailure` for an invalid image, one
        that takes too long, or a crash of the decoder.

        `is_url`: the source is a data: URL, not a file. `max_bytes`: of the file. `low`: reduce it to `detail: low`.
        """
        task = {"is_url": is_url, "max_bytes": max_bytes, "max_pixels": max_pixels, "low": low}
        # 64 bytes of address space for each pixel: decoding a WebP takes 24.
        memory = (1 << 30) + 64 * max_pixels + 4 * len(source)
        try:
            answer = await self._children.ask(task, source, FrameLimits(_LONGEST_S, memory, self._timeout_s))
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


# A request's images together may have this many times the pixels of one: preprocessed, they wait in memory.
REQUEST_FACTOR = 4


class ImageLoader:
    """Loads the images of requests: fetches, decodes and limits them. One per worker, for the event loop's thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._decoders = Decoders()
        self._fetcher = _fetcher(settings.image_max_bytes) if settings.image_urls else None

    async def load(self, messages: list[Message]) -> AsyncIterator[tuple[str, Image]]:
        """Yield each image with its place, in the order of the conversation, which is also that of the prompt. Each is
        loaded when the caller asks for it, so that no request takes more than its share of memory and decoders. Raises
        `JobFailure` at the first image that is invalid or exceeds a limit."""
        placed = list(images_of(messages))
        self._refuse_too_many([place for place, _ in placed])
        pixels, limit = 0, REQUEST_FACTOR * self._settings.image_max_pixels
        for place, url in placed:
            image = await self._load(place, url)
            pixels += image.width * image.height
            if pixels > limit:
                raise JobFailure(
                    "too_large",
                    f"{place}: with this image the request's images have more than {limit:,} pixels; leave the "
                    "oldest out, or send smaller ones.",
                    param=place,
                )
            yield place, image

    def _refuse_too_many(self, places: Sequence[str]) -> None:
        images, limit = len(places), self._settings.max_images
        if images > limit:
            message = (
                f"messages: {images:,} images are {images - limit:,} more than this worker accepts ({limit:,}); "
                "leave the oldest out."
            )
            raise JobFailure("too_large", message, param=places[limit])

    async def _load(self, place: str, image: ImageUrl) -> Image:
        try:
            return await self._decode(image)
        except JobFailure as refusal:
            message = f"{place}: {refusal.message}"
            raise JobFailure(refusal.type, message, retryable=refusal.retryable, param=place) from None

    async def _decode(self, image: ImageUrl) -> Image:
        is_data = image.url[: len("data:")].lower() == "data:"
        if is_data:
            source = image.url.encode()
        elif self._fetcher is None:
            raise JobFailure("unsupported", "this worker accepts only data: URLs.")
        else:
            source = await self._fetcher.fetch(image.url)
        return await self._decoders.decode(
            source,
            is_url=is_data,
            max_bytes=self._settings.image_max_bytes,
            max_pixels=self._settings.image_max_pixels,
            low=image.detail == "low",
        )

    def close(self) -> None:
        """End the decoder processes and release the threads. No job may be using them."""
        self._decoders.close()
        if self._fetcher:
            self._fetcher.close()


def _fetcher(max_bytes: int) -> "Fetcher":
    from worker.images.fetch import Fetcher  # with an HTTP client, which no other worker needs

    return Fetcher(max_bytes)


def images_of(messages: list[Message]) -> Iterator[tuple[str, ImageUrl]]:
    """Yield the images in these messages, in order, each with its place for error messages."""
    for at, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield f"messages[{at}].content[{index}].image_url", part.image_url


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
