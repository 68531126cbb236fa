"""What we ask of a tokenizer: mlx-lm's wrapper has it all."""

from typing import Any, Protocol


class Detokenizer(Protocol):
    """One answer's tokens to text. A code point whose bytes have not all come is held back."""

    @property
    def last_segment(self) -> str:
        """The text since it was last read."""

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None:
        """No more tokens: let go of what was held back."""


class Tokenizer(Protocol):
    @property
    def detokenizer(self) -> Detokenizer:
        """A new one for each answer."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...
