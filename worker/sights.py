"""What a request shows the model: its images, decoded and prepared, and where they are in its prompt."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from schemas.chat import Message
from worker.errors import Refusal
from worker.images.conversation import Images
from worker.images.image import Image
from worker.schedule.sequence import Picture, Sight
from worker.settings import Settings

_KNOWN_BYTES = 300_000_000  # two photos of 12 megapixels, as Qwen's processor prepares them


class Eyes(Protocol):
    """The model's. See `worker.engine.eyes`."""

    def look(self, image: Any, digest: bytes) -> Sight: ...

    def pictures(self, prompt: tuple[int, ...], sights: Sequence[Sight]) -> tuple[Picture, ...]: ...


class Sights:
    """Of a worker with a vision model."""

    def __init__(self, settings: Settings, eyes: Eyes) -> None:
        self._images, self._eyes, self._known = Images(settings), eyes, Known(_KNOWN_BYTES)
        # One at a time, also when jobs are cancelled: for a large image a model's own preprocessing takes seconds, a
        # gigabyte and, now and then, the interpreter's lock. And no thread that others wait for.
        self._looking = ThreadPoolExecutor(1, "looking")

    async def of(self, messages: list[Message]) -> tuple[Sight, ...]:
        """In the order of the conversation. Raises `Refusal` for the first image that is not as it should be."""
        looking, look = asyncio.get_running_loop().run_in_executor, self._look
        return tuple([await looking(self._looking, look, *each) async for each in self._images.of(messages)])

    def _look(self, place: str, image: Image) -> Sight:
        if known := self._known.find(image.digest):
            return known
        try:
            sight = self._eyes.look(image.picture(), image.digest)
        except ValueError as error:
            raise Refusal("invalid_request", f"{place}: the model's own preprocessing refuses it: {error}") from None
        self._known.keep(image.digest, sight)
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


class Known:
    """For one thread: what was seen of images, by their digests, the most recently used ones. The next turn shows them
    again."""

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._nbytes = most, 0
        self._kept = OrderedDict[bytes, Sight]()

    def find(self, digest: bytes) -> Sight | None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
        return self._kept.get(digest)

    def keep(self, digest: bytes, sight: Sight) -> None:
        """One that was not found."""
        if sight.nbytes > self._most:
            return
        self._kept[digest] = sight
        self._nbytes += sight.nbytes
        while self._nbytes > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._nbytes -= oldest.nbytes


def told_from_others(sights: Sequence[Sight]) -> str:
    """Images by URL may be others when a new attempt fetches them: it must not go on after what was said of these."""
    return hashlib.sha256(b"".join(sight.digest for sight in sights)).hexdigest() if sights else ""
