"""scripts/chaos [NAME ...]: runs the scenarios at full size, each on its own server, and prints a table of results."""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.chaos import (
    beside,
    churn,
    crashes,
    fairness,
    fuzz,
    gateway,
    greedy,
    load,
    mixed,
    offline,
    offline_http,
    outages,
    pickup,
)
from tests.support.chaos.harness import Figure
from tests.support.stack import Server

Scenario = Callable[[Server], Awaitable[list[Figure]]]


def _bomb() -> str:
    return str(Path(tempfile.gettempdir()) / "sluice-bomb")


SCENARIOS: dict[str, Scenario] = {
    "kill": lambda s: crashes.signalled(s.url, signal.SIGKILL, streams=32, tokens=200),
    "term": lambda s: crashes.signalled(s.url, signal.SIGTERM, streams=32, tokens=200),
    "stop": lambda s: crashes.signalled(s.url, signal.SIGSTOP, streams=32, tokens=200),
    "block": lambda s: crashes.blocked_loop(s.url),
    "poison": lambda s: crashes.poison(s.url, neighbours=15, tokens=60),
    "restart": lambda s: _each(*(outages.restarted(away_s=away_s, streams=32, tokens=200) for away_s in (2, 8, 60))),
    "failover": lambda s: outages.failed_over(streams=32, tokens=400),
    "connections": lambda s: outages.connections_killed(s.url, streams=32, tokens=200),
    "subscribers": lambda s: outages.subscribers_killed(s.url, streams=64, tokens=200),
    "scripts": lambda s: outages.scripts_forgotten(s.url, streams=32, tokens=200),
    "full": lambda s: outages.full_server(s.url, streams=32, tokens=200, full_s=5),
    "answers": lambda s: outages.answers_lost(s.port, cuts=1000, streams=16, tokens=100),
    "gateway": lambda s: gateway.all_killed(s.url, streams=32, tokens=200),
    "backlog": lambda s: pickup.behind_a_backlog(s.url, backlog=600, samples=1000),
    "pickup": lambda s: _each(
        pickup.with_running_rows(s.url, running=32, samples=1000),
        pickup.one_after_another(s.url, running=0, samples=300),
        pickup.one_after_another(s.url, running=24, samples=300),
    ),
    "burst": lambda s: _each(*(pickup.shared_bursts(s.url, workers=workers, bursts=33) for workers in (2, 4))),
    "fairness": lambda s: fairness.small_tenant(s.url, backlog=10_000, samples=200),
    "claim": lambda s: fairness.claim_cost(s.url, lengths=(0, 1_000, 10_000, 100_000)),
    "idle": lambda s: pickup.idle_commands(s.url, seconds=10),
    "cancel": lambda s: pickup.cancelled(s.url, samples=50),
    "many": lambda s: load.many_small_jobs(s.url, jobs=20_000, kill_every_s=2),
    "batch": lambda s: offline.killed(offline.two_tiny, lines=5_000, distinct=60, kills=8, seed=4),
    "batch-http": lambda s: offline_http.killed(offline.two_tiny, lines=5_000, distinct=60, kills=3, seed=4),
    "mixed": lambda s: mixed.mixed_lanes(s.url, mixed.tiny(s.url), rounds=5, phase_s=10, streams=4),
    "long-life": lambda s: churn.long_life(steps=20_000),
    "overload": lambda s: churn.overload(jobs=500),
    "greedy": lambda s: greedy.with_greedy_requests(s.url, streams=32, alone_s=8),
    "fuzz": lambda s: fuzz.fuzzed(s.url, bodies=2_000, streams=8, alone_s=10),
    "beside": lambda s: _each(
        beside.uploads(s.url, megabytes=200, count=3, streams=8, alone_s=10),
        beside.offline_run(s.url, lines=5_000, tokens=16, streams=8, alone_s=10),
    ),
    "hostile": lambda s: load.hostile(s.url, _bomb(), megabytes=50),
}


async def _each(*scenarios: Awaitable[list[Figure]]) -> list[Figure]:
    """Run scenarios one after another on the same server."""
    return [figure for scenario in scenarios for figure in await scenario]


def main() -> int:
    """Run the named scenarios, and return 0 if every figure is within its limit."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(SCENARIOS)}")
    names = parser.parse_args().names or list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"there is no scenario {unknown[0]!r}; choose from {', '.join(SCENARIOS)}")
    console, figures = Console(), []
    for name in names:
        began = time.monotonic()
        figures += run(name)
        console.print(f"[dim]{name}: {time.monotonic() - began:.0f} s[/]")
    console.print(table(figures))
    return 0 if all(figure.holds for figure in figures) else 1


def run(name: str) -> list[Figure]:
    """Run one scenario on a new server. An exception becomes a figure that does not hold."""
    try:
        with Server() as server:
            return asyncio.run(_awaited(SCENARIOS[name](server)))
    except Exception as error:  # one failing scenario must not hide the results of the others
        return [Figure(f"{name}: ran to its end", "yes", f"{type(error).__name__}: {error}", False)]


async def _awaited(scenario: Awaitable[list[Figure]]) -> list[Figure]:
    return await scenario


def table(figures: list[Figure]) -> Table:
    """Return the table of results."""
    rows = Table("scenario", "bar", "figure", "holds", title="Chaos", title_justify="left")
    for figure in figures:
        rows.add_row(figure.label, figure.limit, figure.value, "[green]yes[/]" if figure.holds else "[red]no[/]")
    return rows


if __name__ == "__main__":
    sys.exit(main())
