"""The benchmark `scripts/bench fleet`: a short run against real workers, and its bars."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from scripts.benchmarks import fleet
from scripts.benchmarks.fleet import Round, Size, add_options, judge, main
from scripts.benchmarks.serve.figures import Answer, Figures


def given(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(arguments)


def figures(cached: int, first_s: float) -> Figures:
    answer = Answer(0.0, 0.0, (first_s, first_s + 1), 8, 8, prompt_tokens=1000, cached_tokens=cached)
    return Figures.of([answer, replace(answer, due_s=1.0)])


def held(*rounds: Round) -> list[bool]:
    return [verdict.holds for verdict in judge(rounds)]


def test_both_fleets_answer_all_chats_and_the_figures_are_written(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = "--workers 2 --rows 2 --chats 2 --turns 2 --words 30 --rounds 1 --bursts 1 --think 0.01 --json"
    main(Console(quiet=True), given(*options.split(), str(file)))
    saved = json.loads(file.read_text())
    assert len(saved["bursts"]) == 1
    (measured,) = saved["rounds"]
    assert {name: (each["requests"], each["failed"]) for name, each in measured.items()} == {
        "on": (4, 0),
        "off": (4, 0),
    }
    assert all(each["prompt_tokens"] > each["cached_tokens"] for each in measured.values())


def test_chats_of_a_seed_are_the_same_for_both_fleets_and_new_in_each_round() -> None:
    size = Size(chats=3, turns=2)
    assert size.draw(Random("0")) == size.draw(Random("0"))
    texts = [turn.text for seed in "01" for chat in size.draw(Random(seed)) for turn in chat.turns]
    assert len({text.split()[0] for text in texts}) == len(texts) == 12


def test_a_claim_that_finds_more_and_answers_sooner_holds_its_bars() -> None:
    assert held(Round(figures(900, 1.0), figures(600, 2.0))) == [True, True]


def test_fleets_that_are_equal_miss_the_bars() -> None:
    assert held(Round(figures(600, 2.0), figures(600, 2.0))) == [False, False]


def test_the_median_round_counts() -> None:
    good, bad = Round(figures(900, 1.0), figures(600, 2.0)), Round(figures(600, 2.0), figures(600, 2.0))
    assert held(bad, good, good) == [True, True]


def test_a_worker_that_does_not_start_ends_the_run_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(fleet.WorkerProcess):
        def wait_ready(self) -> None:
            raise RuntimeError("the worker ended with 2")

    monkeypatch.setattr(fleet, "WorkerProcess", Failing)
    assert not main(Console(width=100), given("--workers", "1", "--bursts", "1"))
    assert "error: the worker ended with 2" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--workers 0", "--think 0", "--rounds x"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(argparse.ArgumentError):
        given(*option.split())
