"""A claimed job while it runs, and the ways it can be stopped."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.contract.phases import JobPhases, Mark
from worker.errors import CancelJob, JobFailure, OwnershipLost, Requeue
from worker.monitoring.sink import CallFault
from worker.queue.fleet import JobPrompt
from worker.queue.job.claims import Claim
from worker.queue.job.publisher import JobLog

JobInterruption = CancelJob | Requeue | OwnershipLost | JobFailure


@dataclass(slots=True)
class _RunningUsage:
    """The `Usage` of the final event, counted while the job runs, so that failed and cancelled jobs report it too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int | None = None
    kept_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None

    @property
    def completion_details(self) -> dict[str, dict[str, int]]:
        """The usage's `completion_tokens_details` in OpenAI's form; empty without reasoning and a prediction."""
        names = "reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"
        counts = {name: tokens for name in names if (tokens := getattr(self, name)) is not None}
        return {"completion_tokens_details": counts} if counts else {}

    def as_event(self) -> dict[str, int]:
        """Return the usage of a final event."""
        return {name: tokens for name, tokens in asdict(self).items() if tokens is not None}


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job that finished. `timings` are in seconds, except `tokens_per_s`. `is_answer` is False for a token
    count, which the metrics of answers leave out."""

    finish_reason: str
    timings: dict[str, float]
    result: dict[str, object]
    stop_sequence: str | None = None  # the stop string that ended the answer
    warnings: Sequence[str] = ()  # for the final event; the result has them too
    is_answer: bool = True
    faulty_calls: tuple[CallFault, ...] = ()  # what is wrong with its calls, for the metrics


@dataclass(slots=True)
class Job:
    """A claimed job while it runs on this worker."""

    claim: Claim
    log: JobLog
    task: asyncio.Task[None] | None = None
    usage: _RunningUsage = field(default_factory=_RunningUsage)
    interruption: JobInterruption | None = None
    began: bool = False  # before that, cancelling the task would skip its ending, or the load of its events
    is_ending: bool = False  # its ending is being written: too late to interrupt it

    on_probation_end: Callable[[], None] = lambda: None  # called when its probation is over
    on_probation: bool = False
    prompt: JobPrompt = field(default_factory=JobPrompt)  # what of it is left to compute
    body: bytes = b""  # empty unless the job becomes a dead letter
    phases: JobPhases = field(default_factory=JobPhases)
    function: str = "chat"  # of the job, as far as it is known

    def start(self, loop: asyncio.AbstractEventLoop, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the task that brings the job to its ending, and return it."""
        self.task = loop.create_task(ending)
        return self.task

    def keep_body(self, body: bytes) -> None:
        """Keep the body for the job's dead letter."""
        self.body = body

    def call_of(self, function: str) -> None:
        """Note the function that the job calls."""
        self.function = function

    def begin_phases(self, worker: str, claimed_at: float, seen_at: float) -> None:
        """Begin the phases of this attempt, after those of earlier attempts. `seen_at`: time of their last event."""
        claim, self.phases = self.claim, JobPhases.read(self.claim.phases)
        self.phases.begin(
            claim.attempt, worker, claim.lease_expirations, queued_at=claim.queued_at, seen_at=seen_at, now=claimed_at
        )

    def mark(self, name: Mark, *, ago_s: float = 0.0) -> None:
        """Record that a phase of the job has begun, `ago_s` seconds ago. It is stored with the next events."""
        self.phases.mark(name, self.log.clock.now() - ago_s)
        self.log.store({"phases": self.phases.as_json()})

    def made_progress(self) -> None:
        """End the probation, since the job generated a token after a crash. After a second expired lease it stays."""
        if self.on_probation and self.claim.lease_expirations == 1:
            self.on_probation = False
            self.log.store({"probation": 0})
            self.on_probation_end()

    def interrupt(self, why: JobInterruption) -> None:
        """Stop the job by cancelling its task. The first reason counts; after the ending is begun, none does."""
        if self.interruption is None and self.task is not None and not self.is_ending:
            self.interruption = why
            if self.began:
                self.task.cancel()

    def begin_ending(self) -> None:
        """Ignore interruptions from here on, since the ending is being written."""
        self.is_ending = True

    def begin(self) -> None:
        """Allow the task to be cancelled from here on. Raises the reason if the job was interrupted before."""
        self.began = True
        if self.interruption is not None:
            raise self.interruption
