"""Finds an answer that repeats the same tokens over and over."""

from array import array

_LONGEST_CYCLE = 512  # tokens; models that loop mostly repeat a sentence or a paragraph
_EVERY = 16  # tokens between two searches, so that one costs each token little
_PROBE = 8  # tokens: the last ones, whose earlier places tell the possible lengths of a cycle
_MOST_PLACES = 64  # that one search tries: its probe may occur several times within the cycle
_SPARE = 64  # tokens that are kept beyond those that a search reads, since some may be removed again
# Tokens of a cycle and its repetitions that are a loop. Of 1,000 answers with tables, lists of equal rows, runs of
# zeros and the like, of up to 2,003 tokens with Qwen3's tokenizer, none is found (`tests/text/output/test_loops.py`).
# A thought that is closed by mistake is still followed by an answer; a repetitive answer may be what somebody wants.
THOUGHT_LOOP = 3_072
ANSWER_LOOP = 8_192


class LoopDetector:
    """The last tokens of an answer. Each costs the same, however many came before it."""

    def __init__(self, bound: int) -> None:
        """`bound`: how many of the last tokens repeat a cycle in a loop."""
        self._bound = bound
        self._count = 0
        self._tokens = array("I")  # the last ones

    def append(self, token: int) -> int:
        """Append a token. Returns the length of the cycle that the last tokens repeat, if that is a loop, else 0. It
        searches at fixed places, so the same tokens give the same results."""
        self._tokens.append(token)
        self._count += 1
        if self._count % _EVERY or self._count < self._bound:
            return 0
        if len(self._tokens) >= 2 * self._bound:
            del self._tokens[: -self._bound - _SPARE]
        return self._cycle()

    def remove(self) -> None:
        """Remove the last token."""
        self._tokens.pop()
        self._count -= 1

    def _cycle(self) -> int:
        width = self._tokens.itemsize
        recent = self._tokens[-_LONGEST_CYCLE - _PROBE :].tobytes()
        probe, end = recent[-_PROBE * width :], len(recent) - 1
        for _ in range(_MOST_PLACES):
            place = recent.rfind(probe, 0, end)
            if place < 0:
                break
            period, rest = divmod(len(recent) - len(probe) - place, width)
            if rest == 0 and self._repeats(period):
                return period
            end = place + len(probe) - 1
        return 0

    def _repeats(self, period: int) -> bool:
        """Return True if the last tokens repeat with this period."""
        with memoryview(self._tokens)[-self._bound :] as last, last[period:] as later, last[:-period] as earlier:
            return later == earlier
