"""Probes, metrics, the access log, and the end of a gateway."""

import asyncio
import io
import logging
import os
import pty
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from redis.asyncio import Redis

import worker.jobs
from sluice import Batch, Client
from sluice.batch.registry import BatchRegistry
from sluice.contract import keys
from sluice.contract.batch import BatchState, RequestCounts
from sluice.gateway import ServeSettings, app
from sluice.gateway.app import listen
from sluice.gateway.gateway import Gateway
from sluice.gateway.monitoring import GatewayMetrics
from sluice.gateway.settings import CannotServe
from sluice.log_lines import LineFormatter, wrapped
from sluice.queues import QueueHead
from sluice.webhooks.store import Counts
from tests.fakes import ByteTokenizer, FakeChat, FakeEngine, worker_context
from tests.gateway.chat.test_routes import PATH, data_of, request, text_of, until_running
from tests.gateway.gateways import gateway_process, serving
from tests.queue.helpers import field, listening, settings, working
from tests.support.stack import ROOT, Server
from tests.waiting import until


def test_what_waits_of_webhooks_is_measured() -> None:
    metrics = GatewayMetrics()
    metrics.webhooks.wait(Counts(waiting=2, dead=1, dropped=3, oldest_ms=round(time.time() * 1000) - 60_000))
    metrics.webhooks.ended("failed")
    found = dict(
        line.rsplit(" ", 1) for line in generate_latest(metrics.registry).decode().splitlines() if line[0] != "#"
    )
    numbers = {name: float(found[f"sluice_serve_webhooks_{name}"]) for name in ("waiting", "dead", "dropped")}
    assert numbers == {"waiting": 2, "dead": 1, "dropped": 3}
    assert 59 <= float(found["sluice_serve_webhooks_oldest_seconds"]) < 90
    assert found['sluice_serve_webhook_attempts_total{result="failed"}'] == "1.0"


def test_a_line_for_a_terminal_ends_at_words() -> None:
    line = f"21:30:00 I POST /v1/chat/completions 200 0.123 s chatcmpl-{'a' * 32}"
    assert wrapped(line, 120) == line
    first, second = wrapped(line, 80).split("\n")
    assert first == "21:30:00 I POST /v1/chat/completions 200 0.123 s"
    assert second == f"           chatcmpl-{'a' * 32}"


