"""From a request to the prompt's tokens, through the model's own chat template."""

import asyncio
import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jinja2 import TemplateError

from schemas import ChatRequest
from worker.errors import Refusal
from worker.text.adapt import RAISED, TAKES_NO_TOOLS, Render, Tools, adapt
from worker.text.normalize import normalize
from worker.text.tokenizer import Conversation, Tokenizer

logger = logging.getLogger("sluice.text")

_LONG_CHARACTERS = 20_000  # a few milliseconds of tokenizing; longer ones leave the event loop
_MESSAGE_CHARACTERS = 100  # a message takes about as long in the template, if that needs several trials
_LONGEST_REASON = 500  # characters; one of transformers' errors holds the whole conversation

Thinking = Literal["open", "closed", "none"]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    thinking: Thinking  # whether the answer begins inside a think block, or behind one that the prompt closed


class Prompts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._logged = set[str]()

    async def render(self, request: ChatRequest) -> Prompt:
        """Raises `Refusal` with the template's own words."""
        conversation = _text_only(normalize(request.messages))
        offered = [] if request.tool_choice == "none" else request.tools or []
        tools = [tool.model_dump(exclude_none=True) for tool in offered]
        variables = request.chat_template_kwargs or {}
        length = _characters([conversation, tools, variables]) + _MESSAGE_CHARACTERS * len(conversation)
        if length < _LONG_CHARACTERS:
            return self._prompt(conversation, tools, variables)
        return await asyncio.to_thread(self._prompt, conversation, tools, variables)

    def _prompt(self, conversation: Conversation, tools: Tools, variables: dict[str, Any]) -> Prompt:
        think = self._tokenizer.think
        told, continues, begun = _opening(conversation, think)

        def render(conversation: Conversation, tools: Tools) -> str:
            return self._tokenizer.render(conversation, tools=tools, continues=continues, variables=variables)

        text = self._text(told, tools, render)
        if think and begun.lstrip().startswith(think[0]) and text.rstrip().endswith(think[0]):
            text = text.rstrip().removesuffix(think[0])  # one of the two is enough
        text += begun
        return Prompt(tuple(self._tokenizer.encode(text)), _thinking(text, begun, think))

    def _text(self, conversation: Conversation, tools: Tools, render: Render) -> str:
        try:
            text, whys = adapt(conversation, tools, render)
        except RAISED as error:
            does = "refuses" if isinstance(error, TemplateError) else "cannot render"
            reason = str(error)[:_LONGEST_REASON]
            raise Refusal("invalid_request", f"The model's chat template {does} these messages: {reason}") from error
        for why in whys:
            self._log_once(why)
        if TAKES_NO_TOOLS in whys:
            raise Refusal("unsupported", "The model's chat template takes no tools: leave them out.")
        return text

    def _log_once(self, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.info("The chat template %s.", why)


def _opening(conversation: Conversation, think: tuple[str, str] | None) -> tuple[Conversation, bool, str]:
    """What the template gets, whether its last turn stays open, and the beginning of the answer to put behind it."""
    *before, last = conversation
    if last["role"] != "assistant" or "tool_calls" in last:
        return conversation, False, ""
    begun: str = last["content"]
    # Templates take thoughts out of what was said: an answer that goes on after its own must not go through them.
    if any(marker in begun for marker in think or ()) or not (begun or "reasoning_content" in last):
        return before, False, begun
    return conversation, True, ""


def _thinking(text: str, begun: str, think: tuple[str, str] | None) -> Thinking:
    if think is None:
        return "none"
    start, end = think
    if start in begun or end in begun:
        return "open" if begun.rfind(start) > begun.rfind(end) else "closed"
    # Every template writes something behind a message, so what a user wrote is never the end.
    return "open" if text.rstrip().endswith(start) else "closed" if text.rstrip().endswith(end) else "none"


def _text_only(conversation: Conversation) -> Conversation:
    """Strings for contents, since many templates take nothing else. Raises `Refusal` for images."""
    return [{**message, "content": _flat(message["content"])} for message in conversation]


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise Refusal("unsupported", "This model takes text only: leave out the image_url parts.")
    texts: list[str] = [part["text"] for part in content]
    return texts[0] + "".join(_gap(before, after) + after for before, after in pairwise(texts))


def _gap(before: str, after: str) -> str:
    """A line for each part, as other servers have it, unless a part of nothing but space keeps them apart."""
    return "" if before.isspace() or after.isspace() else "\n"


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        return _characters(list(value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(str(value))
