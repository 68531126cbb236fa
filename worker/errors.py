"""Exceptions that end a job, an attempt, or the start of a worker."""

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from sluice.contract.events import ErrorType


class JobFailure(Exception):
    """Ends the job as `failed`. `message` tells the client what to change, and `param` names the field of the request,
    if it is known."""

    def __init__(self, type: "ErrorType", message: str, *, retryable: bool = False, param: str | None = None) -> None:
        super().__init__(type, message)  # what pickle and `copy` call the constructor with
        self.type: ErrorType = type
        self.message = message
        self.retryable = retryable
        self.param = param

    def __str__(self) -> str:
        return self.message

    def about(self, param: str) -> Self:
        """Return the same failure of this field, unless it names one already or is none of the request."""
        is_of_request = self.type in ("invalid_request", "unsupported", "too_large")
        if self.param is not None or not is_of_request:
            return self
        return type(self)(self.type, self.message, retryable=self.retryable, param=param)


def prompt_too_large(tokens: int, context: int, *, exact: bool = True) -> JobFailure:
    """Return the failure of a prompt that fills the context. `exact`: if False, `tokens` is a lower bound.

    Clients compact their conversation after these sentences, which are OpenAI's, so digits have no commas. Some look
    for the words at the end alone: "prompt is too long" (LangChain) and "exceeds the context window" (its streams).
    Claude Code and Qwen Code read the two counts around `>`, to drop as much.
    """
    return context_exceeded(context, f"{'' if exact else 'at least '}{tokens} tokens")


def context_exceeded(context: int, size: str) -> JobFailure:
    """Return the failure of a prompt that is too long for a context of so many tokens."""
    return JobFailure(
        "too_large",
        f"This model's maximum context length is {context} tokens. However, your messages resulted in {size}. "
        f"Please reduce the length of the messages: the prompt is too long ({size} > {context} maximum) and exceeds "
        "the context window.",
        param="messages",
    )


class CancelJob(Exception):
    """Ends the job as `cancelled`. `reason` is sent in the final event."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Requeue(Exception):
    """Returns the job to its queue, since the worker stops. It does not count as a crash."""


class OwnershipLost(Exception):
    """Another attempt owns the job, or the job has ended: this attempt must write nothing more."""


class CannotStart(Exception):
    """Ends the worker before its first job, with a message for the operator."""
