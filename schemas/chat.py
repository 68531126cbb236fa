"""The request: the body of OpenAI chat completions, and the few fields that are ours."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from schemas.base import Strict
from schemas.keys import MODEL_NAME

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str = Field(min_length=1, description="A data: URL; http(s) only where the worker allows it.")
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _shape(content: object) -> str:
    return "parts" if isinstance(content, list) else "string"


def content_of(part: type[Any] | Any) -> Any:
    """A string, or a list of `part`."""
    return Annotated[
        Annotated[str, Tag("string")] | Annotated[list[part], Tag("parts")],
        Discriminator(_shape),
    ]


Content = content_of(Part)
TextContent = content_of(TextPart)


class FunctionCall(Strict):
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class SystemMessage(Strict):
    role: Literal["system"]
    content: TextContent
    name: str | None = None


class DeveloperMessage(Strict):
    role: Literal["developer"]
    content: TextContent
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: TextContent | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: str | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class Function(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedTool, Tag("named")],
    Discriminator(lambda choice: "named" if isinstance(choice, dict | NamedTool) else "word"),
]


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat,
    Field(discriminator="type"),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def _listed(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
TenantName = Annotated[str, Field(min_length=1, max_length=128)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class ChatRequest(Strict):
    """One chat. An absent field and `null` mean the same."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = Field(
        default=None, pattern=f"^{MODEL_NAME}$", description="The served name; absent: this worker's."
    )

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None, BeforeValidator(_listed), Field(max_length=16)
    ] = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0)] | None = Field(default=None, description="0 is off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="0 is off.")
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    specprefill: bool | None = None
    specprefill_keep_pct: Annotated[float, Field(ge=0.1, le=1)] | None = Field(
        default=None, description="Of the prompt tokens that are not already cached."
    )

    deadline_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds from submission until the job fails by `deadline`."
    )
    on_disconnect: Literal["continue", "cancel"] | None = None
    tenant: TenantName | None = None
    user: TenantName | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    stream: bool | None = Field(default=None, description="Without effect: every job streams.")
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_the_conversation_alone(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        ours = {"messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template"}
        if taken := sorted(ours & set(kwargs or ())):
            raise ValueError(f"{', '.join(taken)} is set by the worker; leave it out")
        return kwargs

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true beside it")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools beside it")
        return self

    @property
    def output_limit(self) -> int | None:
        """The most tokens the client wants; None leaves it to the worker."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def billed_to(self) -> str | None:
        """The tenant: `tenant`, else `user`."""
        return self.tenant or self.user
