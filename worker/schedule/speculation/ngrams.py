"""Finds the positions in a text at which its current ending has occurred before."""

from array import array
from collections.abc import Iterator, Sequence

MAX_AGREEMENT = 32  # tokens of an ending that are compared; longer ones count as this long
_CANDIDATES = 8  # positions that a lookup compares, the most recent first
_LEAST_SLOTS = 1 << 10
_CROWDED = 4  # indexed tokens per slot of the table from which on it is built anew, larger


class NgramIndex:
    """A token sequence that grows, and an index of its n-grams, as in LZ77: a hash table of the last position of each,
    and a chain to the position before. A position is the index of a token, and stands for the tokens before it.

    Indexing a token and a lookup each take constant time. Takes 4 bytes a token for the tokens, 4 for the chain and 4
    to 8 for the table, which covers at most `2 * window` tokens: beyond, the first half is dropped."""

    def __init__(self, tokens: Sequence[int], size: int, window: int) -> None:
        """`size`: tokens of an n-gram. `window`: the last tokens that can always be found again."""
        self.tokens = array("i", tokens[-window:])
        self._size, self._window = size, window
        self._begin()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def behind(self) -> int:
        """Number of tokens that are not indexed yet."""
        return len(self.tokens) - len(self._previous)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens and of the index."""
        return sum(each.itemsize * len(each) for each in (self.tokens, self._previous, self._last))

    def extend(self, tokens: Sequence[int]) -> bool:
        """Append tokens to the sequence. Does not index them. Returns True if others were dropped: all positions have
        changed."""
        self.tokens.extend(tokens)
        kept = len(self.tokens) % self._window + self._window
        if kept >= len(self.tokens):
            return False
        del self.tokens[:-kept]
        self._begin()
        return True

    def catch_up(self, most: int) -> int:
        """Index up to `most` more tokens, and return their number."""
        start = len(self._previous)
        end = min(len(self.tokens), start + most)
        first = min(max(start, self._size), end)
        self._previous.extend([-1] * (first - start))  # too few tokens come before these positions
        last, previous = self._last, self._previous
        mask = len(last) - 1
        for position, gram in enumerate(self._grams(first, end), first):
            slot = hash(gram) & mask
            previous.append(last[slot])
            last[slot] = position
        if end > _CROWDED * len(self._last):
            self._begin()
        return end - start

    def _grams(self, first: int, end: int) -> Iterator[tuple[int, ...]]:
        """Yield the n-gram before each of these positions."""
        return zip(*(self.tokens[first - back : end - back] for back in range(self._size, 0, -1)), strict=True)

    def positions(self, context: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield indexed positions whose preceding tokens agree with the end of `context` in an n-gram at least, the
        most recent first, each with the number of tokens that agree, up to `MAX_AGREEMENT`."""
        if len(context) < self._size:
            return
        gram = tuple(context[len(context) - self._size :])
        position = self._last[hash(gram) & len(self._last) - 1]
        for _ in range(_CANDIDATES):
            if position < 0:
                return
            if (agreeing := agreement(self.tokens, position, context)) >= self._size:
                yield position, agreeing
            position = self._previous[position]

    def _begin(self) -> None:
        """Begin an empty index, of a size that fits the sequence."""
        slots = max(_LEAST_SLOTS, 1 << len(self.tokens).bit_length())
        self._last = array("i", [-1]) * slots  # the last position of each slot
        self._previous = array("i")  # by position: the position before it in the same slot, or -1


def agreement(tokens: Sequence[int], position: int, context: Sequence[int]) -> int:
    """Return the number of tokens before `position` that equal the end of `context`, up to `MAX_AGREEMENT`."""
    most = min(MAX_AGREEMENT, position, len(context))
    end = len(context)
    for count in range(most):
        if tokens[position - 1 - count] != context[end - 1 - count]:
            return count
    return most
