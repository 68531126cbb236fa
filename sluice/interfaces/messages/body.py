"""The body of Anthropic's Messages, and of its token counts. Unknown fields are refused by name."""

from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError

# Anthropic's marks for its cache. Prefixes are cached here with or without them, so their content is not read.
CacheControl = dict[str, Any] | None
BodyText = Annotated[str, Field(min_length=0)]  # a constraint makes pydantic refuse half of a surrogate pair


class _StrictBody(BaseModel):
    """Base of incoming models: unknown names are refused, and nothing is coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextBlock(_StrictBody):
    type: Literal["text"]
    text: BodyText
    cache_control: CacheControl = None
    citations: list[Any] | None = None  # of an earlier answer, sent back


class _Base64Source(_StrictBody):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class _UrlSource(_StrictBody):
    type: Literal["url"]
    url: str = Field(min_length=1)


class _ImageBlock(_StrictBody):
    type: Literal["image"]
    source: Annotated[_Base64Source | _UrlSource, Field(discriminator="type")]
    cache_control: CacheControl = None


class _PlainTextSource(_StrictBody):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: BodyText


class _DocumentBlock(_StrictBody):
    """A document in plain text; PDF files are refused."""

    type: Literal["document"]
    source: Annotated[_PlainTextSource, Field(description="Only plain text.")]
    title: BodyText | None = None
    context: BodyText | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl = None


class _ThinkingBlock(_StrictBody):
    type: Literal["thinking"]
    thinking: BodyText
    signature: str | None = None


class _RedactedThinkingBlock(_StrictBody):
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_StrictBody):
    type: Literal["tool_use"]
    id: BodyText
    name: BodyText
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None  # the model itself, in every call that we answer with
    toolset_name: None = None


ResultBlock = Annotated[TextBlock | _ImageBlock | _DocumentBlock, Field(discriminator="type")]


def _shape(value: object) -> str | None:
    kinds: dict[type, str] = {str: "string", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), None)


_STRING_OR_BLOCKS = Discriminator(_shape, "wrong_type", "Input should be a string or a list of content blocks")
_String = Annotated[BodyText, Tag("string")]


class ToolResultBlock(_StrictBody):
    type: Literal["tool_result"]
    tool_use_id: BodyText
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


UserBlock = Annotated[TextBlock | _ImageBlock | _DocumentBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | _ThinkingBlock | _RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
TextBlocks = Annotated[
    _String | Annotated[list[TextBlock], Field(fail_fast=True), Tag("array")],
    _STRING_OR_BLOCKS,
]


class UserTurn(_StrictBody):
    role: Literal["user"]
    content: Annotated[
        _String | Annotated[list[UserBlock], Field(fail_fast=True), Tag("array")],
        _STRING_OR_BLOCKS,
    ]


class AssistantTurn(_StrictBody):
    role: Literal["assistant"]
    content: Annotated[
        _String | Annotated[list[AssistantBlock], Field(fail_fast=True), Tag("array")],
        _STRING_OR_BLOCKS,
    ]


class CustomTool(_StrictBody):
    """A tool that the client runs."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: BodyText | None = None
    strict: bool | None = None
    cache_control: CacheControl = None
    allowed_callers: list[Literal["direct"]] | None = None
    # Hints to Anthropic's servers: when to load the tool, and how to cut its input into events.
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class HostedTool(_StrictBody, extra="allow"):
    """A tool that Anthropic defines, such as its web search; no worker has it."""

    type: str
    name: str | None = None

    @property
    def title(self) -> str:
        """The name by which the model would call it."""
        return self.name or self.type


def _kind_of_tool(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "hosted"


OfferedTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_kind_of_tool)
]


class _AutoChoice(_StrictBody):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class _AnyChoice(_StrictBody):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class _NamedChoice(_StrictBody):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class _NoChoice(_StrictBody):
    type: Literal["none"]


ToolChoiceOption = Annotated[_AutoChoice | _AnyChoice | _NamedChoice | _NoChoice, Field(discriminator="type")]


class _ThinkingOn(_StrictBody):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)
    display: Literal["summarized", "omitted"] | None = None


