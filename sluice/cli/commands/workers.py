"""`sluice workers`: lists the live workers and the jobs in their queues."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sluice.cli.commands.queue import note_unserved
from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.client import Client
from sluice.contract.keys import LANES
from sluice.queues import Queue

_EXIT_NO_WORKER = 1

_FIELDS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "model": str,
    "state": str,  # running or draining
    "rows": int,
    "max_rows": int,
    "offline_rows": int,  # rows that the batch lane may use now
    "jobs_per_s": float,  # over the last minute
    "started_at": float,  # Unix seconds
    "version": str,
    "queue_limit": int,
    "images": lambda value: value == "yes",  # if the model accepts images
}  # parsers of the fields of a worker's hash

WorkerFields = dict[str, Any]
Depths = dict[str, dict[str, int]]  # jobs by model and lane


def workers(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List the live workers, their queues, and those without a worker.

    A worker that is draining has been stopped: it ends its jobs and takes no more. A job stays in its queue while it
    runs, and is counted there. With --json, print an object for each worker; `queued`
    has the number of jobs by lane for its model, and `images` is true if the model accepts images. Exit codes: 0, or 1
    if no worker is alive. `sluice queue list` shows all queues.

    \b
    Examples:
      sluice workers
      sluice workers --json | jq .queued.interactive
    """
    alive, depths, queues = asyncio.run(_read_all(redis_url))
    note_unserved(queues)
    if not alive:
        raise CliError(
            "no worker is alive on this server. Start one: sluice worker --model FOLDER_OR_HUB_ID; or select another "
            "server with --redis-url.",
            exit_code=_EXIT_NO_WORKER,
        )
    if as_json:
        for worker in alive:
            print_json({**worker, "queued": depths[worker["model"]]})
        return
    _print_workers(alive)
    _print_depths(depths)


async def _read_all(url: str) -> tuple[list[WorkerFields], Depths, list[Queue]]:
    async with connected(url) as client:
        alive = list(filter(None, map(_parse, await client.workers())))
        alive.sort(key=lambda worker: (worker["model"], worker["name"]))
        depths = {model: await _depth(client, model) for model in dict.fromkeys(w["model"] for w in alive)}
        return alive, depths, await client.queues()


def _parse(fields: dict[str, str]) -> WorkerFields | None:
    """Return the parsed fields; None for a foreign value under a worker's key."""
    try:
        known = {"state": "running", **fields}  # which workers of earlier versions do not publish
        return {name: kind(known[name]) for name, kind in _FIELDS.items()}
    except (KeyError, ValueError):
        return None


async def _depth(client: Client, model: str) -> dict[str, int]:
    return {lane: await client.queued(model, lane) for lane in LANES}


def _print_workers(alive: list[WorkerFields]) -> None:
    print_table(
        "Workers",
        {
            "name": "left",
            "model": "left",
            "state": "left",
            "rows / max": "right",
            "offline max": "right",
            "jobs/s": "right",
            "images": "left",
            "up for": "right",
            "version": "left",
        },
        [
            (
                worker["name"],
                worker["model"],
                worker["state"],
                f"{worker['rows']} / {worker['max_rows']}",
                str(worker["offline_rows"]),
                f"{worker['jobs_per_s']:.2f}",
                "yes" if worker["images"] else "no",
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
