"""The Dockerfile and docker-compose.yml, as far as they can be held to what is here without Docker."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml  # type: ignore[import-untyped]

from sluice.gateway.settings import ServeSettings
from tests.support.stack import ROOT, GatewayProcess, Server, WorkerProcess, free_port
from tests.waiting import until
from worker.environment import variable
from worker.settings import Settings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
MOUNTS = [tuple(each.split(":")) for service in SERVICES.values() for each in service["volumes"]]


def stages() -> dict[str, str]:
    """Return the text of each stage of the Dockerfile by its name."""
    parts = re.split(r"^FROM .*", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE), parts[1:], strict=True))


def test_the_dockerfile_is_linted() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    linted = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_dockerfile_names_files_stages_and_extras_that_exist() -> None:
    copied = [
        source for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE) for source in line.split()
    ]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert "worker" in copied
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert set(copied) & set(ignored) == set()
    assert set(re.findall(r"^(?:FROM|COPY --from=)(\S+)", DOCKERFILE, re.MULTILINE)) - {"", *stages()} == set()
    assert [*stages()][-1] == "worker"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"worker", "cuda"} == set(re.findall(r"EXTRA=(\w+)", DOCKERFILE)) <= set(project)
    client = tomllib.loads((ROOT / "sluice/pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cli", "serve"} <= set(client)


def test_images_run_commands_that_exist_as_a_user_without_rights() -> None:
    for stage in ("worker", "gateway"):
        assert "USER 1000\nCMD " in stages()[stage]
        command = yaml.safe_load(re.findall(r"^CMD (.*)$", stages()[stage], re.MULTILINE)[0])
        run = (
            [sys.executable, *command[1:]]
            if command[0] == "python"
            else [Path(sys.executable).parent / command[0], *command[1:]]
        )
        assert subprocess.run([*run, "--help"], capture_output=True, timeout=60, cwd="/").returncode == 0
    assert "--uid 1000 sluice" in stages()["base"]


def test_services_name_files_volumes_and_services_that_exist() -> None:
    binds = [source for source, *_ in MOUNTS if source.startswith((".", "/"))]
    assert [source for source in binds if not (ROOT / source).exists()] == []
    assert {source for source, *_ in MOUNTS} - set(binds) == set(COMPOSE["volumes"])
    assert all(each["healthcheck"]["test"][0] == "CMD" for each in SERVICES.values())
    assert {name for each in SERVICES.values() for name in each.get("depends_on", ())} <= set(SERVICES)
    for service in (each for each in SERVICES.values() if "build" in each):
        target = {"context": ".", "target": "worker"} | (service["build"] if isinstance(service["build"], dict) else {})
        assert target["target"] in stages()


def test_volumes_of_ours_are_folders_that_the_image_gives_to_its_user() -> None:
    own = {target for service in ("worker", "gateway") for each in SERVICES[service]["volumes"]
           for source, target, *_ in [each.split(":")] if source in COMPOSE["volumes"]}  # fmt: skip
    (made,) = re.findall(r"install -d -o sluice (.*)$", stages()["base"], re.MULTILINE)
    assert own <= set(made.split())


def test_ports_are_open_to_this_machine_alone_and_no_two_are_alike() -> None:
    ports = [each.split(":") for service in SERVICES.values() for each in service.get("ports", ())]
    assert all(address == "127.0.0.1" for address, *_ in ports)
    assert len({outer for _, outer, _ in ports}) == len(ports)


def test_variables_are_settings() -> None:
    known = {variable(name) for name in Settings.model_fields} | {
        f"SLUICE_SERVE_{name.upper()}" for name in ServeSettings.model_fields
    }
    given = {
        name for service in SERVICES.values() for name in service.get("environment", ()) if name.startswith("SLUICE_")
    }
    assert given - known == set()
    worker, gateway = (SERVICES[name]["environment"] for name in ("worker", "gateway"))
    assert worker["SLUICE_BATCH_DIR"] == gateway["SLUICE_SERVE_BATCH_DIR"]
    assert worker["SLUICE_REDIS_URL"] == gateway["SLUICE_REDIS_URL"] == "redis://redis:6379/0"
    assert str(worker["SLUICE_METRICS_PORT"]) in SERVICES["worker"]["healthcheck"]["test"][-1]
    graces = {
        "worker": Settings.model_fields["grace_s"].default,
        "gateway": ServeSettings.model_fields["drain_s"].default,
    }
    for name, grace_s in graces.items():
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > grace_s


def test_the_server_takes_its_flags_and_stores_what_they_say() -> None:
    _, *flags = SERVICES["redis"]["command"]
    with Server(args=tuple(flags)) as server, redis.Redis.from_url(server.url, decode_responses=True) as db:
        for name, value in list(pairwise(flags))[::2]:
            stored = db.config_get(name.removeprefix("--"))
            assert set(next(iter(stored.values()))) == set(value)
        assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "valkey-cli", "ping"]
        assert db.ping()


def healthy(service: str, port: int) -> bool:
    """Run the health check of a service against another port, with the interpreter of the tests."""
    _, command, *args = SERVICES[service]["healthcheck"]["test"]
    given = [re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", arg) for arg in args]
    program = sys.executable if command == "python" else command
    return subprocess.run([program, *given], capture_output=True, timeout=30).returncode == 0


async def test_health_checks_pass_while_worker_and_gateway_serve_and_fail_otherwise(redis_url: str) -> None:
    port = free_port()
    assert not healthy("worker", port)
    with WorkerProcess(redis_url, metrics_port=port), GatewayProcess(redis_url) as gateway:
        await until(lambda: healthy("worker", port))
        await until(lambda: healthy("gateway", gateway.port))
    assert not healthy("worker", port)
    assert not healthy("gateway", gateway.port)


def mounted(service: str, folder: Path) -> Callable[[str], Path]:
    """Copy the files that a service mounts below a folder; return where a path of the container is."""
    for each in SERVICES[service]["volumes"]:
        source, target, *_ = each.split(":")
        if source.startswith("."):
            (folder / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, folder / target[1:])
    return lambda path: folder / path[1:]


def test_prometheus_asks_the_services_and_grafana_asks_prometheus(tmp_path: Path) -> None:
    at = mounted("prometheus", tmp_path)
    config = yaml.safe_load(at("/etc/prometheus/prometheus.yml").read_text())
    assert all(at(f"/etc/prometheus/{name}").exists() for name in config["rule_files"])
    asked = {each["names"][0]: each["port"] for job in config["scrape_configs"] for each in job["dns_sd_configs"]}
    ports = {name: SERVICES[name]["environment"] for name in asked}
    assert asked == {"worker": ports["worker"]["SLUICE_METRICS_PORT"], "gateway": ports["gateway"]["SLUICE_SERVE_PORT"]}
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    local = yaml.safe_load((ROOT / "examples/monitoring/prometheus.yml").read_text())
    assert jobs == {job["job_name"] for job in local["scrape_configs"]}
    at = mounted("grafana", tmp_path)
    (source,) = yaml.safe_load(at("/etc/grafana/provisioning/datasources/sluice.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(at("/etc/grafana/provisioning/dashboards/sluice.yml").read_text())["providers"]
    assert [file.name for file in at(provider["options"]["path"]).iterdir()] == ["sluice.json"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
async def test_prometheus_starts_with_its_mounted_files_and_is_healthy(tmp_path: Path) -> None:
    at, port = mounted("prometheus", tmp_path), free_port()
    config = at("/etc/prometheus/prometheus.yml")
    args = [
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    assert not healthy("prometheus", port)
    with subprocess.Popen(["prometheus", *args], stderr=subprocess.DEVNULL) as process:
        try:
            await until(lambda: healthy("prometheus", port))
        finally:
            process.terminate()
