"""What workers write: results, events, and the lines and reports of OpenAI's Batch API."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from schemas.base import AnyJsonObject, Sent, Strict, TokenCount, describe_types
from sluice.contract import events
from sluice.contract.batch import (
    Batch,
    BatchDetails,
    BatchUsage,
    InputTokens,
    LineDetails,
    OutcomeCounts,
    OutputTokens,
    Problem,
    Problems,
    RequestCounts,
    SlowLine,
)
from sluice.contract.events import FinishReason, JobError, Timings, Usage
from sluice.contract.keys import Lane


class _CompletionUsage(Sent):
    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    total_tokens: TokenCount
    prompt_tokens_details: dict[str, int] = Field(description="cached_tokens; image_tokens if there were images.")
    completion_tokens_details: dict[str, int] | None = Field(
        default=None,
        description="reasoning_tokens, if the model has markers around its reasoning; accepted_prediction_tokens and "
        "rejected_prediction_tokens, if the request has a prediction.",
    )


class _AnswerMessage(Sent):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: None = None


class _Choice(Sent):
    index: Literal[0] = 0
    message: _AnswerMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = Field(default=None, description="OpenAI's form.")


class _SpecPrefill(Sent):
    """SpecPrefill's report on a long prompt: the share that was kept, or why it was computed whole."""

    kept: float | None = Field(default=None, description="Share of the prompt's tokens.")
    draft: str | None = Field(default=None, description="The draft model that scored it.")
    scoring_s: float | None = Field(default=None, description="Time that the draft model took.")
    prefill_s: float | None = Field(
        default=None, description="Time from the claim to the end of the prompt, without scoring."
    )
    skipped: str | None = Field(default=None, description="Why it was computed whole.")


class _DraftCounts(Sent):
    proposed: TokenCount = Field(description="Tokens of drafts that were verified.")
    accepted: TokenCount = Field(description="Those that became a part of the answer.")


class SpeculationReport(_DraftCounts):
    """Speculation of the attempt that finished the job."""

    tokens_per_forward: float = Field(
        description="Tokens of the answer by the forwards that have drawn them, or its end."
    )
    kinds: dict[str, _DraftCounts] = Field(
        description="By the source of the drafts: `copy`, `prediction`, `grammar`, `grammar_guess`, `mtp`, `draft`; "
        "others may follow."
    )
    skipped: str | None = Field(default=None, description="Why no draft was verified.")


class _SluiceDetails(Sent):
    """Fields that OpenAI's object does not have."""

    lane: Lane
    worker: str
    attempt: int = Field(ge=1, description="Number of the attempt that finished it.")
    seed: int
    fingerprint: str
    timings: Timings
    stop_sequence: str | None = Field(default=None, description="As in the final event.")
    rows_mean: float = Field(description="Mean number of rows that decoded in the same step, this one included.")
    kept_tokens: TokenCount | None = Field(default=None, description="As in the final event's usage.")
    specprefill: _SpecPrefill | None = None
    speculation: SpeculationReport | None = Field(
        default=None, description="Absent if nothing was drafted and the request has no field about it."
    )
    warnings: list[str] | None = Field(
        default=None,
        description="What the model may not do, or did not, as the request asks, what of a function's schema its "
        "forced call was not held to, and what was ended since it was a loop. Absent if there is nothing to say.",
    )
    repaired: list[str] | None = Field(
        default=None, description="Mistakes in the answer's tool calls that were put right. Absent if there were none."
    )
    tenant: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class CountResult(Sent):
    """The result of a job of the kind `count`."""

    id: str = Field(description="The job's id.")
    object: Literal["token_count"] = "token_count"
    created: int = Field(description="Unix seconds at the claim.")
    model: str
    usage: _CompletionUsage = Field(description="As of the chat, without an answer.")


class _Embedding(Sent):
    object: Literal["embedding"] = "embedding"
    index: TokenCount = Field(description="Of the input.")
    embedding: list[float] | str = Field(description="The numbers, or base64 of them as little-endian float32.")


class _EmbeddingUsage(Sent):
    prompt_tokens: TokenCount
    total_tokens: TokenCount


class _EmbeddingDetails(Sent):
    lane: Lane
    worker: str
    attempt: int = Field(ge=1, description="Number of the attempt that finished it.")
    fingerprint: str
    timings: Timings
    tenant: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class EmbeddingResult(Sent):
    """The result of a job of the kind `embed`."""

    id: str = Field(description="The job's id.")
    object: Literal["list"] = "list"
    created: int = Field(description="Unix seconds at the claim.")
    model: str
    data: list[_Embedding] = Field(description="In the order of the inputs.")
    usage: _EmbeddingUsage
    sluice: _EmbeddingDetails


class ChatCompletion(Sent):
    id: str = Field(description="The job's id.")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds at the claim.")
    model: str
    system_fingerprint: str
    service_tier: Literal["default", "flex"] = Field(
        default="default", description="The request's: `flex`, or `default` for all others. If absent, from the lane."
    )
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _CompletionUsage
    sluice: _SluiceDetails


describe_types(Usage, Timings, JobError, *get_args(events.JobEvent))

JobEvent = Annotated[events.JobEvent, Field(discriminator="type")]
FinalEvent = Annotated[events.FinalEvent, Field(discriminator="type")]


# Offline batches in the forms of OpenAI's Batch API: input line and output line; the object that reports a run is the
# contract's.

describe_types(Batch, RequestCounts, BatchUsage, InputTokens, OutputTokens, Problem, Problems, BatchDetails)
describe_types(LineDetails, OutcomeCounts, SlowLine)


class BatchLine(Strict):
    """A line of the input file. `body` is a chat request, which is validated separately."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="Chosen by the client and repeated in the answer. Unique in the file."
    )
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: AnyJsonObject = Field(description="A Request.")


class _BatchResponse(Sent):
    status_code: int
    request_id: str = Field(description="The job's id.")
    body: dict[str, Any] = Field(description="A Result, or OpenAI's error object.")


class _BatchError(Sent):
    code: str = Field(
        description="The type of the job's error, or answer_not_json, batch_expired, batch_cancelled, cancelled."
    )
    message: str


class BatchOutput(Sent):
    """A line of the output file, which has `response`, or of the error file, which has `error`, and `response` too if a
    job of the line has ended."""

    id: str
    custom_id: str
    response: _BatchResponse | None
    error: _BatchError | None
    sluice: LineDetails | None = Field(default=None, description="Absent in files of earlier versions.")
