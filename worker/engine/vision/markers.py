"""Images in a chat template's text. In message contents, strings or lists of text parts, a private character marks each
image's place; the template receives content parts, and its own marker for an image is then replaced by the text that
the model reads."""

import re
from collections.abc import Mapping
from typing import Any

from worker.engine.upstream.transformers import CONTROL_TOKEN_START

Images = Mapping[str, str]  # from the character that marks an image to the text that the model reads for it


def split_parts(conversation: list[dict[str, Any]], images: Images) -> list[dict[str, Any]]:
    """Return the messages with contents that have images as lists of parts; other contents stay as they are."""
    return [{**message, "content": _parts(message["content"], images)} for message in conversation]


def expand_markers(text: str, marker: str, conversation: list[dict[str, Any]], images: Images) -> str:
    """Replace the markers in the template's text by the texts of the images, in order. Raises ValueError if the
    template did not emit each image exactly once."""
    pieces = [piece for message in conversation for piece in _pieces(message["content"], images)]
    wanted = [images[piece] for piece in pieces if piece in images]
    # A marker in a client's text is allowed if it is marked as text.
    first, *others = re.split(f"(?<!{CONTROL_TOKEN_START}){re.escape(marker)}", text)
    if len(others) != len(wanted):
        raise ValueError(
            f"it has {len(others)} images instead of {len(wanted)}; no text may contain {marker}, the model's own "
            "marker for an image"
        )
    return first + "".join(image + other for image, other in zip(wanted, others, strict=True))


def _parts(content: Any, images: Images) -> Any:
    pieces = _pieces(content, images)
    if not any(piece in images for piece in pieces):
        return content
    return [{"type": "image"} if piece in images else {"type": "text", "text": piece} for piece in pieces if piece]


def _pieces(content: Any, images: Images) -> list[str]:
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return re.split(f"([{re.escape(''.join(images))}])", text)
