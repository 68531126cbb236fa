"""An image of a request, and how its file is recognized before it is decoded."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.errors import JobFailure

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


MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp", "GIF": "image/gif"}
SUPPORTED = "PNG, JPEG, WebP or GIF"

# Other media types in use for these formats.
_ALIASES = {"image/jpg": "JPEG", "image/pjpeg": "JPEG", "image/x-png": "PNG"}
_DECLARED = {media_type: kind for kind, media_type in MEDIA_TYPES.items()} | _ALIASES

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    # Unsupported formats, so that the error can name them.
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"8BPS", "Photoshop file"),
    (b"%PDF", "PDF"),
)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"hevc": "HEIC", b"mif1": "HEIF"}


def image_format(data: bytes) -> str | None:
    """Return the file format by its first bytes: one of `MEDIA_TYPES`, an unsupported one, or None if unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:12] in _BRANDS:
        return _BRANDS[data[8:12]]
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    # An XML declaration, comments and a doctype may precede the tag.
    start = data[:1_000].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "SVG" if start.startswith((b"<svg", b"<?xml", b"<!")) and b"<svg" in start else None


def declared_kind(media_type: str) -> str | None:
    """Return the format of a media type in lower case; None if it is not supported."""
    return _DECLARED.get(media_type)


def too_long(max_bytes: int) -> JobFailure:
    """Return the error for a file above the limit."""
    return JobFailure("too_large", f"the image's file is longer than this worker accepts ({max_bytes:,} bytes).")
