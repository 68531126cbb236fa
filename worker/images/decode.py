"""Decode image files to pixels. Runs in its own process: see `worker.images.conversation`."""

import binascii
import struct
import warnings
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes

from PIL import Image as Pillow
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from worker.errors import JobFailure
from worker.images.image import MEDIA_TYPES, SUPPORTED, Image, declared_kind, image_format, too_long
from worker.process.frames import Send, handle_frames

# Errors that Pillow raises for damaged files, found by damaging files. AssertionError: for a missing palette.
_DAMAGED = (OSError, SyntaxError, ValueError, LookupError, TypeError, EOFError, struct.error, AssertionError)

_UPRIGHT = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}


def decode(data: bytes, *, max_pixels: int, declared: str | None = None, low: bool = False) -> Image:
    """Decode a file to an upright, opaque RGB image. `declared`: the media type that the file must have; None for
    any. `low`: reduce it to the resolution of `detail: low`. Colour profiles are ignored: samples are taken as they
    are. Blocks. Raises `JobFailure`."""
    kind = _kind(data, declared)
    try:
        with Pillow.open(BytesIO(data), formats=[kind]) as file:
            _refuse_by_header(file, kind, data, max_pixels)
            picture = _upright(_opaque(file, kind, data), file)
    except Pillow.DecompressionBombError:  # Pillow's own limit, above ours
        raise JobFailure("too_large", f"the image has more pixels than this worker accepts ({max_pixels:,}).") from None
    except _DAMAGED:
        raise JobFailure("invalid_request", f"the image, a {kind}, is damaged, truncated or empty.") from None
    if low:
        # In pixels: OpenAI's side for `detail: low`.
        picture.thumbnail((512, 512), Pillow.Resampling.LANCZOS, reducing_gap=None)
    return Image.of(*picture.size, picture.tobytes())


def _kind(data: bytes, declared: str | None) -> str:
    if not data:
        raise JobFailure("invalid_request", "the image is empty.")
    kind = image_format(data)
    if kind is None:
        raise JobFailure("invalid_request", f"this is not an image; send {SUPPORTED}.")
    if kind not in MEDIA_TYPES:
        raise JobFailure("unsupported", f"{kind} is not supported; send {SUPPORTED}.")
    if declared is not None and declared_kind(declared) != kind:
        declaration = f"declares {declared!r}" if declared else "declares no media type"
        raise JobFailure(
            "invalid_request", f"the data: URL {declaration}, but contains a {kind}; write {MEDIA_TYPES[kind]}."
        )
    return kind


def _refuse_by_header(file: ImageFile, kind: str, data: bytes, max_pixels: int) -> None:
    """Check size, shape and number of frames before anything is decoded. Raises `JobFailure`."""
    width, height = file.size
    if width * height > max_pixels:
        size = f"{width * height:,} pixels ({width:,} × {height:,})"
        raise JobFailure("too_large", f"the image has {size}; this worker accepts {max_pixels:,}.")
    if max(width, height) > 200 * min(width, height):  # the limit of Qwen's processors
        raise JobFailure(
            "invalid_request", f"the image is {width:,} × {height:,}; its sides may differ by a factor of 200."
        )
    if kind == "JPEG":  # a second image in the file is a preview or a depth map, not a frame
        # Each scan of a progressive JPEG of 25 megapixels takes 40 ms to decode, and can be 42 bytes. Encoders write
        # ten.
        if data.count(b"\xff\xda") > 100:
            raise JobFailure("too_large", "the image, a JPEG, has more than 100 scans.")
    elif isinstance(file, PngImageFile | WebPImageFile | GifImageFile) and file.is_animated:
        raise JobFailure("unsupported", f"the image, a {kind}, is animated; send one of its frames.")


def _opaque(file: ImageFile, kind: str, data: bytes) -> Pillow.Image:
    """Return the image as RGB, on white if it has transparency."""
    drawn = file.tile[0].extents if kind == "GIF" else None  # a frame may be smaller than the image
    if kind == "PNG":
        _read_key(file, depth=data[24])
    if file.mode == "I;16":
        return _upper_bytes(file).convert("RGB")
    clear = file.has_transparency_data
    picture = file.convert("RGBA" if clear else "RGB")
    if not clear and drawn in (None, (0, 0, *picture.size)):
        return picture
    over = Pillow.new("RGB", picture.size, "white")
    part = picture.crop(drawn) if drawn else picture
    over.paste(part, drawn, mask=part if clear else None)
    return over


def _read_key(file: ImageFile, *, depth: int) -> None:
    """Scale the transparent colour or gray to Pillow's 8 bits; the file stores it with the bits of its samples."""
    key = file.info.get("transparency")
    if key is None or file.mode not in ("L", "RGB", "I;16"):
        return  # with a palette the key is an index, not a colour
    if depth > 8:
        raise JobFailure(
            "unsupported", "the image, a PNG, has 16 bits per sample and a transparent colour; send 8 bits per sample."
        )
    if file.mode == "L":
        file.info["transparency"] = key * 255 // (2**depth - 1)


def _upper_bytes(file: ImageFile) -> Pillow.Image:
    """Return the upper byte of each 16-bit sample. Pillow's own conversion would turn all but the darkest pixels
    white."""
    return Pillow.frombytes("L", file.size, file.tobytes()[1::2])


def _upright(picture: Pillow.Image, file: ImageFile) -> Pillow.Image:
    """Rotate or flip by the EXIF orientation."""
    try:
        turn = _UPRIGHT.get(file.getexif().get(Base.Orientation, 1))
    except _DAMAGED:  # unreadable metadata does not make the image unreadable
        return picture
    return picture if turn is None else picture.transpose(turn)


_SPACE = b" \t\r\n\f"


def read_data_url(url: bytes) -> tuple[str, bytes]:
    """Return the declared media type, in lower case and possibly empty, and the data. Raises `JobFailure`."""
    head, comma, body = url.partition(b",")
    if not comma:
        raise JobFailure("invalid_request", "the data: URL has no comma before its data.")
    media_type, *parameters = (each.strip() for each in head[len("data:") :].lower().split(b";"))
    if len(media_type) > 100 or not media_type.isascii():  # a longer one is not repeated in an error
        raise JobFailure("invalid_request", "the data: URL must begin with a media type, such as image/png.")
    data = unquote_to_bytes(body) if b"%" in body else body
    return media_type.decode(), _from_base64(data) if b"base64" in parameters[-1:] else data


def _from_base64(text: bytes) -> bytes:
    """Decode base64. As in browsers, whitespace and missing padding are accepted; any other character is refused."""
    text = text.translate(None, _SPACE)
    try:
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error:
        raise JobFailure("invalid_request", "the data: URL is not valid base64 after its comma.") from None


def send_pixels(task: dict[str, Any], source: bytes, send: Send) -> None:
    """Decode an image, and send its pixels. `task`: the arguments of `Decoders.decode`. Raises `JobFailure`."""
    image = _image(source, **task)
    send({"width": image.width, "height": image.height, "digest": image.digest.hex()}, image.pixels)


def _image(source: bytes, *, is_url: bool, max_bytes: int, max_pixels: int, low: bool) -> Image:
    declared, data = read_data_url(source) if is_url else (None, source)
    if len(data) > max_bytes:
        raise too_long(max_bytes)
    return decode(data, max_pixels=max_pixels, declared=declared, low=low)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Pillow's, about irregular files
    handle_frames(send_pixels)
