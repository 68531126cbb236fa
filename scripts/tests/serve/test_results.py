"""Medians over runs, the bars, and the tables."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from scripts.benchmarks.serve import report
from scripts.benchmarks.serve.figures import Answer, Figures
from scripts.benchmarks.serve.results import Outcome, Result, gather, judge
from scripts.benchmarks.serve.servers import BASELINE, OURS

PEER = "mlx_lm.server"


def figures(first_s: float = 1.0, **changes: float) -> Figures:
    return replace(Figures.of([Answer(0.0, 0.0, (first_s, first_s + 0.1), 2, 2, 8)], bare_s=1.0), **changes)  # type: ignore[arg-type]


def outcome(server: str, scenario: str = "burst", case: str = "32 at once", **changes: float) -> Outcome:
    rate, load = changes.pop("rate", None), changes.pop("load", None)
    return Outcome(server, scenario, case, figures(**changes), rate, load)


def verdicts(*outcomes: Outcome, plain: bool = True) -> dict[str, bool]:
    return {verdict.label: verdict.holds for verdict in judge(gather(outcomes), plain=plain)}


def test_runs_of_one_case_become_one_result_of_their_medians() -> None:
    runs = [outcome(OURS, tokens_per_s=speed, rate=rate) for speed, rate in ((1, 6), (3, 4), (2, 5))]
    [result] = gather(runs)
    assert (result.figures.tokens_per_s, result.rate, len(result.runs)) == (2, 5, 3)


def test_a_burst_is_compared_with_the_best_other_server_figure_by_figure() -> None:
    ours = outcome(OURS, tokens_per_s=115, first_s=1.0)
    slow, late = outcome(PEER, tokens_per_s=100, first_s=2.1), outcome("other", tokens_per_s=90, first_s=2.0)
    found = verdicts(ours, slow, late)
    assert found["burst, 32 at once: tokens/s × best"]
    assert found["burst, 32 at once: first token p50 × best"]
    assert not verdicts(ours, slow, replace(late, figures=figures(1.9)))["burst, 32 at once: first token p50 × best"]
    assert not found["burst, 32 at once: longest gap × best"]


def test_four_chats_have_a_bar_with_a_plain_model_only() -> None:
    both = [outcome(server, case="4 at once") for server in (OURS, PEER)]
    assert len(verdicts(*both)) == 1
    assert verdicts(*both, plain=False) == {}


@pytest.mark.parametrize(("load", "good", "holds"), [(0.5, 0.97, True), (0.5, 0.96, False), (0.75, 0.9, True)])
def test_good_answers_have_a_bar_by_load(load: float, good: float, holds: bool) -> None:
    assert verdicts(outcome(OURS, "open", "x", load=load, good=good)) == {"open, x: share of good answers": holds}


def test_throughput_beyond_saturation_stays_near_the_highest() -> None:
    speeds = {1.0: 90.0, 1.5: 100.0, 2.0: 97.0}
    found = verdicts(*(outcome(OURS, "open", f"{load}", load=load, tokens_per_s=speeds[load]) for load in speeds))
    assert [*found.values()] == [False, True, True]


@pytest.mark.parametrize(("peer", "holds"), [(1.0, True), (1.1, False), (0.0, True)])
def test_the_highest_rate_is_three_times_the_best(peer: float, holds: bool) -> None:
    found = verdicts(outcome(OURS, "highest", "highest", rate=3.0), outcome(PEER, "highest", "highest", rate=peer))
    assert [*found.values()] == [holds]


def test_a_baseline_is_no_peer_but_has_a_bar_of_slowdown() -> None:
    def slow(server: str, ratio: float) -> Outcome:
        quantiles = replace(figures().first, p95=ratio)
        return Outcome(server, "mixed", "x", replace(figures(), slowdown=quantiles), load=0.8)

    assert [*verdicts(slow(OURS, 3.0), slow(BASELINE, 9.1)).values()] == [True]
    assert [*verdicts(slow(OURS, 3.1), slow(BASELINE, 9.0)).values()] == [False]
    assert verdicts(outcome(OURS), outcome(BASELINE)) == {}


def test_agents_are_compared_with_the_best_other_server_and_with_themselves_without_reminders() -> None:
    def timed(server: str, seconds: float, later_s: float, case: str = "4 at once") -> Outcome:
        later = replace(figures().first, p50=later_s, p95=later_s)
        return Outcome(server, "agents", case, replace(figures(), seconds=seconds, later_first=later))

    ours, peer = timed(OURS, 8.5, 1.0), timed(PEER, 10.0, 0.9)
    assert verdicts(ours, peer, timed(OURS, 8.9, 1.0, "4 at once with reminders")) == {
        "agents, 4 at once: time × best": True,
        "agents, 4 at once: first token of later turns p50 × best": False,
        "agents, 4 at once: first token of later turns p95 × best": False,
        "agents, 4 at once with reminders: time × without": True,
    }
    assert [*verdicts(ours, timed(OURS, 9.0, 1.0, "4 at once with reminders")).values()] == [False]


def test_prompts_are_compared_with_the_packed_bare_forward() -> None:
    assert verdicts(outcome(OURS, "prompts", "x", of_bare=0.9)) == {
        "prompts, x: share of the packed bare forward": True
    }


# Tables


def printed(results: list[Result], **more: bool) -> str:
    console = Console(file=io.StringIO(), width=200)
    flags = {"tenants": False, "offline": False, **more}
    for table in report.tables(results, model="plain", runs=3, **flags):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_has_a_row_for_each_server_and_names_the_case_once() -> None:
    text = printed(gather([outcome(OURS, tokens_per_s=123.4), outcome(PEER, tokens_per_s=98.7)]))
    lines = [line for line in text.splitlines() if OURS in line or PEER in line]
    assert ["123.4" in lines[0], "98.7" in lines[1], text.count("32 at once")] == [True, True, 1]


def test_failed_turns_and_a_late_client_are_noted() -> None:
    failed = Outcome(OURS, "open", "x", figures(failed=2.0, client_late_s=0.2), error="too busy")
    notes = "\n".join(report.notes(gather([failed])))
    assert "2 turns failed; the first: too busy" in notes
    assert "200 ms late" in notes
