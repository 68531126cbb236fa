"""What can go wrong for a backend, apart from redis-py's own errors."""

from sluice.wire import JobError


class SluiceError(Exception):
    """Base of all of these."""


class UnknownJob(SluiceError):
    """There is no such job: it was never submitted, or its events have expired."""


class JobFailed(SluiceError):
    """The job ended as `failed`; `error` says why, and whether trying again can help."""

    def __init__(self, error: JobError) -> None:
        super().__init__(f"{error.type}: {error.message}")
        self.error = error


class JobCancelled(SluiceError):
    """The job ended as `cancelled`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
