"""Token masks for the reasoning before an answer that a grammar constrains.

Reasoning ends as in the output parser: at the text of its end marker, whichever tokens spell it.
"""

from collections.abc import Iterable

from worker.text.vocabulary import Vocabulary


class ReasoningMask:
    """Masks for one model's reasoning.

    They prevent the end of the answer. The end marker must end together with a token, since the grammar cannot start
    within one.
    """

    def __init__(
        self, vocabulary: Vocabulary, count: int, *, begins: int | None, ends: str, banned: Iterable[int]
    ) -> None:
        """`count`: tokens in a mask. `begins`: the token that begins reasoning; None if it takes several: then a
        constrained answer cannot begin it. `ends`: its end marker. `banned`: tokens that no mask allows."""
        self.begins, self.ends = begins, ends.encode()
        self.bytes_of = vocabulary.bytes_of
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
        ends = self.ends
        rests = [(ends[:at], ends[at:]) for at in range(1, len(ends))]
        beginnings = tuple(rest for _, rest in rests)
        texts = list(map(self.bytes_of, range(self._count)))
        # Comprehensions: with a large vocabulary, anything more for each token would take a tenth of a second.
        with_end = [token for token, text in enumerate(texts) if ends in text]
        with_rest = [token for token, text in enumerate(texts) if text.startswith(beginnings)]
        barred = {b"": [token for token in with_end if ends in texts[token][:-1]]}
        for begun, rest in rests:
            barred[begun] = [token for token in with_rest if texts[token].startswith(rest) and texts[token] != rest]
        return {begun: self._bits(tokens) for begun, tokens in barred.items()}

    def _bits(self, tokens: Iterable[int]) -> int:
        bits = bytearray(-(-self._count // 8))
        for token in tokens:
            bits[token // 8] |= 1 << token % 8
        return int.from_bytes(bits, "little")

    def _mask(self, tokens: int) -> bytes:
        return tokens.to_bytes(-(-self._count // 32) * 4, "little")


class ReasoningState:
    """State of one row's reasoning."""

    def __init__(self, reasoning: ReasoningMask, *, begun: bool) -> None:
        """`begun`: the prompt ends within reasoning; else it begins with its own token."""
        self._reasoning, self._tail = reasoning, b""
        self.begun, self.over = begun, False

    @property
    def begins(self) -> int | None:
        """The token that begins reasoning; None if no single one does."""
        return self._reasoning.begins

    def take(self, token: int) -> bool:
        """Add a sampled token. Returns True if it belongs to the reasoning."""
        self.begun = self.begun or token == self.begins
        if self.begun:
            self._tail = (self._tail + self._reasoning.bytes_of(token))[-self._reasoning.longest :]
            self.over = self._tail.endswith(self._reasoning.ends)
        return self.begun

    def allowed(self) -> bytes:
        """Return the mask for the next token."""
        return self._reasoning.allowed(self._tail)
