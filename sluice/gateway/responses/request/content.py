"""Content of input items, as parts of a chat completion's messages."""

from typing import Any

from sluice.gateway.responses.request import fields
from sluice.gateway.responses.request.fields import refusal

Part = dict[str, Any]

_TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_DETAILS = {"auto": "auto", "low": "low", "high": "high", "original": "high"}


def read_parts(value: object, param: str, *, images: bool) -> list[Part]:
    """Return the parts of a message's or an output's content, a string or a list. Raises `ApiError`."""
    if isinstance(value, str):
        return [_text(value)]
    if value is not None and not isinstance(value, list):
        raise refusal(param, "it must be a string or a list of parts.", code="invalid_type")
    return [_read_part(fields.mapping(part, place), place, images) for place, part in fields.entries(value, param)]


def text_of(parts: list[Part]) -> str:
    """Return the text of parts without images."""
    return "".join(part["text"] for part in parts if part["type"] == "text")


def is_image(part: Part) -> bool:
    """Return True for the part of an image."""
    return bool(part["type"] == "image_url")


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _read_part(part: dict[str, Any], param: str, images: bool) -> Part:
    kind = fields.text(part.get("type"), f"{param}.type")
    if kind in _TEXT_TYPES:
        return _text(fields.text(part.get("text"), f"{param}.text"))
    if kind == "refusal":
        return _text(fields.text(part.get("refusal"), f"{param}.refusal"))
    if kind == "input_image" and images:
        return _read_image(part, param)
    usable = "'input_text' or 'input_image'" if images else "text"
    raise refusal(f"{param}.type", f"{kind[:40]!r} is not supported here; use {usable}.", code="unsupported_value")


def _read_image(part: dict[str, Any], param: str) -> Part:
    if part.get("file_id") is not None:
        raise refusal(f"{param}.file_id", "no files are stored here; send the image as a data: URL in image_url.")
    detail = part.get("detail")
    url = fields.text(part.get("image_url"), f"{param}.image_url")
    detail = "auto" if detail is None else fields.one_of(detail, _DETAILS, f"{param}.detail")
    return {"type": "image_url", "image_url": {"url": url, "detail": _DETAILS[detail]}}
