"""From a request to the prompt's tokens, through the model's own chat template."""

import asyncio
from typing import Any

from jinja2 import TemplateError

from schemas import ChatRequest
from worker.errors import Refusal
from worker.text.normalize import normalize
from worker.text.tokenizer import Tokenizer

_LONG_CHARACTERS = 20_000  # a few milliseconds of tokenizing; longer ones leave the event loop


async def render(tokenizer: Tokenizer, request: ChatRequest) -> tuple[int, ...]:
    """Raises `Refusal` with the template's own words."""
    conversation = normalize(request.messages)
    kwargs = request.chat_template_kwargs or {}
    if _characters(conversation) < _LONG_CHARACTERS:
        return _apply(tokenizer, conversation, kwargs)
    return await asyncio.to_thread(_apply, tokenizer, conversation, kwargs)


def _apply(tokenizer: Tokenizer, conversation: list[dict[str, Any]], kwargs: dict[str, Any]) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **kwargs))
    except TemplateError as error:
        raise Refusal("invalid_request", f"The model's chat template refuses these messages: {error}") from None
    except (TypeError, KeyError, ValueError) as error:  # a template's own slip on a form it did not expect
        raise Refusal("invalid_request", f"The model's chat template cannot render these messages: {error}") from error


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return _characters(list(value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(str(value))
