"""OpenTelemetry: the trace that a job belongs to, and the spans of gateways and workers, sent to a collector.

Nothing of OpenTelemetry (the extra `traces`) is imported unless its standard variables name a collector. Spans are sent
by a thread of its own from a bounded queue. They hold ids, names and numbers, never prompts or answers."""

import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.contract.phases import JobPhases

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.trace import Span

logger = logging.getLogger("sluice.tracing")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OPERATIONS = {"chat": "chat", "embed": "embeddings", "count": "count_tokens"}  # names of GenAI's, as far as it has one
_received: ContextVar[str] = ContextVar("traceparent", default="")


def read_traceparent(text: str) -> str:
    """Return a `traceparent` in version 00 of W3C's Trace Context; empty for what is none."""
    form = r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
    found = re.fullmatch(form, text)
    if not found or (found[1] == "00" and found[5]):
        return ""
    return f"00-{found[2]}-{found[3]}-{found[4]}"


def current_traceparent() -> str:
    """Return the `traceparent` of OpenTelemetry's current span, or of the request that a gateway answers; empty without
    one. Imports nothing: a caller that has a span has imported OpenTelemetry."""
    opentelemetry = sys.modules.get("opentelemetry.trace")
    context = opentelemetry.get_current_span().get_span_context() if opentelemetry else None
    if context is None or not context.is_valid:
        return _received.get()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def describe_request(model: str) -> None:
    """Add the model that a request asks for to OpenTelemetry's current span, if there is one. Not by GenAI's
    conventions: programs that read these would count the request as a second call of the model."""
    if opentelemetry := sys.modules.get("opentelemetry.trace"):
        opentelemetry.get_current_span().set_attribute("sluice.requested_model", model)


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A job that has ended, as its spans show it. `error`: its type, or `cancelled`; empty if it finished."""

    id: str
    function: str
    model: str
    requested_model: str
    lane: str
    tenant: str
    traceparent: str
    phases: JobPhases
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: str
    error: str

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by GenAI's conventions, and ours."""
        gen_ai: dict[str, Any] = {
            "operation.name": _OPERATIONS.get(self.function, self.function),
            "provider.name": "sluice",
            "request.model": self.requested_model,
            "response.model": self.model,
            "response.id": self.id[:128].encode("utf-8", "replace").decode(),  # a refused one may be anything
            "usage.input_tokens": self.prompt_tokens,
            "usage.output_tokens": self.completion_tokens,
            "usage.cache_read.input_tokens": self.cached_tokens,
        }
        if self.finish_reason:
            gen_ai["response.finish_reasons"] = [self.finish_reason]
        ours = {"lane": self.lane, **({"tenant": self.tenant} if self.tenant else {})}
        failed = {"error.type": self.error} if self.error else {}
        named = {f"gen_ai.{name}": value for name, value in gen_ai.items()}
        return {**named, **{f"sluice.{name}": value for name, value in ours.items()}, **failed}


@dataclass(slots=True)
class _Counts:
    """Spans of this process that are to be sent, and those that the collector has taken."""

    ended: int = 0
    sent: int = 0


class Tracing:
    """Makes the spans of one process. Those of jobs, a millisecond of work each, on a thread of its own."""

    def __init__(self, provider: "TracerProvider", counts: _Counts) -> None:
        self._provider, self._counts = provider, counts
        self._dropped = 0  # jobs
        self._is_closing = False
        self._tracer = provider.get_tracer("sluice")
        self._jobs = queue.Queue[JobTrace | None](2_048)  # as many as spans that wait to be sent
        self._thread = threading.Thread(target=self._make, name="spans", daemon=True)
        self._thread.start()

    def record_job(self, job: JobTrace) -> None:
        """Make the spans of a job, soon. Does not block: beyond a number of jobs that wait, their spans are dropped."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._dropped += 1

    def _make(self) -> None:
        made = 0
        while job := self._jobs.get():
            self._make_spans(job)
            made += 1
            if not self._is_closing:
                time.sleep(0.001)  # the event loop and the engine go on between two jobs
            elif made % 64 == 0:
                self._provider.force_flush()  # some 500 spans: OpenTelemetry drops those beyond 2,048

    def _make_spans(self, job: JobTrace) -> None:
        """Make the spans of a job: one from its submission to its end, with its moments as events, and one below it for
        each phase of all attempts."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        if (times := job.phases.span) is None:
            return
        attributes = job.attributes()
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {job.requested_model}",
            _remote(job.traceparent),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            start_time=_ns(times[0]),
        )
        if span.is_recording():
            below = set_span_in_context(span)
            for phase in job.phases.phases():
                where: dict[str, Any] = {"sluice.attempt": phase.attempt, "sluice.worker": phase.worker}
                child = self._tracer.start_span(phase.name, below, attributes=where, start_time=_ns(phase.began))
                child.end(_ns(times[1] if phase.ended is None else phase.ended))
            for moment in job.phases.moments():
                where = {"sluice.attempt": moment.attempt, "sluice.worker": moment.worker}
                span.add_event(moment.name, where, _ns(moment.at))
            if job.error and job.error != "cancelled":
                span.set_status(Status(StatusCode.ERROR))
        span.end(_ns(times[1]))

    @contextmanager
    def request(self, traceparent: str) -> "Iterator[RequestSpan]":
        """Make the span of a request that a gateway answers, which is the current one in the block."""
        from opentelemetry.trace import SpanKind, use_span

        span = self._tracer.start_span("request", _remote(traceparent), kind=SpanKind.SERVER)
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield RequestSpan(span)

    def close(self) -> None:
        """Send what is queued, for five seconds at most, and for two in which nothing arrives. Logs what was not sent
        since the start."""
        thread = threading.Thread(target=self._end, name="last-spans", daemon=True)
        self._is_closing = True
        thread.start()
        sent, arrived_at = -1, 0.0
        until = time.monotonic() + 5.0
        while thread.is_alive() and time.monotonic() < until:
            if self._counts.sent != sent:
                sent, arrived_at = self._counts.sent, time.monotonic()
            elif time.monotonic() - arrived_at >= 2.0:
                break
            thread.join(timeout=0.05)
        # One entry of the queue tells the thread to end.
        lost, jobs = self._counts.ended - self._counts.sent, self._dropped + max(0, self._jobs.qsize() - 1)
        if lost or jobs:
            logger.warning("the collector has not received %d spans, nor those of %d more jobs", lost, jobs)

    def _end(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._provider.shutdown()


class RequestSpan:
    """The span of a request that a gateway answers."""

    def __init__(self, span: "Span") -> None:
        self._span = span

    def answered(self, method: str, route: str, status: int, id: str) -> None:
        """Add how the request was answered. `id`: its `x-request-id`."""
        from opentelemetry.trace import Status, StatusCode

        self._span.update_name(f"{method} {route}")
        self._span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "http.response.header.x-request-id": [id],
            }
        )
        if status >= 500:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(Status(StatusCode.ERROR))


