"""What a request shows the model: its images, decoded and prepared, and where they are in its prompt."""

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from schemas.keys import LANES
from schemas.messages import Message
from worker.errors import Refusal
from worker.images.conversation import Images
from worker.images.image import Image
from worker.schedule.recent import Recent
from worker.schedule.sequence import Lane, Picture, Sight
from worker.settings import Settings

_KNOWN_BYTES = 300_000_000  # two photos of 12 megapixels, as Qwen's processor prepares them


class Eyes(Protocol):
    """The model's. See `worker.engine.eyes`."""

    def look(self, image: Any, digest: bytes) -> Sight: ...

    def pictures(self, prompt: tuple[int, ...], sights: Sequence[Sight]) -> tuple[Picture, ...]: ...


class Sights:
    """Of a worker with a vision model."""

    def __init__(self, settings: Settings, eyes: Eyes) -> None:
        self._images, self._eyes, self._known = Images(settings), eyes, Recent[Sight](_KNOWN_BYTES)
        # Each lane has its own: an offline job may wait long for the engine, and no interactive one waits for it.
        self._ahead: dict[Lane, Ahead] = {lane: Ahead(settings.image_max_pixels) for lane in LANES}
        # One at a time, also when jobs are cancelled: for a large image a model's own preprocessing takes seconds, a
        # gigabyte and, now and then, the interpreter's lock. And no thread that others wait for.
        self._looking = ThreadPoolExecutor(1, "looking")

    async def of(self, messages: list[Message], id: str, lane: Lane, space: str) -> tuple[Sight, ...]:
        """In the order of the conversation. Waits while too much is prepared for others: see `taken_in`. `id`: of the
        job's attempt; `space`: whose images may be known. Raises `Refusal` for the first image that is not as it should
        be."""
        looking, sights = asyncio.get_running_loop().run_in_executor, list[Sight]()
        async for place, image in self._images.of(messages):
            await self._ahead[lane].enter(id, image.width * image.height)
            sights.append(await looking(self._looking, self._look, space, place, image))
        return tuple(sights)

    def taken_in(self, id: str) -> None:
        """By the engine, which counts its images from then on; or the job is over. It may be told more than once."""
        for ahead in self._ahead.values():
            ahead.leave(id)

    def _look(self, space: str, place: str, image: Image) -> Sight:
        if known := self._known.find(space, image.digest):
            return known
        try:
            sight = self._eyes.look(image.picture(), image.digest)
        except ValueError as error:
            raise Refusal("invalid_request", f"{place}: the model's own preprocessing refuses it: {error}") from None
        self._known.keep(space, image.digest, sight)
        return sight

    def placed(self, prompt: tuple[int, ...], sights: Sequence[Sight]) -> tuple[Picture, ...]:
        """In a prompt that has their texts in it. Raises `Refusal`."""
        if not sights:
            return ()
        try:
            return self._eyes.pictures(prompt, sights)
        except ValueError as error:
            raise Refusal("invalid_request", f"messages: {error}.") from None

    def close(self) -> None:
        """None of the worker's jobs may use them any more."""
        self._images.close()
        self._looking.shutdown(wait=False, cancel_futures=True)


class Ahead:
    """Of images for jobs that the engine has not taken in yet: until then nobody else counts what they take."""

    def __init__(self, most: int) -> None:
        """`most`: pixels. The job that came first may have more, so that one can always go on."""
        self._most, self._pixels, self._left = most, dict[str, int](), asyncio.Event()

    async def enter(self, id: str, pixels: int) -> None:
        """With so many more. Waits until there is room."""
        self._pixels.setdefault(id, 0)
        while sum(self._pixels.values()) + pixels > self._most and next(iter(self._pixels)) != id:
            self._left.clear()
            await self._left.wait()
        self._pixels[id] += pixels

    def leave(self, id: str) -> None:
        self._pixels.pop(id, None)
        self._left.set()


def images_digest(sights: Sequence[Sight]) -> str:
    """Images by URL may be others when a new attempt fetches them: it must not go on after what was said of these."""
    return hashlib.sha256(b"".join(sight.digest for sight in sights)).hexdigest() if sights else ""
