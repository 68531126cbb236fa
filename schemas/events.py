"""What a job says: one JSON object each, in a list and on a channel. `seq` is the index in the list."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import Sent

FinishReason = Literal["stop", "length", "tool_calls"]
ErrorType = Literal["invalid_request", "unsupported", "too_large", "overloaded", "deadline", "internal"]
FINAL = ("finished", "failed", "cancelled")


class Usage(Sent):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = Field(default=0, description="Prompt tokens taken from the prefix cache.")
    kept_tokens: int | None = Field(default=None, description="Prompt tokens left by SpecPrefill.")


class Timings(Sent):
    queue_s: float
    prefill_s: float
    ttft_s: float = Field(description="From the claim to the first token.")
    decode_s: float
    tokens_per_s: float


class JobError(Sent):
    type: ErrorType
    message: str
    retryable: bool = Field(description="Whether the same request may go well later.")


class _Event(Sent):
    id: str
    seq: Annotated[int, Field(ge=0)]
    attempt: Annotated[int, Field(ge=1)]
    ts: float = Field(description="Unix seconds of the server's clock.")


class _AttemptBegins(_Event):
    model: str
    fingerprint: str
    worker: str
    seed: int


class Started(_AttemptBegins):
    type: Literal["started"]


class Progress(_Event):
    type: Literal["progress"]
    phase: Literal["waiting", "scoring", "prefill"]
    done: int
    total: int


class Delta(_Event):
    type: Literal["delta"]
    token_ids: list[int]
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None


class Resumed(_AttemptBegins):
    type: Literal["resumed"]


class Restarted(_AttemptBegins):
    type: Literal["restarted"]


class Finished(_Event):
    type: Literal["finished"]
    finish_reason: FinishReason
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
