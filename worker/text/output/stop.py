"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Ends the text at the first complete stop string, and holds back text that may be the start of one.

    The total output does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Return the text that cannot be a part of a stop string; nothing once `stopped`."""
        if self.stopped:
            return ""
        if not self._held and self._starts.isdisjoint(text):
            return text
        text = self._held + text
        if ends := [(text.index(s) + len(s), text.index(s)) for s in self._stops if s in text]:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
