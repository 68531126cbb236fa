"""The simulation of the engine's steps: it repeats itself, and agrees with what was measured."""

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, pairwise
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.benchmarks.serve.figures import GOOD_FIRST_S
from scripts.simulation import __main__ as command
from scripts.simulation.arrivals import Arrival, burst, from_trace, means, poisson
from scripts.simulation.costs import HYBRID, MODELS, PLAIN, Costs
from scripts.simulation.figures import Bound, Figures, most_in_time
from scripts.simulation.machine import MAX_ROWS, Disturbance, Machine
from scripts.simulation.policies import POLICIES, Planner
from tests.support.growing_memory import RULES, requests
from tests.support.growing_memory import Machine as MemoryMachine
from worker.engine.admission.tuning import QUANTILE
from worker.engine.step.tuning import MAX_CHUNK

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


def test_measured_shapes_cost_what_was_measured() -> None:
    for costs in MODELS.values():
        for (rows, tokens), ms in costs.measured_ms.items():
            assert costs.forward_s(rows, tokens) == pytest.approx(ms / 1000)


def test_load_of_one_is_the_rate_at_which_bare_forwards_take_all_the_time() -> None:
    assert command.capacity(PLAIN) == pytest.approx(2.17, rel=0.01)
    assert command.capacity(HYBRID) == pytest.approx(3.73, rel=0.01)


# What no plan can expect


def gaps_s(ran: Machine) -> list[float]:
    """Return the gaps of all requests, in the order of their ends."""
    pairs = [pair for request in ran.requests for pair in pairwise(request.token_times_s)]
    return [after - before for before, after in sorted(pairs, key=lambda pair: pair[1])]


def disturbed(arrivals: list[Arrival], disturbance: Disturbance) -> Machine:
    ran = Machine(arrivals, Planner(POLICIES["sluice"], PLAIN, STEP_S), PLAIN, 1, disturbance)
    ran.run()
    return ran


@pytest.mark.parametrize("hidden", [0.1, 0.3, 0.5, 0.8])
def test_gaps_keep_their_limit_while_all_steps_take_longer_than_measured(hidden: float) -> None:
    """Few rows decode, so that decoding alone takes less than half of the limit."""
    arrivals = [replace(each, answer=min(each.answer, 24)) for each in poisson(0.8, 60.0, seed=1)]
    gaps = gaps_s(disturbed(arrivals, Disturbance(hidden=hidden)))
    learned = len(gaps) // 5
    assert max(gaps[learned:]) <= 0.3


# What is possible


def test_a_prompt_that_takes_longer_alone_than_a_first_token_may_cannot_be_good() -> None:
    long = next(tokens for tokens in range(1, 2000) if PLAIN.alone_s(tokens) > GOOD_FIRST_S)
    bound = Bound.of([Arrival(0.0, 50, 1), Arrival(10.0, long, 1)], PLAIN)
    assert bound == Bound(50.0, 50.0)


def test_a_prompt_that_the_worker_computes_in_time_is_possible() -> None:
    """Alone, it decodes only once it is computed."""
    arrivals = [Arrival(0.0, 700, 8)]
    assert figures(arrivals).good_percent == 100
    assert Bound.of(arrivals, PLAIN) == Bound(100.0, 100.0)


@pytest.mark.parametrize("model", MODELS)
def test_no_forward_computes_a_token_in_less_time_than_the_cheapest(model: str) -> None:
    costs = MODELS[model]
    shapes = [(rows, tokens) for rows in range(1, MAX_ROWS + 1) for tokens in range(1, MAX_CHUNK // rows + 1)]
    assert costs.cheapest_s == pytest.approx(min(costs.forward_s(*shape) / prod(shape) for shape in shapes))


def test_of_prompts_that_come_together_the_most_that_end_in_time_are_counted() -> None:
    one_s = 99 * PLAIN.cheapest_s
    fitting = int(GOOD_FIRST_S / one_s)
    together = [Arrival(0.0, 100, 1)] * (fitting + 3)
    assert most_in_time(together, PLAIN) == fitting
    assert most_in_time([Arrival(0.0, 400, 1), *together], PLAIN) == fitting
    apart = [Arrival(number * one_s, 100, 1) for number in range(3 * fitting)]
    assert most_in_time(apart, PLAIN) == len(apart)


@given(st.lists(st.tuples(st.floats(0, 4), st.integers(2, 700)), min_size=1, max_size=7))
def test_the_bound_is_the_most_of_all_choices(requests: list[tuple[float, int]]) -> None:
    arrivals = sorted((Arrival(at_s, prompt, 1) for at_s, prompt in requests), key=lambda each: each.at_s)

    def in_time(chosen: Iterable[Arrival]) -> bool:
        end_s = 0.0
        for each in chosen:
            end_s = max(end_s, each.at_s) + (each.prompt - 1) * PLAIN.cheapest_s
            if end_s > each.at_s + GOOD_FIRST_S:
                return False
        return True

    best = max(len(chosen) for count in range(8) for chosen in combinations(arrivals, count) if in_time(chosen))
    assert most_in_time(arrivals, PLAIN) == best


@pytest.mark.parametrize("model", MODELS)
def test_no_policy_does_more_than_is_possible(model: str) -> None:
    arrivals = poisson(0.8 * command.capacity(MODELS[model]), 30.0, seed=2)
    bound = Bound.of(arrivals, MODELS[model])
    assert figures(arrivals, costs=MODELS[model]).good_percent <= bound.together <= bound.alone


def test_arrivals_are_those_of_the_serving_benchmark() -> None:
    arrivals = poisson(5.0, 1000.0, seed=1)
    assert len(arrivals) == 5000
    prompt, answer = means()
    assert statistics.mean(arrival.prompt for arrival in arrivals) == pytest.approx(prompt, rel=0.01)
    assert statistics.mean(arrival.answer for arrival in arrivals) == pytest.approx(answer, rel=0.01)


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
    assert [*found["plain"]["2 at once"]] == ["sluice", "before", "possible"]
    assert found["plain"]["2 at once"]["possible"] == {"alone": 100, "together": 100}
    assert found["plain"]["2 at once"]["sluice"]["tokens_per_s"] > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["--loads 0", "--loads x", "--runs 0", "--stalls -1", "--slower 0", "--bursts -1", "--models other"]
)
def test_command_refuses_an_option_out_of_range(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate", *option.split()])
    with pytest.raises(SystemExit):
        command.main()


def test_memory_that_grows_starts_answers_sooner_than_memory_in_full_and_cuts_none() -> None:
    runs = {name: MemoryMachine([*requests(40, None, 1, rule)], rule).run() for name, rule in RULES.items()}
    grows = runs[f"{QUANTILE:.0%} of recent"]
    assert grows.first_p50_s < runs["in full"].first_p50_s / 2
    assert (grows.cut_percent, runs["in full"].cut_percent) == (0, 0)
    assert runs["1,024, cut"].cut_percent > 5
