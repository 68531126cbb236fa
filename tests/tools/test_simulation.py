"""The simulation of the engine's steps: it repeats itself, and agrees with what was measured."""

import json
import sys
from pathlib import Path

import pytest

from scripts.simulation import __main__ as command
from scripts.simulation.arrivals import ANSWER, Arrival, burst, from_trace, poisson
from scripts.simulation.costs import HYBRID, MODELS, PLAIN, Costs, interpolated
from scripts.simulation.figures import Figures, percentile
from scripts.simulation.machine import MAX_ROWS, Machine
from scripts.simulation.policies import POLICIES, Planner

STEP_S = 0.1


def machine(arrivals: list[Arrival], policy: str = "sluice", costs: Costs = PLAIN, seed: int = 1) -> Machine:
    """Return a machine after it has run these requests."""
    ran = Machine(arrivals, Planner(POLICIES[policy], costs, STEP_S), costs, seed)
    ran.run()
    return ran


def figures(arrivals: list[Arrival], policy: str = "sluice", costs: Costs = PLAIN) -> Figures:
    return Figures.of(machine(arrivals, policy, costs), costs)


# As measured with 32 chats at once: tokens/s, median and last first token in seconds.
MEASURED = [
    ("plain", "before", 105, 6.96, 21.87),
    ("plain", "before-2", 140, 3.77, 10.0),
    ("hybrid", "before", 214, 3.34, 10.53),
    ("hybrid", "before-5", 274, 2.28, 5.36),
]


@pytest.mark.parametrize(("model", "policy", "tokens_per_s", "median_s", "last_s"), MEASURED)
def test_burst_takes_about_as_long_as_measured(
    model: str, policy: str, tokens_per_s: float, median_s: float, last_s: float
) -> None:
    found = figures(burst(MAX_ROWS, 1), policy, MODELS[model])
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.15)
    assert 0.6 < found.first_p50_s / median_s < 1.6
    assert found.first_max_s == pytest.approx(last_s, rel=0.25)


@pytest.mark.parametrize("chats", [4, 8])
def test_small_burst_is_computed_before_it_decodes(chats: int) -> None:
    gathered, at_once = figures(burst(chats, 1)), figures(burst(chats, 1), "decode-at-once")
    assert gathered.longest_gap_s < 0.1 < at_once.longest_gap_s
    assert gathered.first_max_s < at_once.first_max_s
    assert gathered.tokens_per_s > at_once.tokens_per_s


def test_gaps_of_a_burst_stay_within_the_limit_while_decoding_takes_less_than_half() -> None:
    assert figures(burst(MAX_ROWS, 1)).longest_gap_s <= 0.3


def test_runs_with_one_seed_are_equal() -> None:
    arrivals = poisson(2.0, 20.0, seed=3)
    assert arrivals == poisson(2.0, 20.0, seed=3)
    assert figures(arrivals) == figures(arrivals)
    assert figures(arrivals) != figures(poisson(2.0, 20.0, seed=4))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_tokens_in_order(policy: str) -> None:
    requests = machine(poisson(4.0, 15.0, seed=1), policy).requests
    assert len(requests) > MAX_ROWS
    for request in requests:
        assert len(request.token_times_s) == request.arrival.answer
        assert request.token_times_s == sorted(request.token_times_s)
        assert request.token_times_s[0] > request.arrival.at_s


def test_a_request_alone_takes_its_forwards_and_little_more() -> None:
    arrival = Arrival(0.0, prompt=65, answer=20)
    bare_s = PLAIN.forward_s(1, 64) + 20 * PLAIN.forward_s(1, 1)
    assert machine([arrival]).now_s == pytest.approx(bare_s, rel=0.2)


def test_measured_shapes_cost_what_was_measured() -> None:
    for costs in MODELS.values():
        for (rows, tokens), ms in costs.measured_ms.items():
            assert costs.forward_s(rows, tokens) == pytest.approx(ms / 1000)


def test_cost_between_and_beyond_measured_shapes_lies_on_a_line() -> None:
    points = [(1.0, 10.0), (3.0, 20.0), (5.0, 60.0)]
    assert [interpolated(points, x) for x in (0, 2, 3, 4, 7)] == [5, 15, 20, 40, 100]


def test_bare_forwards_can_do_the_rates_that_were_measured() -> None:
    assert command.capacity(PLAIN) == pytest.approx(2.5, rel=0.05)
    assert command.capacity(HYBRID) == pytest.approx(4.5, rel=0.05)


def test_arrivals_have_the_rate_and_the_lengths_of_their_distribution() -> None:
    arrivals = poisson(5.0, 1000.0, seed=1)
    assert len(arrivals) == pytest.approx(5000, rel=0.05)
    answers = [arrival.answer for arrival in arrivals]
    assert (min(answers), percentile(answers, 50), max(answers)) == (
        ANSWER[0],
        pytest.approx(ANSWER[1], abs=1),
        ANSWER[2],
    )


def test_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    lines = [{"at_s": 2.0, "prompt": 30, "answer": 4}, {"at_s": 1.0, "prompt": 9, "answer": 5, "lane": "batch"}]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert from_trace(path) == [Arrival(1.0, 9, 5, "batch"), Arrival(2.0, 30, 4)]


def test_command_writes_the_figures_of_each_model_scenario_and_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = f"--models plain --bursts 2 --loads 0.5 --seconds 5 --runs 1 --policies sluice before --json {path}"
    monkeypatch.setattr(sys, "argv", ["simulate", *options.split()])
    assert command.main() == 0
    found = json.loads(path.read_text())
    assert [*found["plain"]["2 at once"]] == ["sluice", "before"]
    assert found["plain"]["2 at once"]["sluice"]["tokens_per_s"] > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--loads 0", "--loads x", "--runs 0", "--bursts -1", "--models other"])
def test_command_refuses_an_option_out_of_range(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", *option.split()])
    with pytest.raises(SystemExit):
        command.main()
