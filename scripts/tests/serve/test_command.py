"""The command `scripts/bench serve`: its options, and a short run with the tiny model."""

import argparse
import json
from pathlib import Path

import pytest

from scripts.benchmarks.serve import command
from scripts.benchmarks.serve.options import add_options, contenders_of, options_of, scenarios_of
from scripts.benchmarks.serve.scenarios import DEFAULT
from scripts.benchmarks.serve.servers import BASELINE, MLX_SERVER, OURS
from tests.support.stack import ROOT, TINY_CHAT
from tests.support.stub_server import stub_server


def given(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(arguments)


def test_servers_come_in_the_order_of_the_options() -> None:
    options = given("--against", MLX_SERVER, "http://host:1/v1", "--baseline", str(ROOT),
                    "--against-command", "vllm=serve {model} {port}")  # fmt: skip
    assert [each.name for each in contenders_of(options)] == [BASELINE, OURS, MLX_SERVER, "host:1", "vllm"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--against", "vllm"],
        ["--against", MLX_SERVER, MLX_SERVER],
        ["--against-command", "vllm serve"],
        ["--against", "http://host:1", "--against-key", "NO_SUCH_VARIABLE"],
    ],
)
def test_a_server_that_cannot_be_meant_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="; |give NAME"):
        contenders_of(given(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--chats=0"],
        ["--chats=many"],
        ["--rates=-1"],
        ["--seconds=inf"],
        ["--loads=nan"],
        ["--scenario=rush"],
        ["--model=/no/such/folder"],
        ["--baseline=/tmp"],
        ["--json=/no/such/folder/out.json"],
    ],
)
def test_a_value_that_makes_no_sense_is_refused(arguments: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, argparse.ArgumentTypeError)):
        given(*arguments)


def test_a_trace_is_replayed_alone_unless_scenarios_are_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 0, "prompt": "hello", "max_tokens": 4}\n')
    assert scenarios_of(given("--trace", str(file))) == ["trace"]
    assert scenarios_of(given("--trace", str(file), "--scenario", "burst", "trace")) == ["burst", "trace"]
    assert len(options_of(given("--trace", str(file))).trace) == 1
    assert scenarios_of(given()) == [*DEFAULT]


@pytest.mark.parametrize("arguments", [["--scenario", "trace"], ["--trace", "x", "--scenario", "burst"]])
def test_a_trace_without_its_scenario_or_the_other_way_round_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="--trace"):
        scenarios_of(given(*arguments))


def test_a_bad_option_ends_the_command_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert not command.main(given("--against", "vllm"))
    assert "error:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.live
def test_a_short_run_measures_every_server_and_writes_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(command.THREADS, "1")
    file, recorded = tmp_path / "out.json", tmp_path / "trace.jsonl"
    recorded.write_text(
        '{"at": 0, "prompt": "hello", "max_tokens": 3, "chat": "c"}\n'
        '{"at": 0.1, "prompt": "more", "max_tokens": 3, "chat": "c", "turn": 2}\n'
    )
    with stub_server() as stub:
        command.main(given(
            "--model", str(TINY_CHAT), "--scenario", "burst", "open", "trace", "--trace", str(recorded),
            "--chats", "2", "--tokens", "3", "--rates", "4", "--seconds", "1", "--runs", "1",
            "--offline", "1", "--tenants", "2", "--prompts", "returning", "--against", stub.url, "--json", str(file),
        ))  # fmt: skip
    [model] = json.loads(file.read_text())["models"].values()
    measured = {(each["scenario"], each["server"]): each["median"] for each in model["results"]}
    assert {scenario for scenario, _ in measured} == {"burst", "open", "trace"}
    assert {figures["requests"] for (scenario, _), figures in measured.items() if scenario == "burst"} == {2}
    assert measured["open", "sluice"]["cached_tokens"] > 0  # the prompts have come before
    assert measured["open", "sluice"]["offline_tokens_per_s"] > 0
    assert measured["trace", "sluice"]["requests"] == 2
    assert {figures["failed"] for figures in measured.values()} == {0}
    assert model["bare_ms"]["32 x 1"] > 0
    printed = capsys.readouterr().out
    assert "burst" in printed
    assert "load 1" in printed
