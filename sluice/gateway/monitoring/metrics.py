"""A gateway's Prometheus metrics. Names are vLLM's if it has the metric; ours begin with `sluice_serve_`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class Metrics:
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
