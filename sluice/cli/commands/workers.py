"""`sluice workers`: who serves what, and how much there is to do."""

import asyncio
import time
from typing import Any

from sluice.cli.commands.queue import note_unserved
from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.client import Client
from sluice.queues import Queue
from sluice.wire import LANES

_EXIT_NO_WORKER = 1

_FIELDS = {
    "name": str,
    "model": str,
    "rows": int,
    "max_rows": int,
    "offline_rows": int,  # that the batch lane may take at this time
    "jobs_per_s": float,  # over the last minute
    "started_at": float,  # Unix seconds
    "version": str,
    "queue_limit": int,
}  # of a worker's presence, in which all are strings

Worker = dict[str, Any]
Depths = dict[str, dict[str, int]]  # jobs by model and lane


def workers(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """Show the live workers, the jobs in their queues, and the queues that nobody serves.

    A job stays in its queue while it runs, and is counted there. With --json, one object for each worker; `queued`
    holds the lanes of its model. Exit codes: 0, or 1 where no worker is alive. `sluice queue list` shows all queues.

    \b
    Examples:
      sluice workers
      sluice workers --json | jq .queued.interactive
    """
    alive, depths, queues = asyncio.run(_look(redis_url))
    note_unserved(queues)
    if not alive:
        raise CliError(
            "no worker is alive here. Start one: sluice worker --model FOLDER_OR_HUB_ID; or name another server with "
            "--redis-url.",
            exit_code=_EXIT_NO_WORKER,
        )
    if as_json:
        for worker in alive:
            print_json({**worker, "queued": depths[worker["model"]]})
        return
    _print_workers(alive)
    _print_depths(depths)


async def _look(url: str) -> tuple[list[Worker], Depths, list[Queue]]:
    async with connected(url) as client:
        alive = list(filter(None, map(_read, await client.workers())))
        alive.sort(key=lambda worker: (worker["model"], worker["name"]))
        depths = {model: await _depth(client, model) for model in dict.fromkeys(w["model"] for w in alive)}
        return alive, depths, await client.queues()


def _read(said: dict[str, str]) -> Worker | None:
    """Nothing where somebody else has written to a worker's key."""
    try:
        return {name: kind(said[name]) for name, kind in _FIELDS.items()}
    except (KeyError, ValueError):
        return None


async def _depth(client: Client, model: str) -> dict[str, int]:
    return {lane: await client.queued(model, lane) for lane in LANES}


def _print_workers(alive: list[Worker]) -> None:
    print_table(
        "Workers",
        {
            "name": "left",
            "model": "left",
            "rows / max": "right",
            "offline max": "right",
            "jobs/s": "right",
            "up for": "right",
            "version": "left",
        },
        [
            (
                worker["name"],
                worker["model"],
                f"{worker['rows']} / {worker['max_rows']}",
                str(worker["offline_rows"]),
                f"{worker['jobs_per_s']:.2f}",
                format_duration(time.time() - worker["started_at"]),
                worker["version"],
            )
            for worker in alive
        ],
    )


def _print_depths(depths: Depths) -> None:
    print_table(
        "Jobs queued and running",
        {"model": "left", **dict.fromkeys(LANES, "right")},
        [(model, *(f"{count:,}" for count in lanes.values())) for model, lanes in depths.items()],
    )
