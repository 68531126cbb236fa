"""Files of images, whole and odd, and what their pixels are."""

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

import PIL.Image
from PIL.Image import Image as Picture

from worker.errors import JobFailure
from worker.images.decode import decode
from worker.images.image import Image

Pixel = tuple[int, int, int]
WHITE, BLACK, RED, GREEN, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)


def grid(rows: list[list[Pixel]]) -> Picture:
    picture = PIL.Image.new("RGB", (len(rows[0]), len(rows)))
    picture.putdata([pixel for row in rows for pixel in row])
    return picture


def patch(width: int = 24, height: int = 16) -> Picture:
    """No two of its pixels are alike, up to 256 by 256."""
    return grid([[(x, y, (x * y) % 256) for x in range(width)] for y in range(height)])


def saved(picture: Picture, format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def chunk(type: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + type + data + struct.pack(">I", zlib.crc32(type + data))


def png(width: int, height: int, depth: int, color: int, rows: list[bytes], *chunks: bytes) -> bytes:
    """Written by hand, since Pillow writes few of the kinds. `color`: 0 gray, 2 RGB, 3 palette, 4 and 6 with alpha."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"".join([b"\x89PNG\r\n\x1a\n", header, *chunks, body, chunk(b"IEND", b"")])


def with_chunk(file: bytes, type: bytes, data: bytes) -> bytes:
    """A PNG with one more chunk, behind its header."""
    return file[:33] + chunk(type, data) + file[33:]


def data_url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def read(file: bytes, **options: Any) -> Image:
    return decode(file, **{"max_pixels": 1_000_000, **options})


def rows_of(image: Image) -> list[list[Pixel]]:
    values = iter(image.to_pillow().tobytes())
    flat = list(zip(values, values, values, strict=True))
    return [flat[at : at + image.width] for at in range(0, len(flat), image.width)]


def refused(file: bytes, **options: Any) -> tuple[str, str]:
    try:
        image = read(file, **options)
    except JobFailure as refusal:
        return refusal.type, refusal.message
    raise AssertionError(f"it was read: {image}")
