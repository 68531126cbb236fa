"""Metrics for Prometheus, and the access log. Metrics have vLLM's names if it has them, else `sluice_serve_`."""

import asyncio
import logging
import time
import uuid
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from redis.exceptions import RedisError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.client import Client
from sluice.contract.batch import Batch
from sluice.contract.events import Cancelled, Delta, Event, Failed, Finished
from sluice.contract.keys import LANES
from sluice.errors import JobCancelled, JobFailed, SluiceError
from sluice.presence import serves
from sluice.queues import QueueHead
from sluice.tracing import RequestSpan, Tracing, request_span
from sluice.webhooks.store import Counts

logger = logging.getLogger("sluice.gateway.access")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)


class WebhookMetrics:
    """Counts what this process delivers, and shows what waits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "sluice_serve_webhook_attempts_total",
            "Attempts to deliver a webhook here, by result: delivered, failed, or dead, the last one.",
            ["result"],
            registry=registry,
        )
        self._waiting = Gauge("sluice_serve_webhooks_waiting", "Deliveries of webhooks that wait.", registry=registry)
        self._oldest = Gauge(
            "sluice_serve_webhooks_oldest_seconds", "Seconds that the oldest one has waited.", registry=registry
        )
        self._dead = Gauge("sluice_serve_webhooks_dead", "Dead letters of webhooks that are kept.", registry=registry)
        self._dropped = Gauge(
            "sluice_serve_webhooks_dropped", "Webhooks dropped because too many waited.", registry=registry
        )

    def ended(self, outcome: str) -> None:
        """Count an attempt to deliver a webhook."""
        self._attempts.labels(outcome).inc()

    def wait(self, counts: Counts) -> None:
        """Set what waits for delivery now."""
        age_s = 0.0 if counts.oldest_ms is None else max(time.time() - counts.oldest_ms / 1000, 0.0)
        self._waiting.set(counts.waiting)
        self._oldest.set(age_s)
        self._dead.set(counts.dead)
        self._dropped.set(counts.dropped)


class _QueueNumbers:
    """Numbers of the queues, whether workers live or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge("sluice:redis_up", "1 if the server of the queue answers, else 0.", registry=registry)
        self._jobs = Gauge(
            "sluice:queue_jobs", "Jobs of a queue, waiting and running.", ["model_name", "lane"], registry=registry
        )
        self._oldest = Gauge(
            "sluice:queue_oldest_seconds",
            "Seconds that the oldest job waits that no worker has, of the 300 at the head of the queue.",
            ["model_name", "lane"],
            registry=registry,
        )
        self._workers = Gauge("sluice:workers", "Workers that take jobs.", ["model_name"], registry=registry)
        self._served = set[str]()  # models that had a worker
        self._lock, self._read_at = asyncio.Lock(), float("-inf")

    async def read(self, client: Client) -> None:
        """Read the queues, unless that was done less than five seconds ago. A server that does not answer within two
        seconds is down."""
        async with self._lock:
            if time.monotonic() - self._read_at < 5.0:
                return
            try:
                async with asyncio.timeout(2.0):
                    workers, heads = await client.workers(), await client.queue_heads()
            except (SluiceError, RedisError, OSError):
                self.clear()
            else:
                self.set([worker.get("model", "") for worker in workers if serves(worker)], heads)
            self._read_at = time.monotonic()

    def clear(self) -> None:
        """Forget the queues of a server that is down: the last known numbers would look like present ones."""
        self._up.set(0)
        for gauge in (self._jobs, self._oldest, self._workers):
            gauge.clear()

    def set(self, serving: Sequence[str], heads: Sequence[QueueHead]) -> None:
        """Set what the server has. `serving`: the model of each worker that takes jobs. A model keeps its series, at
        zero, when its last worker has gone or its queue is empty."""
        self.clear()
        self._up.set(1)
        self._served |= {*serving}
        for model in self._served:
            self._workers.labels(model).set(serving.count(model))
            for lane in LANES:
                self._jobs.labels(model, lane).set(0)
                self._oldest.labels(model, lane).set(0)
        # Any producer can name models that nobody serves, so there may be any number of queues.
        for head in sorted(heads, key=lambda head: -head.jobs)[:200]:
            oldest_s = max((seconds for _, seconds in head.waiting.values()), default=0.0)
            self._jobs.labels(head.model, head.lane).set(head.jobs)
            self._oldest.labels(head.model, head.lane).set(oldest_s)