class _ThinkingAdaptive(_StrictBody):
    type: Literal["adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class _ThinkingOff(_StrictBody):
    type: Literal["disabled"]


ThinkingOption = Annotated[_ThinkingOn | _ThinkingAdaptive | _ThinkingOff, Field(discriminator="type")]


class _OutputFormat(_StrictBody):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class _Effort(_StrictBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class _OutputConfig(_Effort):
    format: _OutputFormat | None = None


class _ToolReference(_StrictBody):
    type: Literal["tool_reference"]
    name: BodyText


class _ToolDefinition(_StrictBody):
    type: Literal["tool_definition"]
    definition: OfferedTool


class _ToolAddition(_StrictBody):
    """A tool that is offered from here on: one of `tools`, or another."""

    type: Literal["tool_addition"]
    tool: Annotated[_ToolReference | _ToolDefinition, Field(discriminator="type")]
    cache_control: CacheControl = None


class _ToolRemoval(_StrictBody):
    """A tool that is not offered from here on."""

    type: Literal["tool_removal"]
    tool: Annotated[_ToolReference, Field(description="By the name of one of the tools.")]
    cache_control: CacheControl = None


SystemBlock = Annotated[TextBlock | _ToolAddition | _ToolRemoval, Field(discriminator="type")]


class SystemTurn(_StrictBody):
    """Instructions within a conversation. `output_config` holds from here on; a text that is to be cleared is read
    until the next message of the user."""

    role: Literal["system"]
    content: Annotated[
        _String | Annotated[list[SystemBlock], Field(fail_fast=True), Tag("array")],
        _STRING_OR_BLOCKS,
    ]
    output_config: _Effort | None = None
    clear_at: Literal["next_user_message", "never"] | None = None


Message = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class _Metadata(_StrictBody):
    user_id: Annotated[str, Field(min_length=1, max_length=4_096)] | None = None


StopSequence = Annotated[str, Field(min_length=1, max_length=1024)]


class CountBody(_StrictBody):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    system: TextBlocks | None = None
    tools: Annotated[list[OfferedTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingOption | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = None  # edits of the history at Anthropic: none is made here
    speed: Literal["standard", "fast"] | None = None


class MessagesBody(CountBody):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopSequence], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: _Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def omits_thinking(self) -> bool:
        """True if thinking blocks are to have no text."""
        return getattr(self.thinking, "display", None) == "omitted"


def fields_by_type(union: Any) -> dict[str, Collection[str]]:
    """Return the names of the fields of each block of a union, by its type."""
    blocks: tuple[type[BaseModel], ...] = get_args(get_args(union)[0])
    return {get_args(block.model_fields["type"].annotation)[0]: block.model_fields.keys() for block in blocks}


B = TypeVar("B", bound=CountBody)


def validate(kind: type[B], body: dict[str, Any]) -> B:
    """Validate a body. Raises `ApiError` 400 with the first invalid field, as Anthropic writes it:
    `messages.0.content: Field required`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    except RecursionError:
        raise ApiError(ErrorForm.INVALID_REQUEST, "The request is nested too deeply; flatten it.") from None
    place = _place(first["loc"])
    message = f"{place}: {first['msg']}" if place else first["msg"]
    raise ApiError(_form(first["loc"]), message[:500], param=place or None)


def _form(loc: tuple[int | str, ...]) -> ErrorForm:
    """Return the form of an error by its place: an image or a document, without which Claude Code goes on."""
    if "source" not in loc:
        return ErrorForm.INVALID_REQUEST
    return ErrorForm.BAD_IMAGE if "image" in loc else ErrorForm.BAD_DOCUMENT


_SHAPES = {"string", "array"}
_TAGS = {
    "custom", "hosted", "user", "assistant", "system", "text", "image", "document", "tool_result", "thinking",
    "redacted_thinking", "tool_use", "tool_addition", "tool_removal", "tool_reference", "tool_definition", "base64",
    "url", "auto", "any", "tool", "none", "enabled", "adaptive", "between_tools", "disabled",
}  # fmt: skip


def _place(loc: tuple[int | str, ...]) -> str:
    """Return the place of an error, without the tags of unions. Some are also names of fields: at either end."""
    ends = (0, len(loc) - 1)
    named = [(k, step) for k, step in enumerate(loc) if step not in _SHAPES]
    return ".".join(str(step)[:80] for k, step in named if k in ends or step not in _TAGS)
