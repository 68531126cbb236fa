"""What we ask of a model's tokenizer. `worker.engine.words` gives it, from mlx-lm's."""

from collections.abc import Mapping
from typing import Any, Protocol

Conversation = list[dict[str, Any]]
Transitions = dict[str, list[tuple[str, str]]]


class Detokenizer(Protocol):
    """One answer's tokens to text. A code point whose bytes have not all come is held back."""

    def feed(self, token: int) -> str:
        """The text that is out with this token."""

    def flush(self) -> str:
        """No more tokens come: what was held back."""


class Splitter(Protocol):
    """Cuts an answer's text at the model's markers, which it takes out: mlx-lm's state machine.

    States are "normal", "reasoning" and "tool", and those that a format adds. Text that may yet turn out to be
    the start of a marker is held back.
    """

    def feed(self, text: str) -> list[tuple[str, str]]:
        """(state, text) for each state that the text passes through, in order; the last is the present one."""

    def flush(self) -> tuple[str, str]:
        """The present state, and what was held back."""


class ControlTokens(Protocol):
    """The tokens that structure a chat, in texts that merely quote them."""

    def found_in(self, text: str) -> bool: ...

    def mark(self, text: str) -> str:
        """Return the text with its control tokens marked, so that `encode` reads them as text."""

    def unmark(self, text: str) -> str:
        """Return what a marked text, or a piece of one, says."""

    def encode(self, text: str) -> list[int]:
        """Encode a template's text of marked contents: of its control tokens, those that are marked are text. Raises
        ValueError for one that the tokenizer cannot write as text."""


class Tokenizer(Protocol):
    @property
    def tokens(self) -> list[str]:
        """The vocabulary by id, as the tokenizer writes it; empty where there is no such token."""

    @property
    def byte_level(self) -> bool:
        """Whether `tokens` are written in GPT-2's byte alphabet."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def definition(self) -> str | None:
        """The tokenizer's own description, a `tokenizer.json`; None where it has none."""

    @property
    def template(self) -> str:
        """The source of the chat template; empty where it is no text."""

    @property
    def think(self) -> tuple[str, str] | None:
        """The markers around reasoning."""

    @property
    def tool(self) -> tuple[str, str] | None:
        """The markers around a tool call. The second is empty where the call ends with the answer."""

    @property
    def tool_format(self) -> str | None:
        """mlx-lm's name of the way this model writes its calls: json_tools, qwen3_coder, mistral ..."""

    @property
    def control_tokens(self) -> ControlTokens: ...

    def encode(self, text: str) -> list[int]:
        """Markers and control tokens are read as such; none are added."""

    def streaming(self) -> Detokenizer:
        """mlx-lm's own detokenizer for this tokenizer."""

    def splitter(self, initial: str, transitions: Transitions | None = None) -> Splitter:
        """By the given transitions (state to [(marker, next state)]), else by those that mlx-lm infers."""

    def parse_tool_call(self, text: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What stood between the markers to [{name, arguments, maybe id}], through mlx-lm's parser. Raises for what
        is no call, and not ValueError alone: see `worker.text.calls`."""

    def render(
        self, conversation: Conversation, *, tools: list[dict[str, Any]], continues: bool, variables: dict[str, Any],
        images: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """The chat template's text. `continues`: the last message, an assistant's, is left open, else the
        template opens a new one. `images`: by the characters that mark their places in the contents, the texts
        that the model reads for them. Raises what the template raises."""
