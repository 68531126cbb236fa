"""Images as a model's own processor prepares them. Nothing here computes with MLX, so any thread may do it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from worker.schedule.sequence import Picture

Detail = Literal["auto", "low", "high"]

_LOW = 512  # pixels a side at most, as OpenAI has it


class Image(Protocol):
    """Pillow's, in RGB."""

    @property
    def size(self) -> tuple[int, int]: ...

    def tobytes(self) -> bytes: ...

    def resize(self, size: tuple[int, int]) -> "Image": ...


@dataclass(frozen=True, slots=True)
class Sight:
    """One image."""

    digest: bytes
    text: str  # what the template's marker for an image becomes
    tokens: int  # the placeholders in it
    seen: Any  # see `Picture`


class Eyes:
    """A worker has one pair."""

    def __init__(self, processor: Any, placeholder: int) -> None:
        self._processor, self._placeholder = processor, placeholder
        self.marker: str = processor.image_token  # an image, in the template's text

    def look(self, image: Image, detail: Detail = "auto") -> Sight:
        """Takes its time. Raises ValueError for an image that the model's processor does not take."""
        if detail == "low":
            image = _smaller(image)
        seen = self._processor.image_processor(images=[image])
        patches = int(seen["image_grid_thw"].prod())
        tokens = patches // self._processor.image_processor.merge_size**2
        return Sight(_digest(image), self.marker * tokens, tokens, seen)

    def pictures(self, prompt: tuple[int, ...], sights: Sequence[Sight]) -> tuple[Picture, ...]:
        """Where they are in a prompt that has their texts in it. Raises ValueError where it has other placeholders."""
        pictures, at = list[Picture](), 0
        for sight in sights:
            start = prompt.index(self._placeholder, at)
            at = start + sight.tokens
            pictures.append(Picture(sight.digest, (start, at), sight.seen))
        if prompt.count(self._placeholder) != sum(sight.tokens for sight in sights):
            raise ValueError("the prompt has room for other images than these")
        return tuple(pictures)


def _smaller(image: Image) -> Image:
    width, height = image.size
    scale = min(1.0, _LOW / max(width, height))
    return image if scale == 1.0 else image.resize((max(1, round(scale * width)), max(1, round(scale * height))))


def _digest(image: Image) -> bytes:
    width, height = image.size
    return hashlib.blake2b(f"{width}x{height}".encode() + image.tobytes(), digest_size=32).digest()
