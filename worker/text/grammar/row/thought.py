"""Thoughts of one row: closes them when their budget is out, and masks the tokens before an answer that a grammar
constrains."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from worker.request import GrammarAhead, GrammarError, GrammarState
from worker.text.output.thought import Thought
from worker.text.tokenizer import Vocabulary


class ThoughtLimit:
    """Grammar state that forces the tokens that close a thought, and else is that of the row's grammar, if it has one.
    Within thoughts without a grammar, and after them, there are no masks."""

    def __init__(self, new_thought: Callable[[], Thought], grammar: GrammarState | None, vocab: int) -> None:
        """`new_thought`: returns the thoughts before the answer's first token. `vocab`: tokens in a mask."""
        self._new_thought = new_thought
        self._grammar = grammar
        self._vocab = vocab
        self._thought = new_thought()
        self._accepted = 0

    def reset(self) -> None:
        """Return to the state before the first token of the answer."""
        self._thought, self._accepted = self._new_thought(), 0
        if self._grammar:
            self._grammar.reset()

    @property
    def accepted(self) -> int:
        """Number of tokens of the answer that were accepted."""
        return self._accepted

    @property
    def error(self) -> GrammarError | None:
        """Error of the row's grammar."""
        return self._grammar.error if self._grammar else None

    def accept(self, token: int) -> None:
        """Advance by a token of the answer."""
        self._accepted += 1
        self._thought.append(token)
        if self._grammar:
            self._grammar.accept(token)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, at most 16."""
        self._accepted -= count
        self._thought.remove(count)
        if self._grammar:
            self._grammar.rollback(count)

    def bitmask(self) -> bytes | None:
        """Return the tokens that may come next: see `GrammarState.bitmask`."""
        if forced := self._thought.forced:
            return _only(forced[0], self._vocab)
        return self._grammar.bitmask() if self._grammar else None

    @property
    def is_free(self) -> bool:
        """True unless a token is forced, or the row's grammar holds the next one."""
        return not self._thought.forced and (self._grammar is None or self._grammar.is_free)

    @property
    def takes_drafts(self) -> bool:
        """True unless the row's grammar takes none."""
        return self._grammar is None or self._grammar.takes_drafts

    def ahead(self, draft: Sequence[int]) -> GrammarAhead:
        """Return what may come after a draft: the rest of a closing, or what the row's grammar knows."""
        followed = self._follow(draft)
        forced = self._thought.forced
        self._thought.remove(followed)
        if followed < len(draft):
            return GrammarAhead()
        if forced:
            return GrammarAhead(forced)
        return self._grammar.ahead(draft) if self._grammar else GrammarAhead()

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may come next: see `GrammarState.valid_prefix`."""
        followed = self._follow(tokens)
        self._thought.remove(followed)
        return self._grammar.valid_prefix(tokens[:followed]) if self._grammar else followed

    def masks_along(self, draft: Sequence[int]) -> list[bytes | None]:
        """Return the masks before each token of a draft and after the last: see `GrammarState.masks_along`."""
        masks = self._grammar.masks_along(draft) if self._grammar else list[bytes | None]([None] * (len(draft) + 1))
        followed = 0
        for place in range(len(masks)):
            if forced := self._thought.forced:
                masks[place] = _only(forced[0], self._vocab)
            if not self._follow(draft[place : place + 1]):
                break
            followed += 1
        self._thought.remove(followed)
        return masks[: followed + 1]

    def _follow(self, tokens: Sequence[int]) -> int:
        """Append the tokens to the thought, up to the first that is not the forced one. Return how many."""
        for place, token in enumerate(tokens):
            if self._thought.forced[:1] not in ((), (token,)):
                return place
            self._thought.append(token)
        return len(tokens)


@cache
def _only(token: int, vocab: int) -> bytes:
    """Return the mask of one token. Few tokens close thoughts."""
    return (1 << token).to_bytes(-(-vocab // 32) * 4, "little")


# Token masks for the thoughts before an answer that a grammar constrains.
#
# A thought ends as in the output parser: at the text of its end marker, whichever tokens spell it.


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
