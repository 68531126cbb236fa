"""The decoded image that a vision model's processor receives."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional extra, installed for vision models
    import PIL.Image


@dataclass(frozen=True, slots=True)
class Image:
    """An upright, opaque RGB image. Images with the same pixels are equal, even from different files."""

    width: int
    height: int
    digest: bytes  # hash of size and pixels: the key for everything computed from them
    pixels: bytes = field(repr=False, compare=False)  # 3 bytes each, row by row from the upper left

    @classmethod
    def of(cls, width: int, height: int, pixels: bytes) -> "Image":
        """Return an image with its digest. `pixels`: 3 bytes each, row by row from the upper left."""
        # SHA-256: with colliding digests, a client could receive results computed from another client's image.
        digest = hashlib.sha256(f"{width}x{height}:".encode())
        digest.update(pixels)
        return cls(width, height, digest.digest(), pixels)

    def to_pillow(self) -> "PIL.Image.Image":
        """Return a new Pillow image with a copy of the pixels, 4 bytes each."""
        import PIL.Image

        return PIL.Image.frombytes("RGB", (self.width, self.height), self.pixels)