class _RunNumbers:
    """Numbers of offline runs, which the server of the queue has whether or not a worker is up."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._runs = Gauge(
            "sluice_batch_runs",
            "Offline runs of the last week, by status: validating (waiting, or being read), paused, or as in its "
            "state. Read from the server once a minute; all gateways report the same: use max, not sum.",
            ["status"],
            registry=registry,
        )
        self._lines = Gauge(
            "sluice_batch_lines",
            "Lines of these runs, by outcome: open (of runs that have not ended), answered or failed.",
            ["outcome"],
            registry=registry,
        )
        self._oldest = Gauge(
            "sluice_batch_oldest_run_seconds",
            "Seconds since the oldest run that has not ended was submitted, by status.",
            ["status"],
            registry=registry,
        )
        self._due = 0.0

    async def read(self, batches: Callable[[], Awaitable[Sequence[Batch]]]) -> None:
        """Update the numbers of runs, if they are a minute old; a server that does not answer within two seconds leaves
        them as they are. The reader of `batches` scans all keys."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + 60.0
        try:
            async with asyncio.timeout(2.0):
                runs = await batches()
        except (RedisError, OSError, TimeoutError) as error:
            logger.info("the runs cannot be read: %s", error)
            return
        self.set(runs, time.time())

    def set(self, runs: Sequence[Batch], now: float) -> None:
        """Set the numbers of runs, which are given oldest first."""
        statuses, lines = Tally[str](), Tally[str]()
        oldest = dict[str, float]()
        for run in runs:
            status = run.status if run.sluice.paused_at is None else "paused"
            counts = run.request_counts
            statuses[status] += 1
            lines.update({"answered": counts.completed, "failed": counts.failed})
            if not run.ended:
                lines["open"] += max(counts.total - counts.completed - counts.failed, 0)
                oldest.setdefault(status, max(now - run.created_at, 0.0))
        _replace(self._runs, statuses)
        _replace(self._lines, lines)
        _replace(self._oldest, oldest)


def _replace(gauge: Gauge, values: Mapping[str, float]) -> None:
    """Set the gauge for these labels alone."""
    gauge.clear()
    for label, value in values.items():
        gauge.labels(label).set(value)


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
        self.open = Gauge(
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
        self.webhooks = WebhookMetrics(self.registry)
        self.runs = _RunNumbers(self.registry)

        self.queues = _QueueNumbers(self.registry)

    def ended(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count a request that has ended. `handler`: the path of its route."""
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
            case {"object": "list"}:  # embeddings
                self._metrics.finished(self._model, "stop", self._seconds())

    def add_error(self, error: SluiceError) -> None:
        """Count the end of a job whose result is this error."""
        match error:
            case JobFailed():
                self._metrics.not_finished(self._model, _FAILED)
            case JobCancelled():
                self._metrics.not_finished(self._model, _CANCELLED)

    def _seconds(self) -> float:
        return time.monotonic() - self._started


_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
REQUEST_ID = "access_log_id"  # in the state of a request: its job's id, or else one that is made here
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})


def identify(request: Request, job_id: str) -> None:
    """Make the id of a request's job the `x-request-id` of its response, also if that is an error."""
    setattr(request.state, REQUEST_ID, job_id)


class AccessLog:
    """Logs and counts each response, and gives it an `x-request-id` if it has none."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, paths: Mapping[Any, str], tracing: Tracing | None = None
    ) -> None:
        """`paths`: the path of each route, by its endpoint. `tracing`: makes a span of each request."""
        self._app, self._tracing = app, tracing
        self._metrics, self._paths = metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        response = _Response(send, scope.setdefault("state", {}))
        started = time.monotonic()
        tracing = None if scope["path"] in _QUIET else self._tracing
        with request_span(tracing, Headers(scope=scope).get("traceparent", "")) as span:
            try:
                with self._metrics.open.track_inprogress():
                    await self._app(scope, receive, response.send)
            except Exception:  # the border of a gateway's request: Starlette answers 500 and the server logs the error
                response.failed()
                raise
            finally:
                self._record(scope, response, time.monotonic() - started, span)

    def _record(self, scope: Scope, response: "_Response", seconds: float, span: RequestSpan | None) -> None:
        handler = self._paths.get(scope.get("endpoint"), "other")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.ended(method, handler, response.status, seconds)
        if span is not None:
            span.answered(method, handler, response.status, response.request_id)
        level = logging.DEBUG if handler in _QUIET else logging.INFO
        path = quote(scope["path"][:200])
        status, request = response.status, response.request_id
        record = {"method": method, "path": path, "status": status, "seconds": round(seconds, 3), "request": request}
        logger.log(level, "%s %s %d %.3f s %s", method, path, status, seconds, request, extra=record)


class _Response:
    """Watches the messages of one response."""

    def __init__(self, send: Send, state: dict[str, Any]) -> None:
        """`state`: of the request, which gets an id here."""
        self._send, self._state = send, state
        self._state[REQUEST_ID] = f"req-{uuid.uuid4().hex}"
        self.status = 499  # what proxies log if the client leaves before a response
        self._has_begun = False

    @property
    def request_id(self) -> str:
        """The `x-request-id` of the response."""
        return str(self._state[REQUEST_ID])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            self._state[REQUEST_ID] = headers.setdefault("x-request-id", self.request_id)
        await self._send(message)

    def failed(self) -> None:
        """Note an exception: the status is 500 unless a response has begun."""
        if not self._has_begun:
            self.status = 500  # what Starlette, outside of this middleware, answers an exception with
