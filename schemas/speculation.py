"""The request's fields for speculative decoding."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from schemas.base import MAX_CHARACTERS, Strict
from schemas.messages import TextContent

MOST_DRAFT_TOKENS = 7


class DraftLimit(Strict):
    max_tokens: int = Field(ge=0, le=MOST_DRAFT_TOKENS, description="The longest draft; 0 is off.")


def _tag(value: object) -> str | None:
    if isinstance(value, bool):
        return "boolean"
    return "object" if isinstance(value, dict | DraftLimit) else None


Speculation = Annotated[
    Annotated[bool, Tag("boolean")] | Annotated[DraftLimit, Tag("object")],
    Discriminator(_tag, "wrong_type", "must be true, false or an object with max_tokens"),
]


class Prediction(Strict):
    """OpenAI's: a text that the client expects in the answer, such as a file that is edited."""

    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        """The text; parts are joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @model_validator(mode="after")
    def _not_too_long(self) -> Self:
        if len(self.text) > MAX_CHARACTERS:
            raise ValueError(f"holds more than {MAX_CHARACTERS:,} characters; send fewer")
        return self
