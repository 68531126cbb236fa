"""Collects the variables of the chat template that a request sets."""

import re
from typing import Any

from schemas import ChatRequest
from schemas.chat import TEMPLATE_FIELDS


def template_variables(request: ChatRequest, template: str) -> tuple[dict[str, Any], list[str]]:
    """Return the variables, and the names of set fields that the template does not read.

    `template`: its source. It is empty if the template is not text, which then gets only `chat_template_kwargs`.
    """
    asked = {name: value for name in TEMPLATE_FIELDS if (value := getattr(request, name)) is not None}
    read = {name: value for name, value in asked.items() if re.search(rf"\b{name}\b", template)}
    return {**read, **(request.chat_template_kwargs or {})}, sorted(asked.keys() - read.keys())
