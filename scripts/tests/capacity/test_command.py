"""The command `scripts/bench capacity`: a short run of each part, and what limits a run."""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.benchmarks.capacity import claim, command
from scripts.benchmarks.capacity.claim import ClaimCost
from scripts.benchmarks.capacity.command import add_options, judge, main, notes
from scripts.benchmarks.capacity.load import Figures, measure
from scripts.benchmarks.capacity.process import Load, Share
from scripts.benchmarks.serve.figures import Quantiles
from tests.support.stack import ROOT, Server, server_binary

FAST = Quantiles(0.001, 0.002, 0.003, 0.004)
IDLE = Figures(
    server="Valkey 9.1.2", load=Load(128, 16, 10.0, 100, 64), tokens_per_s=20_480.0, kept=1.0, failed=0,
    commands_per_s=1.0, server_cpu=0.5, pickup=FAST, token=FAST, in_bytes_per_s=1.0, out_bytes_per_s=1.0,
    memory_bytes=1.0, connections=1, commands=[], load_cpu=0.5, lag_p99_s=0.001, machine_cpu=0.1, other_cpu=0.0,
)  # fmt: skip


def given(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(arguments)


def test_workers_append_a_token_to_each_row_in_each_step_and_clients_read_them() -> None:
    figures = measure(server_binary(), Load(2, 4, 10.0, 10, 4), 1.0, 2)
    assert 0 < figures.kept < 1.2  # of 80 tokens, on a machine that may be busy
    assert 0 < figures.token.p50 < 10
    assert 0 < figures.pickup.p50 < 10
    names = {command.name: command for command in figures.commands}
    assert names["evalsha"].calls_per_s < names["rpush"].calls_per_s  # one call for all rows of a worker
    assert figures.server_cpu > 0
    assert figures.out_bytes_per_s > 1000


def test_a_process_whose_server_goes_ends_with_one_sentence() -> None:
    with Server() as server:
        share = json.dumps(asdict(Share(server.url, "chats", Load(1, 1, 1.0, 1, 1), 0, 1)))
        command = [sys.executable, "-m", "scripts.benchmarks.capacity.process", share]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, cwd=ROOT, **streams) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "ready\n"
            server.kill()
            assert process.stderr.read().startswith("error: ConnectionError")
    assert process.returncode == 1


def test_claims_are_measured_with_the_jobs_and_workers_of_their_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(claim, "RUNNING", (0, 300))  # more than one call claims
    monkeypatch.setattr(claim, "WORKERS", (1, 3))
    file = tmp_path / "figures.json"
    main(
        Console(quiet=True), given("--part", "claim", "--calls", "2", "--server", server_binary(), "--json", str(file))
    )
    saved: list[dict[str, Any]] = json.loads(file.read_text())["claims"]
    cases = {(each["waiting"], each["running"], each["workers"]) for each in saved}
    assert cases == {(waiting, running, workers) for waiting in (1, 16) for running in (0, 300) for workers in (1, 3)}
    assert all(20 < each["median_us"] < 1e6 for each in saved)


def test_the_figures_of_a_load_are_written_as_json_also_those_that_are_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_: replace(IDLE, machine_cpu=float("nan")))
    file = tmp_path / "figures.json"
    options = given(
        "--part", "load", "--workers", "8", "--steps", "10", "--server", server_binary(), "--json", str(file)
    )
    assert main(Console(quiet=True), options)
    (saved,) = json.loads(file.read_text(), parse_constant=pytest.fail)["loads"]
    assert (saved["load"]["workers"], saved["machine_cpu"], saved["full"]) == (128, None, "")


def test_a_busy_server_is_its_own_limit_whatever_else_is_busy() -> None:
    assert replace(IDLE, server_cpu=0.95, load_cpu=0.99).limit == "server"


@pytest.mark.parametrize("busy", [{"load_cpu": 0.9}, {"lag_p99_s": 0.02}])
def test_a_busy_process_of_the_load_is_told_from_a_busy_server(busy: dict[str, float]) -> None:
    figures = replace(IDLE, **busy)  # type: ignore[arg-type]
    assert figures.limit == "load"
    assert "the benchmark is the limit" in notes([figures])[0]


def test_a_machine_whose_cores_are_busy_and_other_programs_are_named() -> None:
    figures = replace(IDLE, machine_cpu=1000.0, other_cpu=1.5)
    assert figures.limit == "machine"
    assert len(notes([figures])) == 2
    assert notes([IDLE]) == []


def test_the_servers_time_for_a_token_is_that_of_its_cpu() -> None:
    assert replace(IDLE, server_cpu=0.5, tokens_per_s=20_000.0).cpu_us_per_token == pytest.approx(25)


def test_only_the_load_with_bars_is_compared_with_them() -> None:
    slow = replace(IDLE, token=Quantiles(0.001, 0.002, 0.021, 0.03))
    other = replace(slow, load=Load(512, 16, 10.0, 100, 64))
    assert [verdict.holds for verdict in judge([slow, other])] == [True, False]


def test_a_claim_that_costs_more_the_more_jobs_run_misses_its_bar() -> None:
    costs = [
        ClaimCost("", marks, affinity, waiting, running, workers, 100.0 + running * 0.01, (90.0, 110.0))
        for marks, affinity in claim.KINDS
        for waiting in claim.WAITING
        for running in claim.RUNNING
        for workers in claim.WORKERS
    ]
    assert [verdict.holds for verdict in claim.judge(costs)] == [True] * 48 + [False] * 24


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--server", "/no/such/server"], "redis-server or valkey-server"),
        (["--calls", "1"], "at least 2"),
        (["--workers", "0"], "at least 1"),
    ],
)
def test_options_that_cannot_be_measured_are_refused_with_a_remedy(arguments: list[str], remedy: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=remedy):
        given(*arguments)
