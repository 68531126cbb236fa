"""What is known of an image's file before it is decoded."""

from worker.errors import Refusal

READ = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp", "GIF": "image/gif"}
THEM = "PNG, JPEG, WebP or GIF"

# What else names them in the wild.
_ALIASES = {"image/jpg": "JPEG", "image/pjpeg": "JPEG", "image/x-png": "PNG"}
_DECLARED = {media_type: kind for kind, media_type in READ.items()} | _ALIASES

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    # Those that are no image for us, so that the refusal can say what came.
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
_SVG_WITHIN = 1_000  # bytes: behind an XML declaration, comments and a doctype


def kind_of(data: bytes) -> str | None:
    """One of `READ`, the name of another, or None where nothing is known that begins so."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:12] in _BRANDS:
        return _BRANDS[data[8:12]]
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    start = data[:_SVG_WITHIN].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "SVG" if start.startswith((b"<svg", b"<?xml", b"<!")) and b"<svg" in start else None


def declared_kind(media_type: str) -> str | None:
    """What a media type, in lower case, promises; None where that is none of `READ`."""
    return _DECLARED.get(media_type)


def too_long(max_bytes: int) -> Refusal:
    return Refusal("too_large", f"the image's file is longer than this worker takes, {max_bytes:,} bytes.")