@contextmanager
def request_span(tracing: Tracing | None, traceparent: str) -> "Iterator[RequestSpan | None]":
    """Let the jobs that are submitted in the block belong to the trace of a request: below a span of this process, if
    it makes any, else below the caller's."""
    if tracing is not None:
        with tracing.request(traceparent) as span:
            yield span
        return
    token = _received.set(read_traceparent(traceparent))
    try:
        yield None
    finally:
        _received.reset(token)


def open_tracing(service: str, instance: str = "", more: Mapping[str, str] | None = None) -> Tracing | None:
    """Return what sends spans to the collector that OpenTelemetry's variables name; None if they name none, or one that
    cannot be sent to, which is logged: a machine may have them for other programs. Those of `more`, of a file, count
    where the environment has none. `instance`: the process's name."""
    for name, value in (more or {}).items():
        if name.startswith("OTEL_"):
            os.environ.setdefault(name, value)
    variable, problem = _asked_by(os.environ)
    if not variable:
        return None
    if problem:
        logger.warning("no traces are sent: %s", problem)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    except ImportError:
        remedy = "install the extra traces (pip install 'mlx-sluice[traces]'), or set OTEL_TRACES_EXPORTER=none"
        logger.warning("no traces are sent: %s is set, but OpenTelemetry is not installed; %s", variable, remedy)
        return None
    counts, ending = _Counts(), threading.Lock()  # spans end on several threads

    class Exporter(OTLPSpanExporter):
        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = super().export(spans)
            counts.sent += len(spans) if result is SpanExportResult.SUCCESS else 0
            return result

    class Processor(BatchSpanProcessor):
        def on_end(self, span: "ReadableSpan") -> None:
            with ending:
                counts.ended += span.context.trace_flags.sampled
            super().on_end(span)

    ours = {"service.name": service, **({"service.instance.id": instance} if instance else {})}
    resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Processor(Exporter()))
    except ValueError as error:
        logger.warning("no traces are sent: a variable OTEL_... is wrong: %s", error)
        return None
    return Tracing(provider, counts)


def _asked_by(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that asks for traces, empty if none does; and why they cannot be sent, empty if they can."""
    exporter = variables.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return "", ""
    if exporter not in ("", "otlp"):
        return "OTEL_TRACES_EXPORTER", f"OTEL_TRACES_EXPORTER: {exporter!r} is not supported; use otlp, or none"
    asking = "OTEL_TRACES_EXPORTER" if exporter else next((name for name in _ENDPOINTS if variables.get(name)), "")
    for name in _PROTOCOLS:  # the first counts
        if protocol := variables.get(name, "").strip():
            known = protocol == "http/protobuf"
            remedy = "use http/protobuf, for which collectors listen on port 4318"
            return asking, "" if known else f"{name}: {protocol!r} is not supported; {remedy}"
    return asking, ""


def _remote(traceparent: str) -> Any:
    """Return OpenTelemetry's context of a span of another process; an empty one, which begins a trace, without one."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if not (known := read_traceparent(traceparent)):
        return Context()
    _, trace_id, span_id, flags = known.split("-")
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _ns(seconds: float) -> int:
    """Return a time as OpenTelemetry has it. 0 would be read as now."""
    return max(1, round(seconds * 1e9))
