"""Which parts of a prompt may be thinned: the insides of long contents, between their images.

All else always stays: what the template wrote, system prompt and tools, images, short messages, and the last question,
which stands at an end of its message or beside an image.
"""

from collections.abc import Collection, Iterator

from worker.text.boundaries import Rendered
from worker.text.places import Places

_MOST = 256  # pieces: each is looked for in the whole text, and a conversation may have ten thousand
_SHORT = 400  # characters; so much stays of either end of the last question, too, and of what follows it


class Thinnable:
    """A worker has one."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def plan(self, rendered: Rendered) -> tuple[tuple[int, int], ...]:
        """From token to before token, in order."""
        spans = list(_spans(rendered))
        places = {place for span in spans for place in span}
        counts = self._places.counts(rendered.text, rendered.tokens, places, rendered.codec.plain) if spans else None
        if counts is None:
            return ()
        # A token over the beginning of a content may have some of the template's own text in it.
        ranges = ((counts[start] + 1, counts[end]) for start, end in spans)
        return tuple((start, end) for start, end in ranges if start < end)


def _spans(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Characters. What the template shows in other words is left as it is, and so is what stands in the prompt more
    than once: in the system prompt or a tool's, maybe."""
    text, long = rendered.text, list(_long_pieces(rendered))
    longest_first = sorted(range(len(long)), key=lambda at: -len(long[at][0]))
    for at in sorted(longest_first[:_MOST]):
        piece, ends = long[at]
        if text.count(piece) == 1:
            start = text.find(piece)
            yield start + ends, start + len(piece) - ends


def _long_pieces(rendered: Rendered) -> Iterator[tuple[str, int]]:
    """Each long piece of a content, and how many characters stay at its ends."""
    conversation = rendered.conversation
    asked = max((at for at, message in enumerate(conversation) if message["role"] == "user"), default=0)
    for at, message in enumerate(conversation):
        ends = _SHORT if at >= asked else 0
        for piece in _pieces(message["content"], rendered.marks) if message["role"] != "system" else ():
            if len(piece) > max(_SHORT, 2 * ends):
                yield piece, ends


def _pieces(content: str, marks: Collection[str]) -> list[str]:
    """What stands between its images."""
    pieces = [content]
    for mark in marks:
        pieces = [part for piece in pieces for part in piece.split(mark)]
    return [piece.strip() for piece in pieces]
