"""Offline batches in the forms of OpenAI's Batch API: input line and output line; the object that reports a run is the
contract's."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import AnyJsonObject, Sent, Strict, describe
from sluice.contract.batch import (
    Batch,
    BatchDetails,
    BatchUsage,
    InputTokens,
    OutputTokens,
    Problem,
    Problems,
    RequestCounts,
)

describe(Batch, RequestCounts, BatchUsage, InputTokens, OutputTokens, Problem, Problems, BatchDetails)


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
