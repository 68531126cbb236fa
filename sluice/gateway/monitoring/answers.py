"""What a client waits for: the first token and the end of the answer to one request."""

import time
from collections.abc import Mapping
from typing import Any

from sluice.errors import JobCancelled, JobFailed, SluiceError
from sluice.gateway.monitoring.metrics import Metrics
from sluice.wire import Cancelled, Delta, Event, Failed, Finished

_CANCELLED, _FAILED = "abort", "error"  # vLLM's reasons


class AnswerTimer:
    """Measures the answer to one request, by the events or the results of its jobs."""

    def __init__(self, metrics: Metrics, model: str, started: float, *, stream: bool) -> None:
        """`model`: a served name; `started`: when the request came, by the monotonic clock; `stream`: the client sees
        the first token before the end."""
        self._metrics, self._model = metrics, model
        self._started = started
        self._waits_for_token = stream

    def add_event(self, event: Event) -> None:
        """Count the first token, or the end of a job."""
        match event:
            case Delta() if self._waits_for_token:
                self._waits_for_token = False
                self._metrics.first_token(self._model, self._seconds())
            case Finished():
                self._metrics.finished(self._model, event.finish_reason, self._seconds())
            case Failed():
                self._metrics.not_finished(self._model, _FAILED)
            case Cancelled():
                self._metrics.not_finished(self._model, _CANCELLED)

    def add_result(self, completion: Mapping[str, Any]) -> None:
        """Count the end of a job that has this result."""
        match completion:
            case {"choices": [{"finish_reason": str(reason)}, *_]}:
                self._metrics.finished(self._model, reason, self._seconds())

    def add_error(self, error: SluiceError) -> None:
        """Count the end of a job whose result is this error."""
        match error:
            case JobFailed():
                self._metrics.not_finished(self._model, _FAILED)
            case JobCancelled():
                self._metrics.not_finished(self._model, _CANCELLED)

    def _seconds(self) -> float:
        return time.monotonic() - self._started
