"""The reasoning before an answer in a form. It ends where the reader of the answer's text sees it end: by its text."""

from collections.abc import Iterable

from worker.text.detokenize import Vocabulary


class Reasoning:
    """How a model's goes on. It does not end the answer, nor go over into a call that no grammar holds, and its end
    marker ends with a token: a grammar could not take the rest of one."""

    def __init__(
        self, vocabulary: Vocabulary, count: int, *, begins: int, ends: str, call: str, banned: Iterable[int]
    ) -> None:
        """`begins` is a token, `ends` and `call` are markers, the latter empty for none; the mask is of so many tokens,
        of which it never has the `banned`."""
        self.begins, self.ends = begins, ends.encode()
        self.bytes_of = vocabulary.bytes_of
        self._count, self._call = count, call.encode()
        self.longest = max(len(self.ends), len(self._call))
        self._after = self._barred()
        always = (1 << count) - 1 & ~self._after.pop(b"")
        for token in banned:
            always &= ~(1 << token)
        self._always, self._always_mask = always, self._mask(always)

    def allowed(self, tail: bytes) -> bytes:
        """A mask, as guides give it, after what ends so."""
        bars = [tokens for begun, tokens in self._after.items() if tail.endswith(begun)]
        if not bars:
            return self._always_mask
        allowed = self._always
        for tokens in bars:
            allowed &= ~tokens
        return self._mask(allowed)

    def _barred(self) -> dict[bytes, int]:
        """The tokens that must not follow a beginning of a marker; after nothing, those that hold too much of one."""
        rests = [(marker[:at], marker[at:]) for marker in (self.ends, self._call) for at in range(1, len(marker))]
        beginnings = tuple(rest for _, rest in rests)
        barred = dict.fromkeys([b"", *(begun for begun, _ in rests)], 0)
        for token in range(self._count):
            text = self.bytes_of(token)
            if self.ends in text[:-1] or (self._call and self._call in text):
                barred[b""] |= 1 << token
            if text.startswith(beginnings):
                for begun, rest in rests:
                    if text.startswith(rest) and (text != rest or begun + rest != self.ends):
                        barred[begun] |= 1 << token
        return barred

    def _mask(self, tokens: int) -> bytes:
        return tokens.to_bytes(-(-self._count // 32) * 4, "little")


class Thoughts:
    """One row's."""

    def __init__(self, reasoning: Reasoning, *, begun: bool) -> None:
        """They begin with the reasoning's token, if the prompt has not `begun` them."""
        self._reasoning, self._tail = reasoning, b""
        self.begun, self.over = begun, False

    @property
    def begins(self) -> int:
        return self._reasoning.begins

    def take(self, token: int) -> bool:
        """Whether it is one of theirs."""
        self.begun = self.begun or token == self.begins
        if self.begun:
            self._tail = (self._tail + self._reasoning.bytes_of(token))[-self._reasoning.longest :]
            self.over = self._tail.endswith(self._reasoning.ends)
        return self.begun

    def allowed(self) -> bytes:
        return self._reasoning.allowed(self._tail)
