"""A collector of traces on this machine: OTLP over HTTP, parsed with OpenTelemetry's own messages."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Seen:
    """A span that has arrived. Times are nanoseconds of the Unix epoch."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    began: int
    ended: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    failed: bool


class Collector:
    """Collects spans."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.bodies = b""
        self.variables: dict[str, str] = {}  # for the processes that send

    def add(self, body: bytes) -> None:
        """Add the spans of one request."""
        self.bodies += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_seen(service, span) for span in scope.spans]

    def wait_for(self, done: Callable[[Sequence[Seen]], bool], timeout_s: float = 20.0) -> list[Seen]:
        """Return the spans, oldest first, once the condition is met."""
        until = time.monotonic() + timeout_s
        while not done(self.spans):
            assert time.monotonic() < until, self.spans
            time.sleep(0.02)
        return sorted(self.spans, key=lambda span: (span.began, -span.ended))


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _seen(service: str, span: Span) -> Seen:
    return Seen(
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        [(event.name, event.time_unix_nano) for event in span.events],
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector until the end of the block."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            collector.add(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds
    }
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
