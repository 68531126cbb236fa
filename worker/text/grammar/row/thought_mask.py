"""Token masks for the thoughts before an answer that a grammar constrains.

A thought ends as in the output parser: at the text of its end marker, whichever tokens spell it.
"""

from collections.abc import Iterable

from worker.text.vocabulary import Vocabulary


class ThoughtMask:
    """Masks for one model's thoughts.

    They prevent the end of the answer. The end marker must end together with a token, since the grammar cannot start
    within one.
    """

    def __init__(
        self, vocabulary: Vocabulary, count: int, *, begins: int | None, ends: str, banned: Iterable[int]
    ) -> None:
        """`count`: tokens in a mask. `begins`: the token that begins a thought; None if it takes several: then a
        constrained answer cannot begin it. `ends`: its end marker. `banned`: tokens that no mask allows."""
        self.begins, self.ends = begins, ends.encode()
        self.bytes_of, self._tokens_with = vocabulary.bytes_of, vocabulary.tokens_with
        self._count, self.longest = count, len(self.ends)
        self._after = self._barred()
        always = (1 << count) - 1 & ~self._after.pop(b"")
        for token in banned:
            always &= ~(1 << token)
        self._always, self._always_mask = always, self._mask(always)

    def allowed(self, tail: bytes) -> bytes:
        """Return the mask after text that ends with `tail`: a bit per token, in little-endian 32-bit words."""
        bars = [tokens for begun, tokens in self._after.items() if tail.endswith(begun)]
        if not bars:
            return self._always_mask
        allowed = self._always
        for tokens in bars:
            allowed &= ~tokens
        return self._mask(allowed)

    def _barred(self) -> dict[bytes, int]:
        """Return the barred tokens by the marker prefix that they follow.

        Under the empty prefix: tokens that hold the whole marker, unless they end with it.
        """
        ends, bytes_of = self.ends, self.bytes_of
        barred = {b"": [token for token in self._tokens_with(ends) if ends in bytes_of(token)[:-1]]}
        for at in range(1, len(ends)):
            rest = ends[at:]
            barred[ends[:at]] = [token for token in self._tokens_with(rest, first=True) if bytes_of(token) != rest]
        return {begun: self._bits(tokens) for begun, tokens in barred.items()}

    def _bits(self, tokens: Iterable[int]) -> int:
        bits = bytearray(-(-self._count // 8))
        for token in tokens:
            bits[token // 8] |= 1 << token % 8
        return int.from_bytes(bits, "little")

    def _mask(self, tokens: int) -> bytes:
        return tokens.to_bytes(-(-self._count // 32) * 4, "little")


class ThoughtState:
    """State of one row's thoughts."""

    def __init__(self, mask: ThoughtMask, *, begun: bool) -> None:
        """`begun`: the prompt ends within a thought; else it begins with its own token."""
        self._mask, self._tail = mask, b""
        self.begun, self.over = begun, False

    @property
    def begins(self) -> int | None:
        """The token that begins a thought; None if no single one does."""
        return self._mask.begins

    def take(self, token: int) -> bool:
        """Add a sampled token. Returns True if it belongs to a thought."""
        self.begun = self.begun or token == self.begins
        if self.begun:
            self._tail = (self._tail + self._mask.bytes_of(token))[-self._mask.longest :]
            self.over = self._tail.endswith(self._mask.ends)
        return self.begun

    def allowed(self) -> bytes:
        """Return the mask for the next token."""
        return self._mask.allowed(self._tail)
