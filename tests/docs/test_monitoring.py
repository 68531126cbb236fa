"""The dashboard and the alerts of examples/monitoring: by our metrics, by promtool, and by a Prometheus that runs."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry

from docs.settings_page import gateway_metrics
from sluice import Client
from tests.support.stack import ROOT, GatewayProcess, Server, WorkerProcess, free_port
from tests.waiting import until
from worker.monitoring.metrics import Metrics

FOLDER = ROOT / "examples" / "monitoring"
ALERTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]
QUERIES = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in PANELS}
_THROUGH_GRAFANA = """
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()
print(JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))
"""
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="needs Prometheus"
)


def series(registry: CollectorRegistry) -> set[str]:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {f"{each.name}{end}" for each in registry.collect() for end in suffixes.get(each.type, ("",))}


def test_they_use_metrics_that_exist() -> None:
    known = series(Metrics("m").registry) | series(gateway_metrics().registry) | {"up"}
    queries = [*(query for panel in QUERIES.values() for query in panel), *(alert["expr"] for alert in ALERTS)]
    used = {name for query in queries for name in re.findall(r"\b(?:vllm:|sluice:|http_|up\b)\w*", query)}
    assert used - known == set()
    assert len(used) > 15


def test_each_alert_has_a_line_that_says_what_to_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


def test_panels_do_not_overlap() -> None:
    taken = [
        (panel["gridPos"]["y"] // 8, column)
        for panel in PANELS
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
    ]
    assert len(taken) == len(set(taken))


@pytest.mark.slow
@pytest.mark.registry
@pytest.mark.parametrize("release", ["1769699379!11.6.0", "1769699998!10.1.0"])  # the newest, and an old one
def test_grafana_s_own_types_of_a_dashboard_lose_and_change_nothing_of_ours(release: str, tmp_path: Path) -> None:
    package = f"grafana-foundation-sdk=={release}"  # its types are made from Grafana's schema
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), package]
    subprocess.run(install, check=True, timeout=300)
    ours = (FOLDER / "dashboard.json").read_text()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    written = subprocess.run(
        [sys.executable, "-c", _THROUGH_GRAFANA], input=ours, env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(written.stdout)
    assert found == overlaid(found, json.loads(ours))


def overlaid(base: Any, more: Any) -> Any:
    """Return `base` with the values of `more` in their places."""
    if isinstance(base, dict) and isinstance(more, dict):
        return base | {name: overlaid(base.get(name), value) for name, value in more.items()}
    if isinstance(base, list) and isinstance(more, list) and len(base) == len(more):
        return [overlaid(old, new) for old, new in zip(base, more, strict=True)]
    return more


def late(metric: str, soon: str, late: str) -> dict[str, tuple[str, str]]:
    """Return a histogram whose times are all below `soon`, or all above that and below `late`."""
    some, none = "0+9x60", "0+0x60"
    labels = 'lane="interactive",model_name="m"'
    buckets = {soon: (some, none), late: (some, some), "+Inf": (some, some)}
    return {f'{metric}_bucket{{{labels},le="{le}"}}': values for le, values in buckets.items()}


# Of each alert: series that it is about, by name, as they are while all is well and when it is to fire.
ENDED = 'vllm:request_success_total{lane="interactive",model_name="m",finished_reason="%s"}'
FIRES: dict[str, dict[str, tuple[str, str]]] = {
    "SluiceDown": {'up{job="sluice-worker"}': ("1+0x60", "0+0x60")},
    "SluiceRedisDown": {"sluice:redis_up": ("1+0x60", "0+0x60")},
    "SluiceNoWorker": {
        'sluice:queue_jobs{model_name="m"}': ("1+0x60", "1+0x60"),
        'sluice:workers{model_name="m"}': ("1+0x60", "0+0x60"),
    },
    "SluiceQueueOld": {'sluice:queue_oldest_seconds{lane="interactive"}': ("29+0x60", "31+0x60")},
    "SluiceSlowFirstToken": late("vllm:time_to_first_token_seconds", "10", "40"),
    "SluiceSlowTokens": late("vllm:inter_token_latency_seconds", "0.5", "5"),
    "SluiceFailures": {ENDED % "stop": ("0+99x60", "0+9x60"), ENDED % "error": ("0+1x60", "0+1x60")},
    "SluiceGatewayErrors": {
        'http_requests_total{handler="h",status="200"}': ("0+99x60", "0+9x60"),
        'http_requests_total{handler="h",status="500"}': ("0+1x60", "0+1x60"),
    },
    "SluiceTakeovers": {'sluice:takeovers_total{model_name="m"}': ("1+0x60", "0+1x60")},
    "SluiceMemoryFull": {"sluice:rows_awaiting_memory": ("0+0x60", "1+0x60")},
    "SluiceMemoryPressure": {"sluice:memory_reclaim": ("2+0x60", "3+0x60")},
    "SluiceOutOfMemory": {"sluice:rows_out_of_memory_total": ("0+0x60", "0+1x60")},
    "SluiceMemoryMispredicted": {
        "sluice:memory_measured_bytes": ("100+0x60", "120+0x60"),
        "sluice:memory_predicted_bytes": ("100+0x60", "100+0x60"),
    },
}  # fmt: skip


@needs_prometheus
def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    assert {*FIRES} == {alert["alert"] for alert in ALERTS}
    wrong = []
    for name, about in FIRES.items():
        for fires in (False, True):
            command = ["promtool", "test", "rules", _write(tmp_path, name, about, fires)]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            # promtool compares whole alerts; here only whether there is one, which it prints as what it `got`.
            printed = "".join((said.stdout + said.stderr).split())
            assert "got:" in printed, printed
            if ("got:[]" in printed) is fires:
                wrong.append((name, fires))
    assert wrong == []


def _write(folder: Path, alert: str, about: dict[str, tuple[str, str]], fires: bool) -> str:
    """Write a test which expects an alert that never comes, so that promtool prints what came."""
    file = folder / "test.yml"
    given = [{"series": name, "values": values[fires]} for name, values in about.items()]
    expected = {"eval_time": "45m", "alertname": alert, "exp_alerts": [{"exp_labels": {"never": "this"}}]}
    test = {"interval": "1m", "input_series": given, "alert_rule_test": [expected]}
    file.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yml")], "tests": [test]}))
    return str(file)


@contextmanager
def prometheus(folder: Path, worker_port: int, gateway_port: int) -> Iterator[httpx.Client]:
    """Run Prometheus with our files, its times a hundredth of theirs."""
    rules = (FOLDER / "alerts.yml").read_text()
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    (folder / "alerts.yml").write_text(re.sub(r"\[\d+m\]", "[10s]", rules))
    config = (FOLDER / "prometheus.yml").read_text().replace("15s", "500ms\n  evaluation_interval: 500ms")
    config = config.replace("localhost:9100", f"127.0.0.1:{worker_port}")
    (folder / "prometheus.yml").write_text(config.replace("localhost:8000", f"127.0.0.1:{gateway_port}"))
    port = free_port()
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=20) as api:
            yield api
    finally:
        process.terminate()
        process.wait(20)


def firing(api: httpx.Client) -> set[str]:
    try:
        alerts = api.get("/alerts").json()["data"]["alerts"]
    except (httpx.HTTPError, ValueError, KeyError):
        return {"not up yet"}
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def without_data(api: httpx.Client) -> list[str]:
    """Return the queries of the dashboard that have no number."""
    queries = [query.replace("$__rate_interval", "10s") for panel in QUERIES.values() for query in panel]
    answers = {query: api.get("/query", params={"query": query}).json()["data"]["result"] for query in queries}
    return [query for query, found in answers.items() if not any(each["value"][1] != "NaN" for each in found)]


@pytest.mark.slow
@needs_prometheus
async def test_every_panel_has_data_and_a_dead_fleet_and_server_are_told_and_cleared(tmp_path: Path) -> None:
    metrics_port = free_port()
    hello = {"model": "default", "messages": [{"role": "user", "content": "Count to 12."}]}

    with Server(args=("--appendonly", "yes")) as server, GatewayProcess(server.url) as gateway:
        worker = WorkerProcess(server.url, metrics_port=metrics_port, lease_s=2)
        with worker, prometheus(tmp_path, metrics_port, gateway.port) as api:
            async with Client(server.url) as client, httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as http:

                async def is_seen() -> bool:
                    await http.post("/chat/completions", json=hello)
                    await http.post("/chat/completions", json={**hello, "temperature": "hot"})
                    return firing(api) == set() and without_data(api) == []

                deadline = asyncio.get_running_loop().time() + 60
                while not await is_seen():
                    assert asyncio.get_running_loop().time() < deadline, (firing(api), without_data(api))
                worker.kill()
                await client.submit(hello["messages"])  # type: ignore[arg-type]
                await until(lambda: {"SluiceDown", "SluiceNoWorker"} <= firing(api), within_s=60)
                worker.start()
                await until(lambda: firing(api) == set(), within_s=60)
                server.kill()
                await until(lambda: "SluiceRedisDown" in firing(api), within_s=60)
                server.start()
                await until(lambda: firing(api) == set(), within_s=60)
