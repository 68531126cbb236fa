"""Read data: URLs by RFC 2397, as browsers do."""

import binascii
from urllib.parse import unquote_to_bytes

from worker.errors import JobFailure

_SPACE = b" \t\r\n\f"
_LONGEST_TYPE = 100  # bytes; a longer one is not repeated in an error


def read_data_url(url: bytes) -> tuple[str, bytes]:
    """Return the declared media type, in lower case and possibly empty, and the data. Raises `JobFailure`."""
    head, comma, body = url.partition(b",")
    if not comma:
        raise JobFailure("invalid_request", "the data: URL has no comma before its data.")
    media_type, *parameters = (each.strip() for each in head[len("data:") :].lower().split(b";"))
    if len(media_type) > _LONGEST_TYPE or not media_type.isascii():
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
