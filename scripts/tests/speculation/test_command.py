"""The command `scripts/bench speculation`: its options, and short runs with the tiny model."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from models.random_checkpoints import hybrid_checkpoint, random_checkpoint
from scripts.benchmarks.speculation import command
from scripts.benchmarks.speculation.command import add_options
from scripts.benchmarks.speculation.figures import Pair, Result, TokensDiffer
from scripts.benchmarks.speculation.runner import RANDOM, Comparison
from tests.support.stack import TINY_CHAT


def given(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(arguments)


def test_without_options_everything_is_measured_with_the_bundled_model() -> None:
    options = given()
    assert options.model == TINY_CHAT
    assert options.rows == [1, 2, 4, 8, 16]
    assert options.part == ["tasks", "cost"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--task=sleep"],
        ["--proposer=luck"],
        ["--rows=0"],
        ["--runs=none"],
        ["--part=all"],
        ["--model=/no/such/folder"],
        ["--random-model=huge"],
        ["--mtp-model=/tmp"],
        ["--json=/no/such/folder/out.json"],
    ],
)
def test_a_value_that_makes_no_sense_is_refused(arguments: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, argparse.ArgumentTypeError)):
        given(*arguments)


@pytest.mark.slow
def test_a_short_run_measures_equal_answers_and_writes_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    command.main(given(
        "--task", "tools", "json", "edit", "mixed", "--rows", "4", "--runs", "1", "--json", str(file),
    ))  # fmt: skip
    written = json.loads(file.read_text())
    assert written["complete"]
    found = {(each["task"], each["proposer"]): each for each in written["results"]}
    assert set(found) == {
        ("tools", "copies"), ("tools", "mtp"), ("tools", "all"), ("json", "grammar"), ("json", "mtp"), ("json", "all"),
        ("edit", "prediction"), ("edit", "all"),
        ("mixed", "copies"), ("mixed", "mtp"), ("mixed", "mtp-fixed"), ("mixed", "all"),
    }  # fmt: skip
    assert [*found["edit", "prediction"]["pairs"][0]["on"]["drafts"]] == ["prediction"]
    assert [*found["json", "grammar"]["pairs"][0]["on"]["drafts"]] == ["grammar"]
    assert found["mixed", "mtp-fixed"]["tokens_per_forward"] > 1.5
    [cost] = written["verify_cost"]
    assert cost["relative"].keys() == {"1", "2", "4", "8", "16"}
    assert "tokens/forward" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANDOM)
def test_random_weights_answer_the_tasks_of_any_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"plain": random_checkpoint, "hybrid": hybrid_checkpoint}
    monkeypatch.setitem(RANDOM, kind, partial(small[kind], hidden=128, layers=4))
    file = tmp_path / "out.json"
    command.main(given(
        "--random-model", kind, "--rows", "2", "--runs", "1", "--part", "tasks", "--json", str(file),
        "--proposer", "idle", "prediction", "mtp",
    ))  # fmt: skip
    found = {(each["task"], each["proposer"]): each for each in json.loads(file.read_text())["results"]}
    assert found.keys() == {("edit", "prediction"), ("free", "idle"), ("count", "idle")}
    assert found["edit", "prediction"]["accepted_share"] > 0.4
    assert found["count", "idle"]["tokens_per_forward"] == 1


@pytest.mark.slow
def test_answers_that_differ_end_the_benchmark_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(comparison: Comparison, runs: int, advance: Callable[[], None]) -> Result:
        raise TokensDiffer("recall, 1 row, copies: request 0.0 differs")

    monkeypatch.setattr(Comparison, "measure", measure)
    file = tmp_path / "out.json"
    assert not command.main(given("--task", "recall", "--rows", "1", "--json", str(file)))
    assert not json.loads(file.read_text())["complete"]
    assert "request 0.0 differs" in capsys.readouterr().out


@pytest.mark.slow
def test_the_answers_of_every_pair_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[Pair]()

    def check(pair: Pair, case: object) -> None:
        checked.append(pair)

    monkeypatch.setattr(Pair, "check", check)
    command.main(given("--task", "recall", "--rows", "2", "--runs", "1", "--proposer", "copies", "--part", "tasks"))
    assert [len(pair.off.answers) for pair in checked] == [8, 8]
