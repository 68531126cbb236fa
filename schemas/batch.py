"""Offline batches in the forms of OpenAI's Batch API: input line, output line, and the object that reports a run."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import AnyJsonObject, Sent, Strict
from schemas.events import TokenCount

BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]


class BatchLine(Strict):
    """A line of the input file. `body` is a chat request, which is validated separately."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="Chosen by the client and repeated in the answer. Unique in the file."
    )
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: AnyJsonObject = Field(description="A Request.")


class BatchResponse(Sent):
    status_code: int
    request_id: str = Field(description="The job's id.")
    body: dict[str, Any] = Field(description="A Result, or OpenAI's error object.")


class BatchError(Sent):
    code: str = Field(
        description="The type of the job's error, or answer_not_json, batch_expired, batch_cancelled, cancelled."
    )
    message: str


class BatchOutput(Sent):
    """A line of the output file, which has `response`, or of the error file, which has `error`, and `response` too if a
    job of the line has ended."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None


class RequestCounts(Sent):
    total: int
    completed: int
    failed: int


class InputTokens(Sent):
    cached_tokens: TokenCount = Field(description="Prompt tokens taken from the prefix cache.")


class OutputTokens(Sent):
    reasoning_tokens: TokenCount


class BatchUsage(Sent):
    """Sums over all answers."""

    input_tokens: TokenCount
    output_tokens: TokenCount
    total_tokens: TokenCount
    input_tokens_details: InputTokens
    output_tokens_details: OutputTokens


class Problem(Sent):
    """An error for which an input file is refused."""

    code: str = Field(description="The name of the rule.")
    message: str
    line: int | None = Field(default=None, description="Counted from 1; null if the error is in the file as a whole.")
    param: str | None = Field(default=None, description="The field.")


class Problems(Sent):
    object: Literal["list"] = "list"
    data: list[Problem]


class BatchDetails(Sent):
    """Fields that OpenAI's object does not have."""

    host: str = Field(description="Host name of the machine that has the files.")
    seconds: float = Field(description="Time since the first line was queued, pauses included.")
    models: dict[str, int] = Field(description="Number of lines by served model.")
    retried: int = Field(description="Lines that were queued more than once.")
    failures: dict[str, int] = Field(description="Number of failed lines by their code in the error file.")
    cut_off: int = Field(default=0, description="Answered lines whose answers reached their limit of tokens.")
    paused_at: int | None = Field(default=None, description="Last report of its feeder; null while a feeder runs.")


class Batch(Sent):
    """State of a run. Times are Unix seconds, and files are paths on the machine that feeds the run."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions"] = "/v1/chat/completions"
    model: str | None = Field(default=None, description="The served model, if it is the same for all lines.")
    errors: Problems | None = None
    input_file_id: str
    completion_window: str = Field(description="A number with unit s, m, h or d.")
    status: BatchState
    output_file_id: str | None = None
    error_file_id: str | None = Field(default=None, description="Set when a line has failed.")
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
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None
    sluice: BatchDetails | None = None
