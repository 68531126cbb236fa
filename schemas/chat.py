"""The request: the body of OpenAI chat completions, with a few additional fields."""

from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from schemas.base import MAX_CHARACTERS, JsonObject, Strict, Text
from schemas.messages import Message, TextContent, json_type
from sluice.contract.keys import CACHE_KEY_CHARACTERS, MODEL_NAME, TENANT_CHARACTERS


class DraftLimit(Strict):
    max_tokens: int = Field(ge=0, le=7, description="The longest draft; 0 is off.")


def _tag(value: object) -> str | None:
    if isinstance(value, bool):
        return "boolean"
    return "object" if isinstance(value, dict | DraftLimit) else None


Speculation = Annotated[
    Annotated[bool, Tag("boolean")] | Annotated[DraftLimit, Tag("object")],
    Discriminator(_tag, "wrong_type", "must be true, false or an object with max_tokens"),
]


class _Prediction(Strict):
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


class _Function(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: Text | None = None
    parameters: JsonObject | None = Field(default=None, description="A JSON schema of the arguments.")
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: _Function


class NamedFunction(Strict):
    name: Text


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")] | Annotated[NamedTool, Tag("object")],
    Discriminator(
        lambda choice: "object" if isinstance(choice, NamedTool) else json_type(choice),
        "wrong_type",
        "must be 'none', 'auto', 'required' or an object that names a function",
    ),
]


FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("string")] | Annotated[NamedFunction, Tag("object")],
    Discriminator(
        lambda choice: "object" if isinstance(choice, NamedFunction) else json_type(choice),
        "wrong_type",
        "must be 'none', 'auto' or an object that names a function",
    ),
]


class _JsonSchema(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: Text | None = None
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class _TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: _JsonSchema


ResponseFormat = Annotated[
    _TextFormat | JsonObjectFormat | JsonSchemaFormat,
    Field(discriminator="type"),
]


class _StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


def _listed(stop: object) -> object:
    if not isinstance(stop, str | list | None):
        raise PydanticCustomError("wrong_type", "must be a string or a list of strings")
    return [stop] if isinstance(stop, str) else stop


def _in_parts(bias: object, read: ValidatorFunctionWrapHandler) -> object:
    """Validate the entries four at a time, so that at most four errors are reported.

    From pydantic 2.14 on, `fail_fast` does this for objects too.
    """
    if not isinstance(bias, dict):
        return read(bias)
    if len(bias) > 50_000:  # a fifth of the largest vocabularies
        raise PydanticCustomError("too_long", "", {"actual_length": f"{len(bias):,}", "max_length": "50,000"})
    entries, whole = iter(bias.items()), dict[str, float]()
    while part := dict(islice(entries, 4)):
        whole |= read(part)
    return whole


Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=16, fail_fast=True)]
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
ReasoningTokens = Annotated[int, Field(ge=0)]
TenantName = Annotated[str, Field(min_length=1, max_length=TENANT_CHARACTERS)]
CacheKey = Annotated[str, Field(min_length=1, max_length=CACHE_KEY_CHARACTERS)]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
# Arguments of `apply_chat_template` that are not variables of the template.
_THE_WORKER_S = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


# OpenAI's fields that are passed to the chat template, under the same names.
TEMPLATE_FIELDS = ("reasoning_effort", "verbosity")


