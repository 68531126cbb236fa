"""Stop strings in a text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Ends a text at the stop string that is complete first, and holds back text that may be the start of one. The
    result does not depend on how the text was split into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = _Matcher(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._held = deque[str]()  # characters
        self.matched: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """True after a stop string."""
        return self.matched is not None

    def feed(self, text: str) -> str:
        """Return the text that can be no part of a stop string. Returns nothing once `stopped`."""
        if self.stopped:
            return ""
        if not self._held and self._starts.isdisjoint(text):
            return text
        for char in text:
            self._held.append(char)
            if matched := self._matcher.feed(char):
                return self._stop(matched)
        return self._release(len(self._held) - self._matcher.depth)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        self._matcher.reset()
        return self._release(len(self._held))

    def _stop(self, matched: int) -> str:
        text = self._release(len(self._held) - matched)
        self.matched = "".join(self._held)
        self._held.clear()
        return text

    def _release(self, count: int) -> str:
        return "".join([self._held.popleft() for _ in range(count)])


class _Matcher:
    """Automaton over all stop strings (Aho and Corasick 1975). A character costs O(1) amortized, for any number and
    length of the strings."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Indexed by node. A node is a prefix of a stop string; node 0 is the empty prefix.
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matched = [0]  # length of the longest stop string that ends here
        self._fallback = [0]  # node of the longest proper suffix
        self._node = 0
        for stop in stops:
            self._add(stop)
        self._link()

    @property
    def depth(self) -> int:
        """Length of the longest prefix of a stop string that the text ends with."""
        return self._depths[self._node]

    def feed(self, char: str) -> int:
        """Return the length of the longest stop string that ends with this character, or 0."""
        self._node = self._after(self._node, char)
        return self._matched[self._node]

    def reset(self) -> None:
        """Forget the text so far."""
        self._node = 0

    def _after(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, 1):
            found = self._next[node].get(char)
            if found is None:
                found = self._next[node][char] = len(self._next)
                self._next.append({})
                self._depths.append(depth)
                self._matched.append(0)
                self._fallback.append(0)
            node = found
        self._matched[node] = len(stop)

    def _link(self) -> None:
        """Set the fallbacks, shorter nodes first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            fallback = self._fallback[node]
            self._matched[node] = self._matched[node] or self._matched[fallback]
            for char, child in self._next[node].items():
                self._fallback[child] = self._after(fallback, char)
                queue.append(child)
