"""A claimed job while it runs, and the ways it can be stopped."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.errors import Cancelled, JobFailure, OwnershipLost, Requeue
from worker.queue.job.channel import JobLog
from worker.queue.job.claims import Claim

Interruption = Cancelled | Requeue | OwnershipLost | JobFailure


@dataclass(slots=True)
class Usage:
    """Counted while the job runs, so that a failure tells what was spent."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int | None = None
    kept_tokens: int | None = None

    def as_event(self) -> dict[str, int]:
        counted = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "image_tokens": self.image_tokens,
            "kept_tokens": self.kept_tokens,
        }
        return {name: tokens for name, tokens in counted.items() if tokens is not None}


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's good ending."""

    finish_reason: str
    timings: dict[str, float]
    result: dict[str, object]


@dataclass(slots=True)
class Job:
    claim: Claim
    log: JobLog
    task: asyncio.Task[None] | None = None
    usage: Usage = field(default_factory=Usage)
    interruption: Interruption | None = None
    began: bool = False  # before that a cancelled task would skip its ending, or end without what has been said
    closing: bool = False  # its ending is being written: too late to stop it

    cleared: Callable[[], None] = lambda: None  # called when its probation is over
    on_probation: bool = False
    body: bytes = b""  # of a job that will be parked

    def keep_body(self, body: bytes) -> None:
        """For the dead letters."""
        self.body = body

    def made_progress(self) -> None:
        """A new token: whatever killed the last worker, this job got past it. A second lapse is not forgiven."""
        if self.on_probation and self.claim.lease_expirations == 1:
            self.on_probation = False
            self.log.fields["probation"] = 0
            self.cleared()

    def interrupt(self, why: Interruption) -> None:
        """Stop it from outside: its task is cancelled, and ends by the first reason given."""
        if self.interruption is None and self.task is not None and not self.closing:
            self.interruption = why
            if self.began:
                self.task.cancel()

    def begin(self) -> None:
        """From here on it can be stopped anywhere. Raises the reason if that was asked for before."""
        self.began = True
        if self.interruption is not None:
            raise self.interruption