def test_a_line_for_a_terminal_without_a_width_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"POST /v1/chat/completions 200 {'a' * 32} " * 9
    record = logging.makeLogRecord({"msg": line, "levelno": logging.INFO, "levelname": "INFO"})
    formatter = LineFormatter("%(message)s")
    leader, follower = pty.openpty()
    with open(leader, "rb"), open(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert os.get_terminal_size(follower).columns == 0
        assert formatter.format(record) == line
    assert formatter.format(record) == line  # the terminal is gone
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert formatter.format(record) == line


@pytest.mark.parametrize(("host", "option"), [("127.0.0.1", "--port"), ("localhost.localhost", "--host")])
def test_an_address_that_cannot_be_listened_on_is_refused_with_the_option_that_changes_it(
    host: str, option: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServeSettings(_env_file=None, host=host, port=port)
        with pytest.raises(CannotServe, match=option) as refused:
            listen(settings).close()
    assert str(refused.value).count(host) == 1


async def test_a_gateway_is_ready_while_its_server_answers() -> None:
    settings = ServeSettings(_env_file=None)
    server = Server().start()
    with serving(server.url, settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            assert [(await http.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
            server.stop()
            assert [(await http.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 503]


async def test_the_queues_are_measured_when_no_worker_lives_and_at_most_every_five_seconds() -> None:
    server, hi = Server().start(), [{"role": "user", "content": "Hi"}]
    with serving(server.url, ServeSettings(_env_file=None)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http, Client(server.url) as client:
            for _ in range(3):
                await client.submit(hi, model="nobody")
            await client.submit(hi, model="nobody", lane="batch")
            metrics = (await http.get("/metrics")).text
            await client.submit(hi, model="nobody")
            again = (await http.get("/metrics")).text
    assert "sluice:redis_up 1.0" in metrics
    for read in (metrics, again):
        assert 'sluice:queue_jobs{lane="interactive",model_name="nobody"} 3.0' in read
    assert 'sluice:queue_jobs{lane="batch",model_name="nobody"} 1.0' in metrics
    series = 'sluice:queue_oldest_seconds{lane="interactive",model_name="nobody"} '
    (oldest,) = (line.removeprefix(series) for line in metrics.splitlines() if line.startswith(series))
    assert 0 < float(oldest) < 60


def test_a_model_keeps_its_series_and_a_dead_server_has_none() -> None:
    metrics = GatewayMetrics()
    metrics.queues.set(["a", "a"], [QueueHead("b", "batch", 7, 2, {"t": (5, 1.5)}, True)])

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"sluice:{name}", labels)

    assert (value("workers", model_name="a"), value("redis_up")) == (2, 1)
    assert [value("queue_jobs", model_name=name, lane="batch") for name in "ba"] == [7, 0]
    assert value("queue_oldest_seconds", model_name="b", lane="batch") == 1.5
    metrics.queues.set([], [])
    assert (value("workers", model_name="a"), value("queue_jobs", model_name="b", lane="batch")) == (0, None)
    metrics.queues.clear()
    assert (value("workers", model_name="a"), value("redis_up")) == (None, 0)


async def test_metrics_are_answered_within_seconds_by_a_gateway_that_has_never_reached_its_server() -> None:
    server = Server().start()
    with serving(server.url, ServeSettings(_env_file=None)) as gateway:
        server.stop()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            started = time.monotonic()
            metrics = await http.get("/metrics")
            assert time.monotonic() - started < 3.5  # both readers wait for two seconds, at the same time
    assert metrics.status_code == 200
    assert "sluice:redis_up 0.0" in metrics.text


@pytest.mark.usefixtures("fake_worker")
async def test_requests_are_counted_by_route_and_status(http: httpx.AsyncClient) -> None:
    await http.post(PATH, json=request("1", stream=True))
    await http.get("/secret/path")
    counted = f'http_requests_total{{handler="{PATH}",method="POST",status="200"}} 1.0'
    metrics = ""
    async with asyncio.timeout(30):
        while counted not in metrics:  # it is counted after the answer
            metrics = (await http.get("/metrics")).text
    assert 'http_requests_total{handler="other",method="GET",status="404"} 1.0' in metrics
    assert "secret" not in metrics


def counts(metrics: str) -> dict[str, float]:
    """Return the first tokens, the latencies and the ends by reason that were counted."""
    found = re.findall(r'^vllm:(\w+)(?:_count|_total)\{(?:finished_reason="(\w+)",)?.*\} (\S+)$', metrics, re.MULTILINE)
    return {reason or name: float(value) for name, reason, value in found}


TTFT, E2E = "time_to_first_token_seconds", "e2e_request_latency_seconds"
INTERFACES = [PATH, "/v1/responses", "/v1/messages"]


def asking(text: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return a body for each interface."""
    messages = [{"role": "user", "content": text}]
    bodies = [{"messages": messages}, {"input": text}, {"messages": messages, "max_tokens": 9}]
    return {path: {"model": "default", **body, **fields} for path, body in zip(INTERFACES, bodies, strict=True)}


@pytest.fixture
async def speaking(redis_url: str, db: Redis) -> AsyncIterator[None]:
    """A worker of the model `default` without a model, which reads requests as a worker does and answers `Hi.`."""
    tokenizer, known = ByteTokenizer(), settings(redis_url)
    engine = FakeEngine(lambda request: b"Hi.")
    async with engine, working(known, worker.jobs.chat, context=worker_context(known, engine, tokenizer)):
        await listening(db)
        yield


@pytest.mark.usefixtures("speaking")
@pytest.mark.parametrize("path", INTERFACES)
async def test_the_first_token_of_a_stream_and_the_end_of_each_answer_are_observed_once(
    http: httpx.AsyncClient, path: str
) -> None:
    streamed = await http.post(path, json=asking("Hi.", stream=True)[path])
    assert counts((await http.get("/metrics")).text) == {TTFT: 1, E2E: 1, "stop": 1}
    await http.post(path, json=asking("Hi.")[path])
    job_id = streamed.headers["x-request-id"]
    again = {PATH: [f"/{job_id}", f"/{job_id}/stream"], "/v1/responses": [f"/{job_id}", f"/{job_id}?stream=true"]}
    for rest in again.get(path, []):
        assert (await http.get(path + rest)).status_code == 200
    assert counts((await http.get("/metrics")).text) == {TTFT: 1, E2E: 2, "stop": 2}


@pytest.mark.usefixtures("speaking")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", INTERFACES)
async def test_an_answer_that_fails_is_counted_as_an_error_of_its_model(
    redis_url: str, path: str, stream: bool
) -> None:
    gateway_settings = ServeSettings(_env_file=None, models="gpt-4o=default")
    with serving(redis_url, gateway_settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            too_long = asking("Hi. " * 2000, model="gpt-4o", stream=stream)[path]
            in_stream = stream and path == "/v1/responses"  # as Codex wants it
            assert (await http.post(path, json=too_long)).status_code == (200 if in_stream else 400)
            metrics = (await http.get("/metrics")).text
    assert counts(metrics) == {"error": 1}
    assert 'vllm:request_success_total{finished_reason="error",model_name="default"} 1.0' in metrics


@pytest.mark.usefixtures("speaking")
@pytest.mark.parametrize("stream", [True, False])
async def test_each_choice_is_counted_and_the_first_token_of_all(http: httpx.AsyncClient, stream: bool) -> None:
    await http.post(PATH, json=asking("Hi.", n=3, stream=stream)[PATH])
    first = {TTFT: 1} if stream else {}
    assert counts((await http.get("/metrics")).text) == {**first, E2E: 3, "stop": 3}


@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_cancelled_is_counted_as_aborted(
    http: httpx.AsyncClient, chat: FakeChat, stream: bool
) -> None:
    answer = asyncio.create_task(http.post(PATH, json=request(then="hang", stream=stream)))
    await until_running(chat, 1)
    await http.post(f"{PATH}/{chat.began[0]}/cancel")
    assert '"cancelled"' in (await answer).text
    assert counts((await http.get("/metrics")).text) == {"abort": 1}


@pytest.mark.usefixtures("fake_worker")
async def test_the_access_log_has_the_job_s_id_and_nothing_of_the_prompt(redis_url: str) -> None:
    with gateway_process(redis_url) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            answer = await http.post(f"{PATH}?q=secret", json=request("1", messages=[{"content": "secret"}]))
            await http.get("/a%0Ab")
            await until(lambda: "GET /a%0Ab 404 " in gateway.log())  # it is written after the answer
        log = gateway.log()
    assert f"POST {PATH} 200 " in log
    assert answer.headers["x-request-id"] in log
    assert "secret" not in log


@pytest.mark.usefixtures("fake_worker")
async def test_a_gateway_that_is_stopped_finishes_its_streams_first(redis_url: str) -> None:
    with gateway_process(redis_url) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            body = request(*"12345", pace_s=0.2, stream=True)
            async with http.stream("POST", PATH, json=body) as answer:
                gateway.signal(signal.SIGTERM)
                text = (await answer.aread()).decode()
        assert text_of(data_of(text)) == "12345"
        assert await asyncio.to_thread(gateway.wait, 60) == 0
        assert "Traceback" not in gateway.log()


@pytest.mark.usefixtures("fake_worker")
async def test_a_gateway_that_stops_before_a_stream_ends_breaks_it_off_and_leaves_the_job(
    redis_url: str, db: Redis
) -> None:
    with gateway_process(redis_url, drain_s=0) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            body = request(*"12345" * 20, pace_s=0.3, stream=True)
            async with http.stream("POST", PATH, json=body) as answer:
                gateway.signal(signal.SIGTERM)
                with pytest.raises(httpx.RemoteProtocolError):
                    await answer.aread()
        assert await asyncio.to_thread(gateway.wait, 60) == 0
    assert await field(db, answer.headers["x-request-id"], "state") == "running"


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
async def test_an_exception_is_counted_and_logged_as_the_500_that_its_client_receives(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def fail(*_: object, **options: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Gateway, "authenticate", fail)
    caplog.set_level(logging.INFO, "sluice.gateway.access")
    async with Client(redis_url) as client:
        transport = httpx.ASGITransport(app(client, ServeSettings(_env_file=None)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(path, json=request("1"))
            metrics = (await http.get("/metrics")).text
    assert answer.status_code == 500
    assert f'http_requests_total{{handler="{path}",method="POST",status="500"}} 1.0' in metrics
    assert f"POST {path} 500 " in caplog.messages[0]
    assert caplog.messages[0].endswith(f" {answer.headers['x-request-id']}")


def test_a_gateway_logs_under_one_name_and_its_access_log_under_a_second() -> None:
    sources = [file.read_text() for file in (ROOT / "sluice" / "gateway").rglob("*.py")]
    names = {name for source in sources for name in re.findall(r"getLogger\((.*?)\)", source)}
    assert names == {'"sluice.gateway"', '"sluice.gateway.access"'}


def runs(metrics: str) -> dict[str, float]:
    found = re.findall(r'^sluice_batch_(\w+)\{\w+="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
    return {f"{name} {label}": float(value) for name, label, value in found}


def a_run(id: str, status: BatchState, counts: tuple[int, int, int], age_s: int) -> Batch:
    created = int(time.time()) - age_s
    return Batch(
        id=id, input_file_id="in", completion_window="24h", status=status, created_at=created,
        request_counts=RequestCounts(*counts),
    )  # fmt: skip


async def test_runs_are_in_the_metrics_without_any_worker(redis_url: str, db: Redis) -> None:
    registry = BatchRegistry(db)
    await registry.put(a_run("batch_a", "validating", (0, 0, 0), 7200))
    await registry.put(a_run("batch_b", "validating", (0, 0, 0), 60))
    await registry.put(a_run("batch_c", "in_progress", (100, 40, 2), 3600))
    await registry.put(a_run("batch_d", "completed", (10, 9, 1), 90_000))
    await registry.put(a_run("batch_e", "cancelled", (50, 5, 45), 90_000))
    await db.set("sluice:batch:foreign", "{")
    await registry.put(a_run("batch_f", "in_progress", (8, 0, 0), 10))
    await db.expire(keys.batch("batch_f"), 6 * 86_400)  # its feeder has reported nothing for a day
    with serving(redis_url, ServeSettings(_env_file=None)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            found = runs((await http.get("/metrics")).text)
            ages = {name: found.pop(name) for name in list(found) if name.startswith("oldest")}
            assert found == {
                "runs validating": 2, "runs in_progress": 1, "runs paused": 1, "runs completed": 1, "runs cancelled": 1,
                "lines open": 58 + 8, "lines answered": 54, "lines failed": 48,
            }  # fmt: skip
            assert {name: round(age, -2) for name, age in ages.items()} == {
                "oldest_run_seconds validating": 7200, "oldest_run_seconds in_progress": 3600,
                "oldest_run_seconds paused": 0,
            }  # fmt: skip
            await db.delete(keys.batch("batch_a"))
            assert runs((await http.get("/metrics")).text)["runs validating"] == 2  # they are read once a minute


async def test_metrics_come_at_once_and_as_they_were_while_the_server_is_away() -> None:
    server = Server().start()
    with serving(server.url, ServeSettings(_env_file=None)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            server.stop()
            began = time.monotonic()
            assert "http_requests" in (await http.get("/metrics")).text
            assert time.monotonic() - began < 10  # two seconds, on a busy machine
