"""The receiver of a worker's measurements."""

from collections.abc import Sequence
from typing import Literal

from sluice.contract.events import ErrorType
from sluice.contract.keys import Lane
from worker.outcomes import StepReport

# What can be wrong with a call that a model writes. It is delivered all the same.
CallFault = Literal["unknown_function", "no_json_object", "missing_argument"]


class MetricsSink:
    """Receives the measurements of one worker, and drops them: a worker without a metrics port needs no Prometheus.
    `Metrics` counts them."""

    # A job's life

    def claimed(self, lane: Lane, *, queue_s: float, lease_expirations: int) -> None:
        """Count a claim. `queue_s`: seconds in the queue. `lease_expirations`: times that the job's lease expired."""

    def first_token(self, lane: Lane, *, ttft_s: float, prefill_s: float, prompt_tokens: int) -> None:
        """Count an attempt's first token, once per attempt, even if it ends the answer."""

    def token(self, lane: Lane, gap_s: float | None) -> None:
        """Count a token of a row, on the event loop. `gap_s`: seconds since the one before; None for the first."""

    def finished(
        self, lane: Lane, reason: str, *, e2e_s: float, decode_s: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Count a finished job. `reason`: its finish reason. `e2e_s`: seconds since submission."""

    def faulty_calls(self, lane: Lane, faults: Sequence[CallFault]) -> None:
        """Count the calls of a finished job in which something is wrong, by the first such thing in each."""

    def failed(self, lane: Lane, error: ErrorType) -> None:
        """Count a failed job."""

    def cancelled(self, lane: Lane) -> None:
        """Count a cancelled job."""

    def released(self, lane: Lane) -> None:
        """Count that a claimed job has left this worker: once per claim, if requeued or lost too."""

    # Current state

    def set_waiting(self, lane: Lane, jobs: int) -> None:
        """Set the number of jobs that wait in the lane's queue."""

    def record_step(self, step: StepReport) -> None:
        """Record a step of the engine."""
