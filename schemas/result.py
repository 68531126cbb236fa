"""The stored result of a finished job: OpenAI's `chat.completion`, with what is ours under `sluice`."""

from typing import Any, Literal

from pydantic import Field

from schemas.base import Sent
from schemas.events import FinishReason, Timings


class CompletionUsage(Sent):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


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
    logprobs: dict[str, Any] | None = None


class SluiceDetails(Sent):
    """What OpenAI's object has no place for."""

    lane: str
    worker: str
    attempt: int
    seed: int
    fingerprint: str
    timings: Timings
    rows_mean: float = Field(description="Rows that decoded beside this one, itself included, per token.")
    kept_tokens: int | None = None
    tenant: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class ChatCompletion(Sent):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: CompletionUsage
    sluice: SluiceDetails
