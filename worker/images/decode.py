"""Bytes to pixels. Runs in a process of its own: see `worker.images.decoder`."""

import struct
from io import BytesIO

from PIL import Image as Pillow
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from worker.errors import Refusal
from worker.images.files import READ, THEM, declared_kind, kind_of
from worker.images.image import Image

LOW = 512  # pixels: OpenAI's side for `detail: low`
# Qwen's processors go no further, and nobody sees anything on such a strip.
_SLIMMEST = 200
# A progressive JPEG of 25 megapixels takes 40 ms for each scan, and an empty one has 42 bytes. Encoders make ten.
_MOST_SCANS = 100

# What Pillow raises for damaged files; found by damaging files. An AssertionError: of a palette that is missing.
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
    """Raises `Refusal`. `declared`: the media type that the file should be of; None where nobody said. `low`: in no
    more detail than `detail: low` asks for. Profiles of colours are not read: a pixel is what the file says."""
    kind = _kind(data, declared)
    try:
        with Pillow.open(BytesIO(data), formats=[kind]) as file:
            _refuse_by_header(file, kind, data, max_pixels)
            picture = _upright(_opaque(file, kind, data), file)
    except Pillow.DecompressionBombError:  # Pillow's own limit; ours is below it
        raise Refusal("too_large", f"the image has more pixels than this worker takes, {max_pixels:,}.") from None
    except _DAMAGED:
        raise Refusal("invalid_request", f"the image, a {kind}, is damaged, cut off or empty.") from None
    if low:
        picture.thumbnail((LOW, LOW), Pillow.Resampling.LANCZOS, reducing_gap=None)
    return Image.of(*picture.size, picture.tobytes())


def _kind(data: bytes, declared: str | None) -> str:
    if not data:
        raise Refusal("invalid_request", "the image is empty.")
    kind = kind_of(data)
    if kind is None:
        raise Refusal("invalid_request", f"this is not an image; send {THEM}.")
    if kind not in READ:
        raise Refusal("unsupported", f"{kind} is not read; send {THEM}.")
    if declared is not None and declared_kind(declared) != kind:
        said = f"declares {declared!r}" if declared else "declares no media type"
        raise Refusal("invalid_request", f"the data: URL {said}, and holds a {kind}; write {READ[kind]}.")
    return kind


def _refuse_by_header(file: ImageFile, kind: str, data: bytes, max_pixels: int) -> None:
    """Before anything is decoded."""
    width, height = file.size
    if width * height > max_pixels:
        size = f"{width * height:,} pixels ({width:,} × {height:,})"
        raise Refusal("too_large", f"the image has {size}, and this worker takes {max_pixels:,}.")
    if max(width, height) > _SLIMMEST * min(width, height):
        raise Refusal("invalid_request", f"the image is {width:,} × {height:,}: more than {_SLIMMEST} to 1.")
    if kind == "JPEG":  # a second picture in it is a preview or a depth map, no frame
        if data.count(b"\xff\xda") > _MOST_SCANS:
            raise Refusal("too_large", f"the image, a JPEG, is made of more than {_MOST_SCANS} scans.")
    elif isinstance(file, PngImageFile | WebPImageFile | GifImageFile) and file.is_animated:
        raise Refusal("unsupported", f"the image, a {kind}, is animated; send one of its frames.")


def _opaque(file: ImageFile, kind: str, data: bytes) -> Pillow.Image:
    """RGB; over white, where one can see through it."""
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
    """The one gray or colour that is transparent has as many bits as the file's samples; Pillow's pixels have 8."""
    key = file.info.get("transparency")
    if key is None or file.mode not in ("L", "RGB", "I;16"):
        return  # a palette's are not colours but their numbers
    if depth > 8:
        raise Refusal("unsupported", "the image, a PNG, has 16 bits a sample and a transparent colour; send 8 bits.")
    if file.mode == "L":
        file.info["transparency"] = key * 255 // (2**depth - 1)


def _upper_bytes(file: ImageFile) -> Pillow.Image:
    """Pillow's own conversion from 16 bits would make all but the darkest pixels white."""
    return Pillow.frombytes("L", file.size, file.tobytes()[1::2])


def _upright(picture: Pillow.Image, file: ImageFile) -> Pillow.Image:
    """As the camera was held."""
    try:
        turn = _UPRIGHT.get(file.getexif().get(Base.Orientation, 1))
    except _DAMAGED:  # what is said about an image is no part of it
        return picture
    return picture if turn is None else picture.transpose(turn)
