"""The messages of a conversation, in OpenAI's form."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from schemas.base import JsonObject, Strict, Text


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    url: str = Field(min_length=1, description="A data: URL; http(s) only if the worker allows it.")
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


# These names of types are also tags of unions: `location.py` follows them through the JSON schema.
def json_type(value: object) -> str | None:
    """Return JSON Schema's name for the value's type, or None if it is not a string, list or object."""
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), None)


_STRING_OR_PARTS = Discriminator(json_type, "wrong_type", "must be a string or a list of parts")
_StringContent = Annotated[Text, Tag("string")]
MessageContent = Annotated[
    _StringContent | Annotated[list[Part], Field(fail_fast=True), Tag("array")], _STRING_OR_PARTS
]
TextContent = Annotated[
    _StringContent | Annotated[list[TextPart], Field(fail_fast=True), Tag("array")], _STRING_OR_PARTS
]


class _FunctionCall(Strict):
    name: Text
    arguments: Text = Field(description="JSON text, as the model wrote it.")


class ToolCall(Strict):
    id: Text
    type: Literal["function"] = "function"
    function: _FunctionCall
    index: int | None = None


class _SystemMessage(Strict):
    role: Literal["system"]
    content: TextContent
    name: Text | None = None


class _DeveloperMessage(Strict):
    role: Literal["developer"]
    content: TextContent
    name: Text | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: MessageContent
    name: Text | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: TextContent | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = Field(default=None, description="Other servers' name for `reasoning`.")
    refusal: Text | None = None
    name: Text | None = None
    # OpenAI's libraries send an answer's empty fields back.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: _FunctionCall | None = Field(default=None, description="The older form of one tool call.")
    provider_specific_fields: JsonObject | None = Field(
        default=None, exclude=True, description="What LiteLLM adds to an answer. Without effect."
    )


class ToolMessage(Strict):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: Text
    name: Text | None = None


class FunctionMessage(Strict):
    """The older form of a tool's result."""

    role: Literal["function"]
    content: TextContent | None = None
    name: Text


Message = Annotated[
    _SystemMessage | _DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]
