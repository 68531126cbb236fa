"""Plans the droppable ranges of a prompt, from which SpecPrefill may leave out tokens.

They are the long texts of messages, between images. Never dropped are the template's own text, system prompt, tools,
images, short messages, and the last question, which is expected at an end of a text of the last user message.
"""

from collections.abc import Collection, Iterator

from worker.text.prompt.boundaries import Rendered
from worker.text.prompt.offsets import TokenOffsets

_MAX_PIECES = 256  # pieces: each is searched in the whole text, and a conversation may have ten thousand
_SHORT = 400  # characters; also kept at both ends of each text in the last user message and after it


class DroppableRanges:
    """Plans droppable ranges; a worker has one."""

    def __init__(self, offsets: TokenOffsets) -> None:
        self._offsets = offsets

    def plan(self, rendered: Rendered) -> tuple[tuple[int, int], ...]:
        """Return ranges of tokens, end exclusive, in order."""
        spans = list(_spans(rendered))
        places = {place for span in spans for place in span}
        counts = self._offsets.counts(rendered.text, rendered.tokens, places, rendered.codec.plain) if spans else None
        if counts is None:
            return ()
        # A token that reaches over the beginning of a content may hold some of the template's own text.
        ranges = ((counts[start] + 1, counts[end]) for start, end in spans)
        return tuple((start, end) for start, end in ranges if start < end)


def _spans(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Yield ranges of characters.

    Pieces that the template changed are skipped, and so are repeated pieces: the other occurrence may
    be in the system prompt or in a tool.
    """
    text, long = rendered.text, list(_long_pieces(rendered))
    longest_first = sorted(range(len(long)), key=lambda at: -len(long[at][0]))
    for at in sorted(longest_first[:_MAX_PIECES]):
        piece, ends = long[at]
        if text.count(piece) == 1:
            start = text.find(piece)
            yield start + ends, start + len(piece) - ends


def _long_pieces(rendered: Rendered) -> Iterator[tuple[str, int]]:
    """Yield each long piece of a content, and the number of characters to keep at each end of it."""
    conversation = rendered.conversation
    asked = max((at for at, message in enumerate(conversation) if message["role"] == "user"), default=0)
    for at, message in enumerate(conversation):
        ends = _SHORT if at >= asked else 0
        for piece in _pieces(message["content"], rendered.marks) if message["role"] != "system" else ():
            if len(piece) > max(_SHORT, 2 * ends):
                yield piece, ends


def _pieces(content: str, marks: Collection[str]) -> list[str]:
    """Split a content at its images."""
    pieces = [content]
    for mark in marks:
        pieces = [part for piece in pieces for part in piece.split(mark)]
    return [piece.strip() for piece in pieces]
