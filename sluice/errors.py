"""What can go wrong for a backend, apart from redis-py's own errors."""

import math
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from redis.exceptions import ConnectionError

from sluice.wire import JobError
from sluice.wording import counted


class SluiceError(Exception):
    """Base of all of these."""


class ServerUnreachable(SluiceError, ConnectionError):
    """The server has not answered for as long as the caller is ready to wait; its cause is redis-py's last error."""


class UnknownJob(SluiceError):
    """There is no such job: it was never submitted, or its events have expired."""


class UnreadableLog(SluiceError):
    """The list of a job's events holds an item that no worker wrote."""


class QueueFull(SluiceError):
    """The lane is at the workers' limit, and nothing was queued. Try again after `retry_after_s`."""

    def __init__(self, length: int, limit: int, retry_after_s: float) -> None:
        wait_s = max(1, math.ceil(retry_after_s))
        super().__init__(f"the queue holds {length:,} of at most {counted(limit, 'job')}; room is likely in {wait_s} s")
        self.length, self.limit, self.retry_after_s = length, limit, retry_after_s


class NoWorker(SluiceError):
    """No worker serves the model, and nothing was queued. `served`: the models that are; `close`: one of them that may
    be meant."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        self.model, self.served = model, tuple(sorted(served))
        self.close = next(iter(get_close_matches(model, self.served, n=1)), None)
        super().__init__(f"no worker serves {model!r}{self.hint}")

    @property
    def hint(self) -> str:
        """What is served instead, to go behind a sentence."""
        if self.close:
            return f"; did you mean {self.close!r}?"
        return f"; {describe_served(self.served)}"


def describe_served(models: Collection[str]) -> str:
    """Name the models that are served instead."""
    return f"there are workers for {', '.join(sorted(models))}" if models else "no worker is alive"


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


class CancelNotStored(SluiceError):
    """Every worker was told to cancel the job, but the server is out of memory and did not keep the request: a job
    that no worker knows yet will still run, unless it is cancelled again."""


class UnknownBatch(SluiceError):
    """There is no such offline run, or nothing has been heard of it for a week."""


class BatchRefused(SluiceError):
    """An offline run cannot be started or resumed, and nothing was changed."""


class BatchTaken(BatchRefused):
    """Another process is feeding this run."""
