"""Answers on the worker's port, in each state of the worker."""

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.client import HTTPConnection, HTTPResponse

import pytest

from tests.scrape import scrape
from tests.support.stack import free_port
from worker.app import served_metrics
from worker.errors import CannotStart
from worker.monitoring.health import Health, HealthPart, Heartbeat
from worker.monitoring.metrics import Metrics
from worker.monitoring.probes import answer_probes
from worker.monitoring.sink import MetricsSink


def probes(port: int, health: Health | None = None) -> AbstractContextManager[None]:
    return answer_probes(port, Metrics("m").registry, health or Health(60))


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read()


def told(port: int, path: str) -> tuple[int, dict[str, str]]:
    answer, body = ask(port, path)
    assert answer.headers["Content-Type"] == "application/json"
    return answer.status, json.loads(body)


def serving(parts: Mapping[str, HealthPart], **pulses: Heartbeat) -> Health:
    health = Health(60)
    health.set_checks(pulses, parts)
    return health


class Stopped(Heartbeat):
    def stalled_s(self) -> float:
        return 11.0


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/healthz/", "/ready", "/metrics/../readyz"])
def test_any_other_path_is_not_found(path: str) -> None:
    with probes(port := free_port()):
        assert [ask(port, path, method)[0].status for method in ("GET", "HEAD")] == [404, 404]


def test_prometheus_which_prefers_openmetrics_reads_names_with_their_colons(capfd: pytest.CaptureFixture[str]) -> None:
    accepted = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    with probes(port := free_port()):
        answer, body = ask(port, "/metrics", Accept=accepted)
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert b'\nvllm:num_requests_running{lane="interactive",model_name="m"} 0.0\n' in body
    assert capfd.readouterr().err == "", "a scrape is logged"


def test_a_path_may_have_a_query() -> None:
    with probes(port := free_port()):
        assert [ask(port, f"{path}?a=1")[0].status for path in ("/metrics", "/healthz", "/readyz")] == [200, 200, 503]


def test_head_has_the_status_of_get_and_no_body() -> None:
    with probes(port := free_port()):
        for path in ("/metrics", "/healthz", "/readyz"):
            (get, body), (head, nothing) = ask(port, path), ask(port, path, "HEAD")
            assert (head.status, head.headers["Content-Type"]) == (get.status, get.headers["Content-Type"])
            assert (nothing, bool(body)) == (b"", True)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/elsewhere"])
def test_any_other_method_is_refused_in_a_plain_line_that_names_those_allowed(path: str, method: str) -> None:
    with probes(port := free_port()):
        answer, body = ask(port, path, method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert body == b"Method not allowed; use GET or HEAD.\n"


@pytest.mark.parametrize("said", ["-1", "x", "9" * 20, "\N{SUPERSCRIPT TWO}"])
def test_a_body_of_any_declared_length_gets_its_answer(said: str) -> None:
    with probes(port := free_port()), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(f"POST /healthz HTTP/1.0\r\nContent-Length: {said}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.0 405 ")


def test_a_body_that_nobody_asked_for_does_not_cost_the_answer() -> None:
    with probes(port := free_port()):
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/healthz", b"x" * 60_000)
        assert connection.getresponse().status == 405


def test_what_is_no_http_is_refused_in_a_plain_line() -> None:
    with probes(port := free_port()), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(b"GET / nonsense\r\n\r\n")
        assert line.makefile("rb").read() == b"Bad request version ('nonsense')\n"


def test_a_worker_that_loads_its_model_is_alive_and_not_ready() -> None:
    with probes(port := free_port()):
        assert told(port, "/healthz") == (200, {"status": "ok"})
        assert told(port, "/readyz") == (503, {"status": "unavailable", "model": "it is loading"})


def test_a_worker_is_ready_if_all_of_its_parts_are() -> None:
    with probes(port := free_port(), serving({"redis": lambda: None}, engine=Heartbeat("engine"))):
        assert told(port, "/readyz") == (200, {"status": "ok", "engine": "ok", "model": "ok", "redis": "ok"})


def test_a_worker_whose_redis_is_away_is_alive_and_not_ready() -> None:
    with probes(port := free_port(), serving({"redis": lambda: "away", "claims": lambda: None}, engine=Heartbeat("e"))):
        assert told(port, "/healthz") == (200, {"status": "ok", "engine": "ok"})
        status, parts = told(port, "/readyz")
        assert (status, parts["redis"], parts["claims"]) == (503, "away", "ok")


def test_a_worker_with_a_part_that_hangs_is_neither() -> None:
    with probes(port := free_port(), serving({}, engine=Stopped("engine"), loop=Heartbeat("loop"))):
        assert told(port, "/healthz") == (
            503,
            {"status": "unavailable", "engine": "no heartbeat for 11 s", "loop": "ok"},
        )
        assert told(port, "/readyz")[0] == 503


@pytest.mark.timing
def test_probes_learn_of_a_hang_before_it_ends_the_process() -> None:
    pulse, health = Heartbeat("loop"), Health(watchdog_s=0.2)
    health.set_checks({"loop": pulse}, {})
    pulse.beat()
    assert health.alive() == {"loop": "ok"}
    time.sleep(0.12)
    assert health.alive() != {"loop": "ok"}


def test_a_taken_port_is_a_reason_not_to_start() -> None:
    port = free_port()
    with probes(port), pytest.raises(CannotStart) as refused, probes(port):
        pass
    assert str(refused.value) == (
        f"SLUICE_METRICS_PORT={port}: the port is in use; set another one for each worker of this machine."
    )


def test_a_worker_that_starts_again_finds_its_port_free() -> None:
    port = free_port()
    for _ in range(3):
        with probes(port):
            scrape(port)


def test_without_a_port_only_the_load_is_counted_and_nobody_listens() -> None:
    before = {*threading.enumerate()}
    with served_metrics("m", None, Health(60)) as metrics:
        assert type(metrics) is MetricsSink
        assert {*threading.enumerate()} <= before


def test_every_measurement_that_is_dropped_without_a_port_is_counted_with_one() -> None:
    received = {name for name, each in vars(MetricsSink).items() if callable(each)}
    assert received - {*vars(Metrics)} == {"measured", "token"}, "which the sink counts itself"


@pytest.mark.timing
def test_it_closes_at_once_though_somebody_hangs_on_the_line() -> None:
    port = free_port()
    with probes(port):
        silent = socket.create_connection(("127.0.0.1", port))
        silent.sendall(b"GET /metr")
        assert scrape(port).names, "others are served meanwhile"
        began = time.monotonic()
    assert time.monotonic() - began < 2
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    silent.close()
