"""Exceptions that end a job, an attempt, or the start of a worker."""

from typing import Literal, Self

ErrorType = Literal["invalid_request", "unsupported", "too_large", "overloaded", "deadline", "internal"]


class JobFailure(Exception):
    """Ends the job as `failed`. `message` tells the client what to change, and `param` names the field of the request,
    if it is known."""

    def __init__(self, type: ErrorType, message: str, *, retryable: bool = False, param: str | None = None) -> None:
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
    """Return the failure of a prompt that fills the context. `exact`: if False, `tokens` is a lower bound."""
    has = f"{tokens:,} tokens" if exact else f"at least {tokens:,} tokens"
    return JobFailure(
        "too_large",
        f"The prompt has {has} and the context is {context:,}, the answer included: "
        f"shorten it by at least {tokens - context + 1:,}.",
        param="messages",
    )


class Cancelled(Exception):
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
