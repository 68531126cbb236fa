"""The simulation of a fleet: it repeats itself, prompts are left to their holders, and no longer than that saves."""

import json
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from scripts.simulation.fleet import command
from scripts.simulation.fleet.command import judge, simulate
from scripts.simulation.fleet.policies import SWEEP_S, Aware, _marks
from scripts.simulation.fleet.run import Figures, Run, Setup
from scripts.simulation.fleet.worker import Cache, Job, Texts, work
from scripts.simulation.fleet.workloads import WORKLOADS
from sluice.submission import marks_of

SHORT = Setup("agents", seconds=200.0, warm_s=80.0)


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two idle workers of one row. The first one has computed a prompt of 20,000 tokens, which is in `run.jobs[0]`."""
    monkeypatch.setitem(WORKLOADS, "nothing", ())
    run = Run(Setup("nothing", workers=2, rows=1, seconds=300.0, byte_error=0.0), Aware(), 1)
    run.submit(0, run.texts.after((), 20_000), 1, None)
    while run.jobs[0].ended_s < 0:
        run.step()
    return run


def later(run: Run, after_s: float, job: Job, answer: int = 1) -> None:
    """Submit the job's prompt with a hundred tokens behind it."""
    path = run.texts.after(job.path, 100)
    run.at(run.now_s + after_s, lambda: run.submit(1, path, answer, None))


@pytest.mark.parametrize("policy", command.POLICIES)
def test_runs_with_one_seed_are_equal(policy: str) -> None:
    assert simulate(SHORT, policy, 3) == simulate(SHORT, policy, 3) != simulate(SHORT, policy, 4)


def test_a_claim_that_knows_who_holds_what_beats_first_come_first_served() -> None:
    fifo, sluice = (simulate(SHORT, policy, 1) for policy in ("fifo", "sluice"))
    assert sluice.hit > 1.15 * fifo.hit
    assert sluice.p95_s < 0.6 * fifo.p95_s


def test_prompts_that_have_nothing_in_common_are_as_soon_as_first_come_first_served() -> None:
    fifo, sluice = (simulate(Setup("none", seconds=200.0, warm_s=80.0), policy, 1) for policy in ("fifo", "sluice"))
    assert sluice.p95_s < 1.05 * fifo.p95_s


@pytest.mark.parametrize("workload", ["agents", "rag", "mixed"])
def test_no_job_waits_beside_an_idle_worker_for_longer_than_computing_it_takes(workload: str) -> None:
    assert simulate(Setup(workload, seconds=200.0, warm_s=0.0), "sluice", 1).regret_s <= 0


@pytest.mark.parametrize("failure", [{"crash_s": 60.0}, {"flush_s": 60.0}])
def test_what_the_server_has_forgotten_and_who_has_died_cost_no_job_more_than_a_sweep(
    failure: dict[str, float],
) -> None:
    run = Run(Setup("mixed", seconds=200.0, warm_s=0.0, **failure), Aware(), 1).run()
    assert Figures.of(run).regret_s <= SWEEP_S
    early = [job for job in run.jobs if job.at_s < 100]
    assert [job for job in early if job.first_s < 0] == []


def test_a_prompt_goes_to_the_idle_worker_that_holds_its_beginning(two_workers: Run) -> None:
    later(two_workers, 5.0, two_workers.jobs[0])
    two_workers.run()
    assert two_workers.jobs[1].hit == 20_000
    assert two_workers.jobs[1].first_s - two_workers.jobs[1].at_s < 0.2


def test_a_job_is_left_to_a_full_holder_for_no_longer_than_that_saves(two_workers: Run) -> None:
    """The holder has an answer of minutes, so the other one computes all of it, after it has waited in vain."""
    first = two_workers.jobs[0]
    later(two_workers, 1.0, first, answer=6000)
    later(two_workers, 5.0, first)
    two_workers.run()
    job = two_workers.jobs[2]
    saved_s = work(0, job.total) / 2000
    assert job.hit == 0
    assert 0.5 * saved_s < job.claimed_s - job.at_s <= saved_s


def test_a_job_that_is_left_starts_as_soon_as_its_holder_has_a_row(two_workers: Run) -> None:
    first = two_workers.jobs[0]
    later(two_workers, 1.0, first, answer=300)
    later(two_workers, 5.0, first)
    two_workers.run()
    _, before, job = two_workers.jobs
    assert job.hit == 20_000
    assert before.ended_s > job.at_s + 0.5
    assert job.claimed_s == before.ended_s


def test_the_least_recently_used_end_of_a_prompt_is_evicted_first() -> None:
    texts = Texts(Random(1), 0.0)
    cache = Cache(texts, 250)
    system = texts.after((), 100)
    older, newer, newest = (texts.after(system, 60) for _ in range(3))
    assert (cache.keep(older), cache.keep(newer)) == ([], [])
    assert cache.keep(newest) == [older[-1]]
    assert [cache.found(path) for path in (older, newer, newest)] == [1, 2, 2]


@pytest.mark.parametrize("size", [500, 1024, 9000, 70_000, 1_500_000])
def test_marks_stand_where_the_client_sets_them(size: int) -> None:
    texts = Texts(Random(1), 0.0)
    path = texts.after(texts.after((), size // 8), size // 4 - size // 8)
    ends = [end for _, end in _marks(texts, path)]
    found = marks_of(b"x" * texts.byte_ends[path[-1]])[0].split()[1::2]
    assert ends == [int(end) for end in found]


def figures(hit: float = 0.5, seconds: float = 10.0, regret_s: float = -1.0) -> Figures:
    return Figures(hit, seconds, seconds, seconds, 100.0, 1.0, regret_s)


def test_a_claim_that_is_no_better_than_first_come_first_served_misses_its_bars() -> None:
    results = {(workload, policy): [figures()] for workload in WORKLOADS for policy in command.POLICIES}
    held = {verdict.label: verdict.holds for verdict in judge(results)}
    assert held == {
        "mixed: hit / best router": True,
        "mixed: hit / fifo": False,
        "mixed: p95 / best router": True,
        "mixed: p95 / fifo": False,
        "none: p95 / fifo": True,
        "rag: p95 / fifo": False,
        "agents: hit / fifo": False,
        "agents: p99 / least-prefill": True,
        "regret in seconds, all workloads": True,
    }


def test_the_worst_regret_of_all_seeds_counts_and_bars_without_their_runs_are_left_out() -> None:
    verdicts = judge({("chat", "sluice"): [figures(), figures(regret_s=0.1)]})
    assert [(verdict.label, verdict.holds) for verdict in verdicts] == [("regret in seconds, all workloads", False)]


def test_command_prints_a_table_and_writes_the_figures_of_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    options = f"--workloads agents --policies fifo sluice --seeds 2 --rows 2 --json {file}"
    assert command.main(options.split(), Console(width=110)) == 0
    found = json.loads(file.read_text())
    assert {name: len(runs) for name, runs in found.items()} == {"agents, fifo": 2, "agents, sluice": 2}
    assert "agents: 8 workers of 2 rows" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--workloads other", "--workers 0", "--speeds 0", "--seeds x", "--crash -1"])
def test_command_refuses_an_option_out_of_range(option: str) -> None:
    with pytest.raises(SystemExit):
        command.main(option.split(), Console(quiet=True))
