"""How a job can end badly, and how a start can."""

from typing import Literal

ErrorType = Literal["invalid_request", "unsupported", "too_large", "overloaded", "deadline", "internal"]


class JobFailure(Exception):
    """The job ends as `failed`, and `message` tells the client what to change."""

    def __init__(self, type: ErrorType, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.type: ErrorType = type
        self.message = message
        self.retryable = retryable


def prompt_too_large(tokens: int, context: int, *, exact: bool = True) -> JobFailure:
    """`exact`: whether `tokens` is the prompt's length, or a lower bound of it."""
    has = f"{tokens:,} tokens" if exact else f"at least {tokens:,} tokens"
    return JobFailure(
        "too_large",
        f"The prompt has {has} and the context is {context:,}, the answer included: "
        f"shorten it by at least {tokens - context + 1:,}.",
    )


class Cancelled(Exception):
    """The job ends as `cancelled`: somebody asked for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Requeue(Exception):
    """The worker stops: the job goes back to its queue as it was, and no try is counted."""


class OwnershipLost(Exception):
    """Another attempt owns the job, or it has ended: nothing of ours may be written any more."""


class CannotStart(Exception):
    """The worker ends before its first job, with a sentence for whoever started it."""
