"""Protocols of a model's tokenizer, which `worker.engine.tokenizer` implements with mlx-lm's, and pieces of tokens.

The pieces of an answer, joined, equal the decoding of all its tokens."""

import codecs
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

TemplateMessages = list[dict[str, Any]]


class Detokenizer(Protocol):
    """Decodes one answer's tokens. An incomplete code point is held back."""

    def feed(self, token: int) -> str:
        """Return the text that this token completes."""

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""


class ControlTokenEscapes(Protocol):
    """Escapes control tokens, which structure a chat, in texts that only quote them."""

    def found_in(self, text: str) -> bool:
        """True if the text holds a control token."""

    def mark(self, text: str) -> str:
        """Return the text with its control tokens marked, so that `encode` reads them as text."""

    def unmark(self, text: str) -> str:
        """Return a marked text, or a piece of one, without its marks."""

    def encode(self, text: str) -> list[int]:
        """Encode a template's text with marked contents: marked control tokens become text, the others tokens.

        Raises ValueError for a control token that the tokenizer cannot encode as text.
        """


class Tokenizer(Protocol):
    """A model's tokenizer and chat template."""

    @property
    def tokens(self) -> list[str]:
        """The vocabulary by id, as the tokenizer writes it; an empty string for an id without a token."""

    @property
    def byte_level(self) -> bool:
        """True if `tokens` are written in GPT-2's byte alphabet."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that are read in a text before it is split into words, without those of nothing but space."""

    @property
    def encode_literally(self) -> Callable[[str], list[int]] | None:
        """Encodes a text with none of `added_tokens`, and without Unicode's normal forms. None if the tokenizer is in
        Python, or if it is not known which bytes its tokens stand for."""

    @property
    def template(self) -> str:
        """The source of the chat template; empty if it is not text. Of several by name, the sources of those that
        render chats and tools, with a null character between them."""

    @property
    def think(self) -> tuple[str, str] | None:
        """The markers around reasoning, or None."""

    @property
    def tool(self) -> tuple[str, str] | None:
        """The markers around a tool call, or None. The second is empty if a call ends with the answer."""

    @property
    def control_tokens(self) -> ControlTokenEscapes:
        """The vocabulary's control tokens."""

    def encode(self, text: str) -> list[int]:
        """Encode a text. Markers and control tokens in it become tokens; no others, such as BOS, are added."""

    def streaming(self) -> Detokenizer:
        """Return mlx-lm's own detokenizer for this tokenizer."""

    def render(
        self, conversation: TemplateMessages, *, tools: list[dict[str, Any]], continues: bool,
        variables: dict[str, Any], images: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Render the conversation with the chat template.

        `continues`: leave the last message, an assistant's, open; else the template opens a new one. `images`: the
        texts that the model reads for images, by the characters that mark their positions in the contents. Raises
        what the template raises.
        """


_BETWEEN = b"\xff"  # no text in UTF-8 holds this byte
_HEX = re.compile(r"<0x((?:[0-9A-Fa-f]{2})+)>")


def _alphabet() -> dict[int, int]:
    """Return GPT-2's byte alphabet, by code point: printable bytes stand for themselves, and for the others characters
    from 256 on. Characters that are not in it stand for none below 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [value for value in range(256) if value not in printable]
    return dict.fromkeys(hidden, 0xFFFF) | {256 + n: value for n, value in enumerate(hidden)}


_BYTES = _alphabet()


class Vocabulary:
    """The bytes of each token.

    The model's logits may be wider than the tokenizer's vocabulary: ids beyond it have no bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        read = _bytes_from_alphabet if tokenizer.byte_level else _bytes_from_text
        self._bytes = [read(token) for token in tokenizer.tokens]

    def bytes_of(self, token: int) -> bytes:
        """Return the token's bytes, which may be a part of a code point."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def tokens_with(self, text: str | bytes, *, first: bool = False) -> list[int]:
        """Return the tokens that hold this text; with `first` those that begin with it."""
        wanted = text.encode() if isinstance(text, str) else text
        joined, begins = self._joined
        sought, found = _BETWEEN * first + wanted, list[int]()
        place = 0
        while (place := joined.find(sought, place)) >= 0:
            token = bisect_right(begins, place) - 1
            own = self._bytes[token]
            if own.startswith(wanted) if first else wanted in own:
                found.append(token)
            place = begins[token] + 1 + len(own)
        return found

    @cached_property
    def _joined(self) -> "tuple[bytes, array[int]]":
        """The bytes of all tokens, with a byte before each, and its places: to search in them takes a millisecond, and
        to go through a large vocabulary a tenth of a second."""
        begins = array("Q", accumulate((len(each) + 1 for each in self._bytes[:-1]), initial=0))
        return b"".join(_BETWEEN + each for each in self._bytes), begins

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer.

        For byte-level vocabularies it is ours, since mlx-lm's drops an answer's leading space.
        """
        if self._tokenizer.byte_level:
            return _ByteLevel(self._bytes)
        return _WithinVocabulary(self._tokenizer.streaming(), len(self._bytes))


class _ByteLevel:
    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token: int) -> str:
        return self._decode(self._tokens[token]) if token < len(self._tokens) else ""

    def flush(self) -> str:
        return self._decode(b"", True)


class _WithinVocabulary:
    """Ignores ids beyond the vocabulary, on which mlx-lm's detokenizers fail."""

    def __init__(self, inner: Detokenizer, count: int) -> None:
        self._inner = inner
        self._count = count
        self.flush = inner.flush

    def feed(self, token: int) -> str:
        return self._inner.feed(token) if token < self._count else ""


def _bytes_from_alphabet(token: str) -> bytes:
    """Decode a token in GPT-2's byte alphabet. One with other characters was added as plain text."""
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _bytes_from_text(token: str) -> bytes:
    """Decode a token as SentencePiece writes it."""
    if written := _HEX.fullmatch(token):
        return bytes.fromhex(written[1])
    return token.replace("▁", " ").encode()
