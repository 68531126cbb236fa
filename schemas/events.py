"""A job's events: each is one JSON object, in a list and on a channel. `seq` is the index in the list."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from schemas.base import Sent

FinishReason = Literal["stop", "length", "tool_calls"]
ErrorType = Literal["invalid_request", "unsupported", "too_large", "overloaded", "deadline", "internal"]
ProgressPhase = Literal["waiting", "loading", "encoding", "scoring", "prefill"]
FinalType = Literal["finished", "failed", "cancelled"]
FINAL: tuple[FinalType, ...] = get_args(FinalType)

TokenCount = Annotated[int, Field(ge=0)]


class Usage(Sent):
    prompt_tokens: TokenCount
    completion_tokens: TokenCount = Field(description="Sampled tokens: the sum of all `token_ids`.")
    cached_tokens: TokenCount = Field(description="Prompt tokens taken from the prefix cache.")
    image_tokens: TokenCount | None = Field(
        default=None, description="Prompt tokens that stand for images; absent if there were none."
    )
    kept_tokens: TokenCount | None = Field(
        default=None, description="Prompt tokens that SpecPrefill kept; absent if it did not apply."
    )
    reasoning_tokens: TokenCount | None = Field(
        default=None,
        description="Answer tokens of the reasoning, with its markers; absent if the model has no markers around it.",
    )
    accepted_prediction_tokens: TokenCount | None = Field(
        default=None, description="Answer tokens that the request's `prediction` held; absent without a prediction."
    )
    rejected_prediction_tokens: TokenCount | None = Field(
        default=None, description="Tokens of the prediction that were tried in vain; absent without a prediction."
    )


class Timings(Sent):
    queue_s: float = Field(description="From submission to this attempt's claim.")
    prefill_s: float = Field(description="From the claim to the end of the prompt.")
    ttft_s: float = Field(description="From the claim to the first token.")
    decode_s: float = Field(description="From the first token to the last.")
    tokens_per_s: float = Field(
        description="Tokens after the first per second, from the first to the last, as the engine made them; 0 if "
        "there are fewer than two in this attempt."
    )


class JobError(Sent):
    type: ErrorType
    message: str
    retryable: bool = Field(description="The same request may succeed later.")
    param: str | None = Field(
        default=None, description="The field of the request that caused it; absent if none did or it is not known."
    )


class _Event(Sent):
    id: str
    seq: int = Field(ge=0, description="The index in the job's list: 0, 1, 2 ... through all attempts.")
    attempt: int = Field(ge=1, description="Number of the claim that sent it.")
    ts: float = Field(description="Unix seconds of the server's clock, as estimated by the worker.")


class _AttemptBegins(_Event):
    model: str
    fingerprint: str = Field(
        description="Identifies the model: attempts with the same fingerprint and seed sample the same tokens."
    )
    worker: str
    seed: int = Field(description="The request's, or the one that was drawn.")


class Started(_AttemptBegins):
    """The first attempt begins."""

    type: Literal["started"]


class Progress(_Event):
    """Progress before the first token; at most four events a second. The phase `waiting` is made by a reader, and is
    never in the list."""

    type: Literal["progress"]
    seq: int = Field(
        ge=-1, description="The index in the job's list; of the phase `waiting` the last index that its reader has."
    )
    attempt: int = Field(ge=0, description="Number of the claim that sent it; 0 if a reader waits for the first.")
    phase: ProgressPhase
    done: TokenCount
    total: TokenCount
    workers: int | None = Field(
        default=None, ge=0, description="Live workers of the model; only with the phase `waiting`."
    )


class Delta(_Event):
    """Output since the last delta. Text that may be the start of a stop string is held back."""

    type: Literal["delta"]
    token_ids: list[int] = Field(
        description="Each sampled token is in exactly one delta, even if its text is held back. None after a stop."
    )
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(default=None, description="OpenAI's delta form.")
    logprobs: list[dict[str, Any]] | None = Field(default=None, description="OpenAI's form, one entry per token.")


class Resumed(_AttemptBegins):
    """A new attempt continues after the delivered tokens."""

    type: Literal["resumed"]


class Restarted(_AttemptBegins):
    """A new attempt starts over: drop the text so far."""

    type: Literal["restarted"]


class Finished(_Event):
    type: Literal["finished"]
    finish_reason: FinishReason
    stop_sequence: str | None = Field(
        default=None, description="The one of the request's `stop` strings that ended the answer."
    )
    usage: Usage
    timings: Timings


class Failed(_Event):
    type: Literal["failed"]
    error: JobError
    usage: Usage


class Cancelled(_Event):
    type: Literal["cancelled"]
    reason: str
    usage: Usage


Event = Annotated[
    Started | Progress | Delta | Resumed | Restarted | Finished | Failed | Cancelled,
    Field(discriminator="type"),
]
FinalEvent = Annotated[Finished | Failed | Cancelled, Field(discriminator="type")]
