"""What a processor of a vision model gets."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an extra, with the models that need it
    import PIL.Image


@dataclass(frozen=True, slots=True)
class Image:
    """Upright, opaque, RGB. Two that look the same are equal, whatever files they came in."""

    width: int
    height: int
    digest: bytes  # of the size and the pixels: a key for what is computed from them
    pixels: bytes = field(repr=False, compare=False)  # 3 a pixel, from the upper left, line by line

    @classmethod
    def of(cls, width: int, height: int, pixels: bytes) -> "Image":
        # SHA-256, since whoever can make two images with one digest is shown what was said of another's.
        digest = hashlib.sha256(f"{width}x{height}:".encode())
        digest.update(pixels)
        return cls(width, height, digest.digest(), pixels)

    def picture(self) -> "PIL.Image.Image":
        """A new one with each call, which takes 4 bytes a pixel."""
        import PIL.Image

        return PIL.Image.frombytes("RGB", (self.width, self.height), self.pixels)