class ChatRequest(Strict):
    """The body of a chat completion. An absent field and `null` mean the same."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    model: str | None = Field(
        default=None, pattern=f"^{MODEL_NAME}$", description="The served name; absent: this worker's."
    )

    max_tokens: Count | None = Field(
        default=None,
        description="Reduced to the space that the context leaves. Absent: all of it, unless the worker has a default.",
    )
    max_completion_tokens: Count | None = Field(default=None, description="The same as max_tokens.")
    max_reasoning_tokens: ReasoningTokens | None = Field(
        default=None,
        description="Tokens of reasoning, after which it is closed as the model closes it, and the answer follows. 0 "
        "switches it off. Part of max_tokens. Absent: no limit of its own.",
    )
    thinking_token_budget: ReasoningTokens | None = Field(default=None, description="The same, as vLLM calls it.")
    loop_guard: bool | None = Field(
        default=None,
        description="End reasoning, and at last the answer, that repeats the same tokens over and over. Absent: the "
        "worker's SLUICE_LOOP_GUARD.",
    )
    stop: Annotated[Stops | None, BeforeValidator(_listed, json_schema_input_type=Stop | Stops | None)] = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="0 is greedy. Absent, as for top_p, top_k and min_p: the model's own default."
    )
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0)] | None = Field(default=None, description="0 is off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, description="0 is off.")
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(default=None, description="1 is off.")
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, WrapValidator(_in_parts)] = Field(
        default=None, description="Token ids, as strings, to the value that is added to their logits."
    )
    ignore_eos: bool | None = Field(
        default=None, description="The tokens that end an answer are not drawn, so that it has its full length."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        default=None, description="Absent: drawn, and reported in `started`."
    )

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="Needs logprobs: true.")

    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[_Function], Field(fail_fast=True)] | None = Field(
        default=None, description="The older form of tools. Calls come back as tool_calls."
    )
    function_call: FunctionChoice | None = Field(default=None, description="The older form of tool_choice.")
    chat_template_kwargs: JsonObject | None = Field(
        default=None, description="Variables of the model's chat template, such as enable_thinking."
    )

    reasoning_effort: Effort | None = Field(
        default=None, description="For the chat template, if it reads it; otherwise without effect."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="As reasoning_effort.")

    specprefill: bool | None = Field(default=None, description="Absent: the worker decides.")
    specprefill_keep_pct: Annotated[float, Field(ge=0.1, le=1)] | None = Field(
        default=None, description="Share of the prompt tokens that are not already cached; 1 is all of them."
    )

    speculation: Speculation | None = Field(
        default=None,
        description="If drafts may be verified; never changes the answer. true, as if absent: the worker decides.",
    )
    prediction: _Prediction | None = Field(
        default=None, description="A text that the client expects, used as a draft; never changes the answer."
    )

    deadline_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds from submission until the job fails with `deadline`."
    )
    on_disconnect: Literal["continue", "cancel"] | None = Field(default=None, description="Absent: continue.")
    tenant: TenantName | None = Field(
        default=None, description="The job's tenant. Echoed. Absent: `safety_identifier`, else `user`."
    )
    safety_identifier: TenantName | None = Field(default=None, description="Echoed.")
    user: TenantName | None = Field(default=None, description="Echoed.")
    prompt_cache_key: CacheKey | None = Field(
        default=None, description="Stored with the job: requests with the same key are likely to share a prefix."
    )
    service_tier: ServiceTier | None = Field(
        default=None,
        description="Selects the lane in our client's submit: `flex` is the batch lane. Echoed in the result.",
    )
    metadata: JsonObject | None = Field(default=None, description="Echoed.")
    store: bool | None = Field(default=None, description="Echoed, without effect.")

    stream: bool | None = Field(default=None, description="Without effect: every job streams.")
    stream_options: _StreamOptions | None = Field(default=None, description="Without effect.")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description='Only ["text"].'
    )
    audio: None = Field(default=None, description="Not supported: answers are text.")
    web_search_options: None = Field(default=None, description="Not supported: workers have no web search.")
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(default=None, description="Only 1.")

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_the_conversation_alone(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted(_THE_WORKER_S & set(kwargs or ())):
            raise ValueError(f"cannot set {', '.join(taken)}; the worker does")
        return kwargs

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if disagreement := self._disagreement():
            field, problem = disagreement
            raise PydanticCustomError("disagreement", f"{field} {problem}", {"field": field})
        return self

    def _disagreement(self) -> tuple[str, str] | None:
        """Return a field that does not fit to another, and what is wrong with it."""
        if self.top_logprobs and not self.logprobs:
            return "top_logprobs", "needs logprobs: true"
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            return "max_tokens", "and max_completion_tokens differ; send one of them"
        if len({self.max_reasoning_tokens, self.thinking_token_budget} - {None}) > 1:
            return "max_reasoning_tokens", "and thinking_token_budget differ; send one of them"
        return self._tools_disagreement() or self._functions_disagreement() or self._template_disagreement()

    def _tools_disagreement(self) -> tuple[str, str] | None:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            return "tool_choice", "needs tools"
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            return "tool_choice", "names a function that is not among the tools"
        return None

    def _functions_disagreement(self) -> tuple[str, str] | None:
        if self.functions and self.tools:
            return "functions", "is the older form of tools; send tools alone"
        if isinstance(self.function_call, NamedFunction):
            if self.function_call.name not in {function.name for function in self.functions or ()}:
                return "function_call", "names a function that is not among the functions"
            if self.tool_choice is not None:
                return "function_call", "is the older form of tool_choice; send tool_choice alone"
        return None

    def _template_disagreement(self) -> tuple[str, str] | None:
        kwargs = self.chat_template_kwargs or {}
        for name in TEMPLATE_FIELDS:
            value = getattr(self, name)
            if value is not None and kwargs.get(name, value) != value:
                return name, f"and chat_template_kwargs.{name} differ; send one of them"
        return None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def held_tools(self, *, every: bool) -> list[Tool]:
        """Return the tools whose calls satisfy their schemas in an answer whose text is free: the strict ones, or
        `every` one."""
        return [tool for tool in self.offered_tools if every or tool.function.strict]

    @property
    def constrains_answer(self) -> bool:
        """True if the answer must follow a schema or be a tool call."""
        return self.forces_call or isinstance(self.response_format, JsonObjectFormat | JsonSchemaFormat)

    @property
    def forces_call(self) -> bool:
        """True if the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def reasoning_limit(self) -> int | None:
        """Maximum tokens of the answer's thoughts; None for no limit."""
        return self.thinking_token_budget if self.max_reasoning_tokens is None else self.max_reasoning_tokens

    @property
    def output_limit(self) -> int | None:
        """Maximum tokens of the answer that the client requests; None for the worker's default."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def effective_tenant(self) -> str | None:
        """The tenant: `tenant`, else `safety_identifier`, else `user`."""
        return self.tenant or self.safety_identifier or self.user
