"""What a request shows the model: its images, decoded and prepared, and where they are in its prompt."""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from schemas.chat import Message
from worker.errors import Refusal
from worker.images.conversation import Images, shown_in
from worker.images.image import Image
from worker.schedule.sequence import Picture, Sight
from worker.settings import Settings


class Eyes(Protocol):
    """The model's. See `worker.engine.eyes`."""

    def look(self, image: Any, digest: bytes) -> Sight: ...

    def pictures(self, prompt: tuple[int, ...], sights: Sequence[Sight]) -> tuple[Picture, ...]: ...


class Sights:
    """Of a worker with a vision model."""

    def __init__(self, settings: Settings, eyes: Eyes) -> None:
        self._images, self._eyes = Images(settings), eyes

    async def of(self, messages: list[Message]) -> tuple[Sight, ...]:
        """In the order of the conversation. Raises `Refusal` for the first image that is not as it should be."""
        images, places = await self._images.of(messages), [shown.place for shown in shown_in(messages)]
        # One after another, and not on the event loop: a model's own preprocessing of a large image takes a second.
        return tuple([await asyncio.to_thread(self._look, *each) for each in zip(images, places, strict=True)])

    def _look(self, image: Image, place: str) -> Sight:
        try:
            return self._eyes.look(image.picture(), image.digest)
        except ValueError as error:
            raise Refusal("invalid_request", f"{place}: the model's own preprocessing refuses it: {error}") from None

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


def told_from_others(sights: Sequence[Sight]) -> str:
    """Images by URL may be others when a new attempt fetches them: it must not go on after what was said of these."""
    return hashlib.sha256(b"".join(sight.digest for sight in sights)).hexdigest() if sights else ""
