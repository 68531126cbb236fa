"""Recognize an image's file before it is decoded."""

from worker.errors import JobFailure

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
_SVG_SEARCH_BYTES = 1_000  # bytes that may precede the tag: an XML declaration, comments, a doctype


def kind_of(data: bytes) -> str | None:
    """Return the file format by its first bytes: one of `MEDIA_TYPES`, an unsupported one, or None if unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:12] in _BRANDS:
        return _BRANDS[data[8:12]]
    for magic, kind in _MAGIC:
        if data.startswith(magic):
            return kind
    start = data[:_SVG_SEARCH_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "SVG" if start.startswith((b"<svg", b"<?xml", b"<!")) and b"<svg" in start else None


def declared_kind(media_type: str) -> str | None:
    """Return the format of a media type in lower case; None if it is not supported."""
    return _DECLARED.get(media_type)


def too_long(max_bytes: int) -> JobFailure:
    """Return the error for a file above the limit."""
    return JobFailure("too_large", f"the image's file is longer than this worker accepts ({max_bytes:,} bytes).")
