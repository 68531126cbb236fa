"""OpenTelemetry's spans, and when there are any."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from sluice.submission import new_job
from sluice.tracing import JobTrace, Tracing, open_tracing, read_traceparent, request_span
from tests.contract.test_phases import two_attempts
from tests.support.collector import Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
QUESTION = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tracing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    for name, value in collector.variables.items():
        monkeypatch.setenv(name, value)
    opened = open_tracing("sluice-worker", "mac-1")
    assert opened is not None
    yield opened
    opened.close()


def job(**given: Any) -> JobTrace:
    trace = {
        "id": "chat-1", "function": "chat", "model": "qwen", "requested_model": "fast", "lane": "interactive",
        "tenant": "acme", "traceparent": TRACEPARENT, "phases": two_attempts(), "prompt_tokens": 13,
        "completion_tokens": 5, "cached_tokens": 8, "finish_reason": "stop", "error": "",
    }  # fmt: skip
    return JobTrace(**{**trace, **given})


def test_a_job_has_a_span_for_each_phase_below_its_own(tracing: Tracing, collector: Collector) -> None:
    tracing.record_job(job())
    tracing.close()
    top, *phases = sorted(collector.spans, key=lambda span: (span.began, -span.ended))
    assert (top.name, top.trace, top.parent) == ("chat fast", TRACE, PARENT)
    assert [(phase.name, phase.parent) for phase in phases] == [
        (phase.name, top.id) for phase in two_attempts().phases()
    ]
    assert top.events == [
        ("first_token", 17_000_000_000), ("takeover", 21_000_000_000), ("preempt", 23_000_000_000),
        ("resume", 25_000_000_000),
    ]  # fmt: skip
    assert top.attributes["gen_ai.usage.cache_read.input_tokens"] == 8
    assert top.attributes["gen_ai.response.model"] == "qwen"
    assert not top.failed


def test_a_job_that_failed_has_the_type_of_its_error(tracing: Tracing, collector: Collector) -> None:
    tracing.record_job(job(error="too_large", finish_reason=""))
    tracing.record_job(job(error="cancelled", finish_reason="", traceparent="of another program"))
    tracing.close()
    failed, cancelled = (span for span in collector.spans if span.name == "chat fast")
    assert (failed.attributes["error.type"], failed.failed) == ("too_large", True)
    assert (cancelled.attributes["error.type"], cancelled.failed) == ("cancelled", False)
    assert (cancelled.parent, cancelled.trace == TRACE) == ("", False)


def test_a_trace_that_its_caller_has_not_sampled_is_not_sent(tracing: Tracing, collector: Collector) -> None:
    tracing.record_job(job(traceparent=f"00-{TRACE}-{PARENT}-00"))
    tracing.close()
    assert collector.spans == []


def test_jobs_of_a_request_are_below_its_span(tracing: Tracing, collector: Collector) -> None:
    with request_span(tracing, TRACEPARENT) as span:
        submitted = new_job(QUESTION, "qwen")
        assert span is not None
        span.answered("POST", "/v1/chat/completions", 500, submitted.id)
    tracing.close()
    (seen,) = collector.spans
    assert submitted.traceparent == f"00-{TRACE}-{seen.id}-01"
    assert (seen.name, seen.parent, seen.failed) == ("POST /v1/chat/completions", PARENT, True)


def test_without_spans_of_its_own_a_gateway_passes_the_trace_on() -> None:
    with request_span(None, TRACEPARENT):
        assert new_job(QUESTION, "qwen").traceparent == TRACEPARENT
    with request_span(None, "00-nonsense"):
        assert new_job(QUESTION, "qwen").traceparent == ""
    assert new_job(QUESTION, "qwen").traceparent == ""


def test_a_job_belongs_to_the_callers_current_span_or_to_the_one_given() -> None:
    context = SpanContext(int(TRACE, 16), int(PARENT, 16), False, TraceFlags(1))
    with use_span(NonRecordingSpan(context)):
        assert new_job(QUESTION, "qwen").traceparent == TRACEPARENT
        assert new_job(QUESTION, "qwen", traceparent="").traceparent == ""
    with pytest.raises(ValueError, match="traceparent must look like"):
        new_job(QUESTION, "qwen", traceparent="mine")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (TRACEPARENT, TRACEPARENT),
        (f"01-{TRACE}-{PARENT}-01-more", TRACEPARENT),  # of a later version
        (f"{TRACEPARENT}-more", ""),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (TRACEPARENT.upper(), ""),
        (f"{TRACEPARENT}\n", ""),
        ("", ""),
    ],
)
def test_a_traceparent_is_read_as_w3c_says(text: str, read: str) -> None:
    assert read_traceparent(text) == read


@pytest.mark.parametrize(
    "given", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
              {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}]
)  # fmt: skip
def test_without_a_collector_there_are_no_spans(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert open_tracing("sluice-worker") is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin' is not supported; use otlp, or none"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc' is not supported; use http/protobuf",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "is wrong: "),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SPAN_EVENT_COUNT_LIMIT": "many"}, "is wrong: "),
    ],
)
def test_what_cannot_be_sent_is_logged(
    given: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert open_tracing("sluice-worker") is None
    assert why in caplog.text


def test_a_file_names_a_collector_where_the_environment_has_none(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setitem(collector.variables, "OTEL_TRACES_EXPORTER", "otlp")
    for name in collector.variables:  # what is set is reset at the end
        monkeypatch.setenv(name, "none" if name == "OTEL_TRACES_EXPORTER" else "")
    assert open_tracing("sluice-worker", more=collector.variables) is None
    for name in collector.variables:
        monkeypatch.delenv(name)
    tracing = open_tracing("sluice-worker", more={**collector.variables, "PATH": "/nowhere"})
    assert tracing is not None
    tracing.record_job(job())
    tracing.close()
    assert collector.spans
    assert os.environ["PATH"] != "/nowhere"


def test_without_the_extra_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert open_tracing("sluice-worker") is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed" in caplog.text
    assert "pip install 'mlx-sluice[traces]'" in caplog.text


def test_without_a_collector_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys; from sluice.tracing import open_tracing, request_span\n"
        "from sluice.submission import new_job\n"
        "with request_span(open_tracing('x'), ''): new_job([], 'm')\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.timing
def test_the_spans_of_a_busy_time_are_sent_at_the_end(tracing: Tracing, collector: Collector) -> None:
    for _ in range(1_000):
        tracing.record_job(job())
    tracing.close()
    assert len(collector.spans) == 1_000 * (1 + len([*two_attempts().phases()]))


def test_spans_that_the_collector_has_not_received_are_counted_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracing = open_tracing("sluice-worker")
    assert tracing is not None
    tracing.record_job(job())
    tracing.record_job(job(traceparent=f"00-{TRACE}-{PARENT}-00"))  # its caller has not sampled it
    tracing.close()
    spans = 1 + len([*two_attempts().phases()])
    assert f"the collector has not received {spans} spans, nor those of 0 more jobs" in caplog.text


@pytest.mark.timing
def test_a_collector_that_does_not_answer_holds_up_neither_a_job_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "512")
        tracing = open_tracing("sluice-worker")
        assert tracing is not None
        began = time.monotonic()
        for _ in range(5_000):  # more than wait at once: the rest is dropped
            tracing.record_job(job())
        tracing.close()
        assert time.monotonic() - began < 10
