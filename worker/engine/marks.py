"""Images in a chat template's text. Contents are strings, and a character of its own marks each image's place in them;
the template gets the parts that it wants, and its own marker for an image becomes what the model reads."""

import re
from collections.abc import Mapping
from typing import Any

from worker.engine.upstream_transformers import CONTROL_TOKEN_START

Images = Mapping[str, str]  # by their marks, the texts that the model reads for them


def parted(conversation: list[dict[str, Any]], images: Images) -> list[dict[str, Any]]:
    """Contents with images as lists of parts; the others as they are."""
    return [{**message, "content": _parts(message["content"], images)} for message in conversation]


def shown(text: str, marker: str, conversation: list[dict[str, Any]], images: Images) -> str:
    """The template's text of these messages with their images' own in the place of its markers. Raises ValueError where
    it does not show each image once."""
    pieces = [piece for message in conversation for piece in _pieces(message["content"], images)]
    wanted = [images[piece] for piece in pieces if piece in images]
    # A client's own text may have the marker in it, if that is marked as text.
    first, *others = re.split(f"(?<!{CONTROL_TOKEN_START}){re.escape(marker)}", text)
    if len(others) != len(wanted):
        raise ValueError(
            f"it has {len(others)} images in place of {len(wanted)}; no text may have {marker} in it, which is the "
            "model's own sign for an image"
        )
    return first + "".join(image + other for image, other in zip(wanted, others, strict=True))


def _parts(content: str, images: Images) -> Any:
    pieces = _pieces(content, images)
    if not any(piece in images for piece in pieces):
        return content
    return [{"type": "image"} if piece in images else {"type": "text", "text": piece} for piece in pieces if piece]


def _pieces(content: str, images: Images) -> list[str]:
    return re.split(f"([{re.escape(''.join(images))}])", content)
