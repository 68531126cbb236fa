"""How a worker starts: what keeps it from that, what it waits for, and what its probes say meanwhile."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.end_to_end.test_check import environment
from tests.end_to_end.test_cli import run_here
from tests.support.stack import ROOT, TINY_CHAT, Server, WorkerProcess, free_port


def until(true: Callable[[], bool], *, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not so within {within_s:g} s"
        time.sleep(0.02)


def probe(port: int, path: str) -> tuple[int, dict[str, str]]:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error) if error.code == 503 else {}
    except OSError:
        return 0, {}


def test_a_worker_without_the_right_password_ends_before_it_loads_its_model(
    refusal: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    with Server(args=("--requirepass", "pw"), password="pw") as server:
        assert "it requires a password" in refusal(server.url)
        wrong = refusal(server.url.replace("//", "//:kumquat@"))
    assert "it refuses the user or the" in wrong
    assert "loading" not in caplog.text
    assert "kumquat" not in wrong + caplog.text


def test_a_worker_with_a_database_that_its_server_does_not_have_ends_before_it_loads_its_model(
    server_url: str, refusal: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    assert "must be that of a database that it has" in refusal(server_url.removesuffix("0") + "16")
    assert "loading" not in caplog.text


def test_a_memory_limit_that_leaves_nothing_for_the_model_ends_the_worker_and_sluice_check_alike(
    redis_url: str, refusal: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    said = refusal(redis_url, memory_gb=1)
    assert ("SLUICE_MEMORY_GB = 1:" in said, "SLUICE_MEMORY_HEADROOM_GB = 1 " in said) == (True, True), said
    assert "loading" not in caplog.text
    env = environment(SLUICE_MEMORY_GB="1")
    assert run_here("check", str(TINY_CHAT), env=env, folder=ROOT) == (2, "", f"sluice: {said}\n")


def test_a_model_that_sluice_check_refuses_ends_the_worker_with_its_sentence(redis_url: str, tmp_path: Path) -> None:
    worker = WorkerProcess(redis_url, memory_gb=1.0025).start(wait=False)
    try:
        assert worker.wait() == 2
        env = environment(SLUICE_MEMORY_GB="1.0025")
        code, _, said = run_here("check", str(TINY_CHAT), env=env, folder=ROOT)
        assert (code, "cannot be served. Its weights take" in said) == (2, True)
        assert f"sluice worker: {said.removeprefix('sluice: ').rstrip()}" in worker.log().splitlines()
    finally:
        worker.stop()


def test_a_second_worker_of_a_name_ends_before_it_serves_and_the_first_goes_on(alive: WorkerProcess) -> None:
    second = WorkerProcess(alive.url, name=alive.name, lease_s=2).start(wait=False)
    try:
        assert second.wait() == 2
        assert (
            f"SLUICE_WORKER_NAME={alive.name}: a worker of this name is alive (process {alive.pid} on " in second.log()
        )
        assert (" serves " in second.log(), "Traceback" in second.log()) == (False, False)
    finally:
        second.stop()
    alive.wait_ready()


@pytest.mark.slow
def test_no_worker_aborts_if_its_model_does_not_exist(redis_url: str, tmp_path: Path) -> None:
    """Threads that have imported mlx-lm must have cleared its streams: one in five workers aborted without."""
    workers = [WorkerProcess(redis_url, model=tmp_path / "none").start(wait=False) for _ in range(12)]
    try:
        assert [worker.wait(300) for worker in workers] == [2] * len(workers)
    finally:
        for worker in workers:
            worker.stop()


def test_a_worker_whose_chat_template_does_not_end_says_so_and_ends(redis_url: str) -> None:
    worker = WorkerProcess(redis_url, module="tests.end_to_end.endless_template").start(wait=False)
    try:
        assert worker.wait() == 2
        assert "the model's chat template took longer than" in worker.log()
        assert " serves " not in worker.log()
        assert "Traceback" not in worker.log()
    finally:
        worker.stop()


def test_a_worker_says_that_it_serves_when_it_has_met_its_server_and_not_before(tmp_path: Path) -> None:
    port, probes = free_port(), free_port()
    worker = WorkerProcess(
        f"redis://127.0.0.1:{port}/0",
        module="tests.end_to_end.loading_on_demand",
        more_env={"LOAD_FILE": str(tmp_path / "load")},
        metrics_port=probes,
        lease_s=1,
    ).start(wait=False)
    try:
        until(lambda: probe(probes, "/readyz")[1].get("model") == "it is loading")
        assert probe(probes, "/healthz")[0] == 200
        (tmp_path / "load").touch()
        until(lambda: "waiting for redis" in worker.log())
        status, parts = probe(probes, "/readyz")
        assert (status, parts["model"], parts["redis"] != "ok") == (503, "ok", True)
        assert "serves" not in worker.log()
        with Server(port=port) as server:
            until(lambda: " serves " in worker.log())
            until(lambda: probe(probes, "/readyz")[0] == 200)
            server.leave()
            until(lambda: probe(probes, "/readyz")[0] == 503)
            assert probe(probes, "/healthz")[0] == 200
            server.start()
            until(lambda: probe(probes, "/readyz")[0] == 200)
            assert probe(probes, "/anything")[0] == 404
    finally:
        worker.stop()
