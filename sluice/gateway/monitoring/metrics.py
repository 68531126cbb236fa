"""Metrics for Prometheus, and what clients wait for. Names are vLLM's if it has the metric, else `sluice_serve_`."""

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sluice.contract.events import Cancelled, Delta, Event, Failed, Finished
from sluice.errors import JobCancelled, JobFailed, SluiceError

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class GatewayMetrics:
    """Counts requests, and measures what their clients wait for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests", "Requests by route and status.", ["method", "handler", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request's headers to the end of its response.",
            ["method", "handler"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._open = Gauge(
            "sluice_serve_open_requests", "Requests whose response is not complete.", registry=self.registry
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from the request to the first text of a streamed answer, as the client waits for it.",
            ["model_name"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from the request to the end of its answer, for each finished choice.",
            ["model_name"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._success = Counter(
            "vllm:request_success",
            "Choices whose end a client waited for, by finished_reason: stop, length, tool_calls, abort (cancelled) or "
            "error (failed).",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def began(self) -> None:
        """Count a request that has begun."""
        self._open.inc()

    def ended(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count a request that has ended. `handler`: the path of its route."""
        self._open.dec()
        self._requests.labels(method, handler, str(status)).inc()
        self._seconds.labels(method, handler).observe(seconds)

    def first_token(self, model: str, seconds: float) -> None:
        """Observe the wait for a streamed answer. `model`: a served name."""
        self._ttft.labels(model).observe(seconds)

    def finished(self, model: str, reason: str, seconds: float) -> None:
        """Count a choice that has finished, and observe the wait for its end."""
        self._success.labels(model, reason).inc()
        self._e2e.labels(model).observe(seconds)

    def not_finished(self, model: str, reason: str) -> None:
        """Count a choice that was cancelled or has failed."""
        self._success.labels(model, reason).inc()


_CANCELLED, _FAILED = "abort", "error"  # vLLM's reasons


class AnswerTimer:
    """Measures the answer to one request, by the events or the results of its jobs."""

    def __init__(self, metrics: GatewayMetrics, model: str, started: float, *, stream: bool) -> None:
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
