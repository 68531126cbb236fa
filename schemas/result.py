"""The stored result of a finished job: OpenAI's `chat.completion`, with what is ours under `sluice`."""

from typing import Any, Literal

from pydantic import Field

from schemas.base import Sent
from schemas.events import FinishReason, Timings, TokenCount
from schemas.keys import Lane


class CompletionUsage(Sent):
    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    total_tokens: TokenCount
    prompt_tokens_details: dict[str, int] = Field(description="cached_tokens; image_tokens where there were images.")


class AnswerMessage(Sent):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: None = None


class Choice(Sent):
    index: Literal[0] = 0
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = Field(default=None, description="OpenAI's form.")


class SpecPrefill(Sent):
    """The receipt for a long prompt: what was kept of it, or why it was computed whole."""

    kept: float | None = Field(default=None, description="Share of the prompt's tokens.")
    draft: str | None = Field(default=None, description="The model that scored it.")
    scoring_s: float | None = Field(default=None, description="That the draft computed.")
    prefill_s: float | None = Field(default=None, description="From the claim to the end of the prompt, else.")
    skipped: str | None = Field(default=None, description="Why it was computed whole.")


class SluiceDetails(Sent):
    """What OpenAI's object has no place for."""

    lane: Lane
    worker: str
    attempt: int = Field(ge=1, description="The one that finished it.")
    seed: int
    fingerprint: str
    timings: Timings
    rows_mean: float = Field(description="Rows that decoded beside this one, itself included, per token.")
    kept_tokens: TokenCount | None = Field(default=None, description="As in the final event's usage.")
    specprefill: SpecPrefill | None = None
    tenant: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class ChatCompletion(Sent):
    id: str = Field(description="The job's.")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds at the claim.")
    model: str
    system_fingerprint: str
    service_tier: Literal["default", "flex"] = Field(
        default="default", description="The request's: `flex`, or `default` for all others. Absent: as the lane."
    )
    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: CompletionUsage
    sluice: SluiceDetails
