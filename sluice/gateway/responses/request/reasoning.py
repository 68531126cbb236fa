"""Reasoning items: the text of a model's reasoning, which clients send back with the conversation.

A client that keeps its conversation itself drops the text and sends `encrypted_content` back. Workers hold no key, so
that field carries the same text, in base64; nothing in it is secret from the client, which received it.
"""

import base64
import binascii
from typing import Any

from sluice.gateway.responses.request import content, fields

_PREFIX = "sluice1:"


def enclosed(text: str) -> str:
    """Return the text as the `encrypted_content` of a reasoning item."""
    return _PREFIX + base64.b64encode(text.encode(errors="replace")).decode()


def read_reasoning(item: dict[str, Any], param: str) -> str:
    """Return the text of a reasoning item; empty if it has none, or only another server's `encrypted_content`. Raises
    `ApiError`."""
    for name, separator in (("content", ""), ("summary", "\n\n")):
        if item.get(name):
            parts = content.read_parts(item[name], f"{param}.{name}", images=False)
            return separator.join(part["text"] for part in parts)
    return _opened(fields.optional_text(item.get("encrypted_content"), f"{param}.encrypted_content") or "", param)


def _opened(sealed: str, param: str) -> str:
    if not sealed.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, ValueError):
        problem = "it is not as this server wrote it; send it back unchanged, or leave it out."
        raise fields.refusal(f"{param}.encrypted_content", problem) from None
