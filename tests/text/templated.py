"""The tiny model's tokenizer with other chat templates, rendered as in a worker."""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from schemas import ChatRequest
from tests.support.stack import TINY_CHAT
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.text.output.formats import ModelFormat
from worker.text.prompt.boundaries import Rendered, TokenOffsets, cache_boundaries
from worker.text.prompt.normalize import ControlTokenEscaping
from worker.text.prompt.prompt import Prompt, Prompts
from worker.text.tokenizer import Vocabulary

TEMPLATES = {file.stem: file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("templates/*.jinja")}


def request(*messages: dict[str, Any], **rest: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages), **rest})


async def prompt(template: str, *messages: dict[str, Any], **rest: Any) -> Prompt:
    """`template` is the name of one of ours, or one itself."""
    return await prompts(template).render(request(*messages, **rest))


async def rendered(template: str, *messages: dict[str, Any], **rest: Any) -> str:
    return str(_tiny().decode((await prompt(template, *messages, **rest)).tokens))


def prompts(template: str, *, boundaries: bool = False) -> Prompts:
    told = words(TEMPLATES.get(template, template))
    quoting = ControlTokenEscaping(told.control_tokens, (*(told.think or ()), *(told.tool or ())))
    return Prompts(told, ModelFormat.of(told).think, _boundaries(told) if boundaries else None, escaping=quoting)


@cache
def words(source: str) -> MLXTokenizer:
    wrapper = copy.copy(_tiny())
    wrapper._tokenizer = copy.copy(wrapper._tokenizer)
    wrapper._tokenizer.chat_template = source
    return MLXTokenizer(wrapper)


@cache
def _boundaries(told: MLXTokenizer) -> Callable[[Rendered], tuple[int, ...]]:
    return partial(cache_boundaries, TokenOffsets(Vocabulary(told), len(told.tokens)))


@cache
def _tiny() -> Any:
    return load_tokenizer(Path(TINY_CHAT))
