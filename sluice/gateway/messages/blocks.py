"""The content blocks of Anthropic's Messages, as requests hold them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

# Anthropic's marks for its cache. Prefixes are cached here with or without them, so their content is not read.
CacheControl = dict[str, Any] | None
Text = Annotated[str, Field(min_length=0)]  # a constraint makes pydantic refuse half of a surrogate pair


class Strict(BaseModel):
    """Base of incoming models: unknown names are refused, and nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextBlock(Strict):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl = None
    citations: list[Any] | None = None  # of an earlier answer, sent back


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Strict):
    type: Literal["url"]
    url: str = Field(min_length=1)


class ImageBlock(Strict):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl = None


class PlainTextSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: Text


class DocumentBlock(Strict):
    """A document in plain text; PDF files are refused."""

    type: Literal["document"]
    source: Annotated[PlainTextSource, Field(description="Only plain text.")]
    title: Text | None = None
    context: Text | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl = None


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None  # the model itself, in every call that we answer with
    toolset_name: None = None


ResultBlock = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]


def _shape(value: object) -> str | None:
    kinds: dict[type, str] = {str: "string", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), None)


_STRING_OR_BLOCKS = Discriminator(_shape, "wrong_type", "Input should be a string or a list of content blocks")
_String = Annotated[Text, Tag("string")]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: (
        Annotated[
            _String | Annotated[list[ResultBlock], Field(fail_fast=True), Tag("array")],
            _STRING_OR_BLOCKS,
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: None = None


UserBlock = Annotated[TextBlock | ImageBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
TextContent = Annotated[
    _String | Annotated[list[TextBlock], Field(fail_fast=True), Tag("array")],
    _STRING_OR_BLOCKS,
]


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[
        _String | Annotated[list[UserBlock], Field(fail_fast=True), Tag("array")],
        _STRING_OR_BLOCKS,
    ]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[
        _String | Annotated[list[AssistantBlock], Field(fail_fast=True), Tag("array")],
        _STRING_OR_BLOCKS,
    ]


class SystemMessage(Strict):
    role: Literal["system"]
    content: TextContent


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
