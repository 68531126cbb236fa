"""Which parts of a prompt may be thinned: the insides of long contents.

All else always stays: what the template wrote, system prompt and tools, short messages, and the last question, which
stands at an end of its message.
"""

from collections.abc import Iterator

from worker.text.boundaries import Rendered
from worker.text.places import Places
from worker.text.tokenizer import Conversation

_SHORT = 400  # characters; so much stays of either end of the last question, too, and of what follows it


class Thinnable:
    """A worker has one."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def plan(self, rendered: Rendered) -> tuple[tuple[int, int], ...]:
        """From token to before token, in order."""
        spans = list(_spans(rendered.conversation, rendered.text))
        places = {place for span in spans for place in span}
        counts = self._places.counts(rendered.text, rendered.tokens, places) if spans else None
        if counts is None:
            return ()
        # A token over the beginning of a content may have some of the template's own text in it.
        ranges = ((counts[start] + 1, counts[end]) for start, end in spans)
        return tuple((start, end) for start, end in ranges if start < end)


def _spans(conversation: Conversation, text: str) -> Iterator[tuple[int, int]]:
    """Characters. What the template shows in other words is left as it is, and so is what stands in the prompt more
    than once: in the system prompt or a tool's, maybe."""
    asked = max((at for at, message in enumerate(conversation) if message["role"] == "user"), default=0)
    for at, message in enumerate(conversation):
        content = message["content"].strip()
        if message["role"] == "system" or len(content) <= _SHORT or text.count(content) != 1:
            continue
        start, ends = text.find(content), _SHORT if at >= asked else 0
        if 2 * ends < len(content):
            yield start + ends, start + len(content) - ends
