"""Exceptions of the client, apart from redis-py's own errors."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from redis.exceptions import ConnectionError, OutOfMemoryError

from sluice.contract.events import JobError, parse_as
from sluice.wording import counted


class SluiceError(Exception):
    """Base class of the client's exceptions.

    The `args` of each are the parameters of its constructor, in values that JSON can hold: pickle, `copy` and Celery
    make an exception again from its class and its `args`.
    """


class ServerUnreachable(SluiceError, ConnectionError):
    """The server has not answered within the caller's time limit; `__cause__` is redis-py's last error."""


class UnknownJob(SluiceError):
    """The job does not exist: it was never submitted, or its events have expired."""


class UnreadableLog(SluiceError):
    """The list of a job's events holds an item that no worker wrote: it is no event, or its `seq` is not its index."""


class QueueFull(SluiceError):
    """The lane has reached the workers' limit, and nothing was queued. Retry after `retry_after_s` seconds; `length`
    and `limit` count jobs."""

    def __init__(self, length: int, limit: int, retry_after_s: float) -> None:
        super().__init__(length, limit, retry_after_s)
        self.length = length
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        wait_s = max(1, math.ceil(self.retry_after_s))
        limit = counted(self.limit, "job")
        return f"the queue holds {self.length:,} of at most {limit}; room is likely in {wait_s} s"


class ServerFull(SluiceError, OutOfMemoryError):
    """The server refuses all writes, because its memory or its disk is full, and nothing was queued. It has memory
    again when jobs end and their texts expire."""


class NoWorker(SluiceError):
    """No worker serves the model, and nothing was queued. `served`: the models that have workers; `close`: the one with
    the most similar name, or None."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        self.model, self.served = model, tuple(sorted(served))
        self.close = next(iter(get_close_matches(model, self.served, n=1)), None)
        super().__init__(model, self.served)

    def __str__(self) -> str:
        return f"no worker serves {self.model!r}{self.hint}"

    @property
    def hint(self) -> str:
        """The end of a sentence: the most similar served model, or all of them."""
        if self.close:
            return f"; did you mean {self.close!r}?"
        return f"; {describe_served(self.served)}"


def describe_served(models: Collection[str]) -> str:
    """Return a clause that lists the served models."""
    return f"there are workers for {', '.join(sorted(models))}" if models else "no worker is alive"


class JobFailed(SluiceError):
    """The job ended as `failed`; `error` holds the type, the message, and if a retry may succeed."""

    def __init__(self, error: JobError | Mapping[str, Any]) -> None:
        """`error`: or its fields by name, as in the final event."""
        self.error = error if isinstance(error, JobError) else parse_as(JobError, error)
        super().__init__(asdict(self.error))

    def __str__(self) -> str:
        return f"{self.error.type}: {self.error.message}"


class JobCancelled(SluiceError):
    """The job ended as `cancelled`; `reason` is that of the event."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CancelNotStored(SluiceError):
    """Every worker has received the cancel request, but the server is full and did not store it: a job that no
    worker has claimed yet will still run, unless it is cancelled again."""


class UnknownBatch(SluiceError):
    """The offline run does not exist, or has not reported for a week."""


class BatchRefused(SluiceError):
    """An offline run cannot be started or resumed; nothing was changed."""


class BatchTaken(BatchRefused):
    """Another process is feeding this run."""
