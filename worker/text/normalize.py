"""Messages in the form that chat templates take."""

from collections.abc import Sequence
from typing import Any

from schemas.chat import ImagePart, Message, TextPart
from worker.errors import Refusal


def normalize(messages: list[Message]) -> list[dict[str, Any]]:
    """Plain dicts with string contents, `developer` as `system`. Raises `Refusal` for images."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    plain["content"] = _text(message.content)
    if message.role == "developer":
        plain["role"] = "system"
    return plain


def _text(content: str | Sequence[TextPart | ImagePart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(isinstance(part, ImagePart) for part in content):
        raise Refusal("unsupported", "This model takes text only: leave out the image_url parts.")
    return "".join(part.text for part in content if isinstance(part, TextPart))
