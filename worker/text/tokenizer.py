"""Protocols of a model's tokenizer. `worker.engine.tokenizer` implements them with mlx-lm's."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Conversation = list[dict[str, Any]]


class Detokenizer(Protocol):
    """Decodes one answer's tokens. An incomplete code point is held back."""

    def feed(self, token: int) -> str:
        """Return the text that this token completes."""

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""


class ControlTokens(Protocol):
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
    def control_tokens(self) -> ControlTokens:
        """The vocabulary's control tokens."""

    def encode(self, text: str) -> list[int]:
        """Encode a text. Markers and control tokens in it become tokens; no others, such as BOS, are added."""

    def streaming(self) -> Detokenizer:
        """Return mlx-lm's own detokenizer for this tokenizer."""

    def render(
        self, conversation: Conversation, *, tools: list[dict[str, Any]], continues: bool, variables: dict[str, Any],
        images: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Render the conversation with the chat template.

        `continues`: leave the last message, an assistant's, open; else the template opens a new one. `images`: the
        texts that the model reads for images, by the characters that mark their positions in the contents. Raises
        what the template raises.
        """
