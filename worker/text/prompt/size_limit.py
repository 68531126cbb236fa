"""Refuses prompts that are too large before they are rendered and tokenized as a whole."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from schemas.messages import ImagePart
from worker.errors import context_exceeded, prompt_too_large
from worker.text.threads import Check
from worker.text.tokenizer import TemplateMessages

# A cut within a word, within a control token or after a run of spaces adds tokens: in all measurements at most one for
# each character of the word. Tests measure it for several tokenizers and texts.
_PER_CUT = 32  # tokens

_ENDS_THOUGHTS = "</think>"  # templates search for it, even if the model has other markers


class PromptLimit:
    """Refuses a prompt that cannot fit the context; a worker has one."""

    def __init__(
        self, encode: Callable[[str], list[int]], context: int | None, think: Iterable[str] | None = None
    ) -> None:
        """`context`: its length in tokens; None refuses no prompt. `think`: the markers around reasoning."""
        self._encode, self._context = encode, context
        self._think = {_ENDS_THOUGHTS, *(think or ())}

    def check_contents(self, conversation: TemplateMessages, check: Check) -> int:
        """Count the tokens of the contents before they are rendered, if their characters exceed the context.

        Returns the number of characters that were counted. Raises `JobFailure` if the contents exceed the context.
        """
        texts = [text for message in conversation for text in self._certain_texts(message)]
        if self._context is None or sum(map(len, texts)) <= self._context:
            return 0
        self._refuse(texts, check)
        return sum(map(len, texts))

    def check_rendered(self, text: str, counted: int, check: Check) -> None:
        """Check the rendered text, of which `counted` characters were counted before.

        Raises `JobFailure` if the text exceeds the context, or is too long to be tokenized.
        """
        if self._context is None:
            return
        if len(text) - counted > self._context:
            self._refuse([text], check)
        # Tokenizers use up to 120 bytes of memory for each character of a text, and tokenizers that split words by a
        # regular expression fail on runs of about ten million characters. A token of English has about 4.
        limit = max(4_000_000, 16 * self._context)
        if len(text) > limit:
            raise context_exceeded(self._context, f"{len(text)} characters, of which at most {limit} are tokenized")

    def _certain_texts(self, message: dict[str, Any]) -> Iterator[str]:
        """Yield the texts that every template writes: long arguments, and contents without the space around them.

        Left out are assistant messages with reasoning, which templates may drop, and those with calls: gpt-oss's
        template drops their content.
        """
        content: str = message["content"]
        called = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        yield from (value for value in _walk(called) if isinstance(value, str) and len(value) > _PER_CUT)
        if message["role"] != "assistant" or not (called or any(marker in content for marker in self._think)):
            yield content.strip()

    def _refuse(self, texts: Iterable[str], check: Check) -> None:
        assert self._context is not None
        at_least = 0
        for text in texts:
            for piece in _slices(text):
                check()
                at_least += max(0, len(self._encode(piece)) - _PER_CUT)
                if at_least > self._context:
                    raise prompt_too_large(at_least, self._context, exact=False)


def _slices(text: str) -> Iterator[str]:
    size = 8_192  # characters: at most 32 kB of UTF-8, which the slowest tokenizers encode in about 20 ms
    return (text[start : start + size] for start in range(0, len(text), size))


def cost_in_characters(values: Iterable[Any], limit: int) -> int:
    """Return the number of characters in strings at any depth, plus 32 for each value, as a measure of cost.

    Stops when the number exceeds `limit`, so its own cost is bounded. Names of model fields do not count, and an image
    counts as 2,000.
    """
    total = 0
    for value in _walk(values):
        total += _cost(value)
        if total > limit:
            break
    return total


def _walk(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values and all values within them, each before those that it holds."""
    ahead = [iter(values)]
    while ahead:
        value = next(ahead[-1], ahead)
        if value is ahead:
            ahead.pop()
            continue
        yield value
        if (within := _within(value)) is not None:
            ahead.append(within)


def _cost(value: Any) -> int:
    if isinstance(value, ImagePart):
        return 2_000  # its URL, which may hold the whole file, is not counted as text
    # Copying and rendering a value costs about as much as 32 characters of text.
    return 32 + (len(value) if isinstance(value, str) else 0)


def _within(value: Any) -> Iterator[Any] | None:
    match value:
        case ImagePart():
            return None
        case BaseModel():
            return iter(vars(value).values())
        case dict():
            return (each for item in value.items() for each in item)
        case list() | tuple():
            return iter(value)
    return None
