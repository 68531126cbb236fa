"""Offline files: one line in, one line out, and the object that says how a run goes. OpenAI's Batch forms."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import JsonObject, Sent, Strict

BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class BatchLine(Strict):
    """A line of the input file. `body` is a chat request; it is validated as one by itself."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="Yours; the line's answer carries it. Unique in the file."
    )
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: JsonObject = Field(description="A Request.")


class BatchResponse(Sent):
    status_code: int
    request_id: str
    body: dict[str, Any] = Field(description="A Result.")


class BatchError(Sent):
    code: str
    message: str


class BatchOutput(Sent):
    """A line of the output file, which has `response`, or of the error file, which has `error`."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None


class RequestCounts(Sent):
    total: int
    completed: int
    failed: int


class Batch(Sent):
    """How a run goes. Times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions"] = "/v1/chat/completions"
    errors: dict[str, Any] | None = None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None
