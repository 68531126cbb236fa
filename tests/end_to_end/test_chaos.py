"""Faults of the queue, at a small size; scripts/chaos runs them at full size."""

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.chaos import beside, crashes, fuzz, gateway, greedy, load, offline, outages, pickup
from tests.support.chaos.harness import Figure
from tests.support.stack import Server

Scenario = Callable[[Server], Awaitable[list[Figure]]]

SCENARIOS: dict[str, Scenario] = {
    "a killed worker's streams go on": lambda s: crashes.signalled(s.url, signal.SIGKILL, streams=12, tokens=120),
    "a stopped worker hands its streams over": lambda s: crashes.signalled(
        s.url, signal.SIGTERM, streams=12, tokens=120
    ),
    "a sleeper that wakes writes nothing stale": lambda s: crashes.signalled(
        s.url, signal.SIGSTOP, streams=8, tokens=120
    ),
    "a blocked event loop keeps its leases": lambda s: crashes.blocked_loop(s.url),
    "poison is parked and its neighbours are not": lambda s: crashes.poison(s.url, neighbours=7, tokens=40),
    "the server restarts": lambda s: outages.restarted(away_s=2, streams=8, tokens=120),
    "the primary is killed": lambda s: outages.failed_over(streams=32, tokens=400),
    "connections are killed": lambda s: outages.connections_killed(s.url, streams=8, tokens=100),
    "subscribers are killed": lambda s: outages.subscribers_killed(s.url, streams=16, tokens=100),
    "scripts are forgotten": lambda s: outages.scripts_forgotten(s.url, streams=8, tokens=50),
    "the server is full": lambda s: outages.full_server(s.url, streams=8, tokens=100, full_s=1),
    "answers are lost": lambda s: outages.answers_lost(s.port, cuts=40, streams=8, tokens=60),
    "a worker is killed behind a gateway": lambda s: gateway.worker_killed(s.url, streams=12, tokens=150),
    "one of two gateways is killed": lambda s: gateway.gateway_killed(s.url, streams=12, tokens=150),
    "the server is killed behind a gateway": lambda s: gateway.server_killed(streams=12, tokens=150, away_s=1),
    "a plain producer enqueues at each final event": lambda s: pickup.one_after_another(s.url, running=4, samples=60),
    "an idle worker is quiet": lambda s: pickup.idle_commands(s.url, seconds=3),
    "an offline run is killed": lambda s: offline.killed(offline.two_paced, lines=300, distinct=12, kills=3, seed=1),
    "many small jobs end once": lambda s: load.many_small_jobs(s.url, jobs=1500, kill_every_s=1),
}


# What these judge is how long a gap is, or how much happens in a second.
TIMED = {
    "a plain producer enqueues at each final event",
    "a killed worker's streams go on",
    "a stopped worker hands its streams over",
    "a sleeper that wakes writes nothing stale",
    "an idle worker is quiet",
    "the primary is killed",
}


# Smaller ones are in tests/queue/job/test_publisher, tests/client/test_client, test_crash, test_shutdown, test_batch,
# and test_cli_operators, in tests/queue/job/test_claims and in tests/gateway/chat/test_kill.
LARGE = {
    "a worker is killed behind a gateway",
    "one of two gateways is killed",
    "the server is killed behind a gateway",
    "a killed worker's streams go on",
    "a stopped worker hands its streams over",
    "a sleeper that wakes writes nothing stale",
    "an idle worker is quiet",
    "answers are lost",
    "scripts are forgotten",
    "the primary is killed",
    "subscribers are killed",
    "poison is parked and its neighbours are not",
    "an offline run is killed",
    "many small jobs end once",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.timing] * (name in TIMED) + [pytest.mark.slow] * (name in LARGE))
        for name in SCENARIOS
    ],
)
async def test_nothing_is_lost_when(name: str) -> None:
    with Server() as server:
        figures = await SCENARIOS[name](server)
    assert [figure for figure in figures if not figure.holds] == []


async def test_hostile_payloads_fail_by_name_and_run_nothing(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    with Server() as server:
        figures = await load.hostile(server.url, str(bomb), megabytes=20)
    assert [figure for figure in figures if not figure.holds] == []
    assert not bomb.exists()


@pytest.mark.slow
async def test_uploads_beside_streams_are_not_held_in_memory() -> None:
    with Server() as server:
        figures = await beside.uploads(server.url, megabytes=50, count=2, streams=4, alone_s=0.5)
    (memory,) = [figure for figure in figures if "memory" in figure.label]
    assert memory.holds, memory


@pytest.mark.slow
async def test_greedy_requests_beside_streams_end_by_name() -> None:
    kinds = [kind for kind in greedy.KINDS if "metadata" in kind.label or "escapes" in kind.label]
    with Server() as server:
        figures = await greedy.with_greedy_requests(server.url, streams=4, alone_s=0.5, share=0.2, kinds=kinds)
    verdicts = [figure for figure in figures if "verdicts" in figure.label]
    assert len(verdicts) == 2
    assert all(figure.holds for figure in verdicts), verdicts


@pytest.mark.slow
async def test_fuzzed_bodies_end_once_each_and_none_by_our_fault() -> None:
    with Server() as server:
        figures = await fuzz.fuzzed(server.url, bodies=60, streams=2, alone_s=0.5)
    about_time_and_memory = [figure for figure in figures if "gap" in figure.label or "memory" in figure.label]
    assert len(about_time_and_memory) == 2
    assert [figure for figure in figures if not figure.holds and figure not in about_time_and_memory] == []
