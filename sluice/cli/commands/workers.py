"""`sluice workers`: the live workers of a server, and how they leave or restart."""

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from sluice.cli.commands.queue import note_unserved
from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl, is_given, number
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.contract.keys import DRAINING, LANES
from sluice.presence import HOST, host_notes, parse_worker
from sluice.queues import Queue

workers = typer.Typer(invoke_without_command=True, rich_markup_mode=None)

NoWait = Annotated[bool, typer.Option("--no-wait", help="Ask only, and do not follow what happens.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", parser=number(1), metavar="SECONDS", help="Stop following once nothing has changed for so long."
    ),
]

_SHOWN = (
    "name", "model", "state", "rows", "max_rows", "offline_rows", "jobs_per_s", "started_at", "version", "protocol",
    "load", "tokens_per_s", "queue_limit", "images", *HOST, "step_share", "offline_step_share",
)  # fmt: skip

WorkerFields = dict[str, Any]
Depths = dict[str, dict[str, int]]  # jobs by model and lane


@workers.callback()
def list_workers(context: typer.Context, redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List the live workers; drain or restart them.

    Queues are listed too, also those without a worker. A worker that is draining has been stopped: it ends its jobs and
    takes no more. A job stays in its queue while it runs, and is counted there. `load` is the share of the last ten
    seconds in which a worker has computed. With --json, print an object for each worker; `queued` has the number of
    jobs by lane for its model, `images` is true if the model accepts images, `memory_pressure`, `memory_reclaim`,
    `machine`, `step_share` and `offline_step_share` say what is left to others on its machine, and what an earlier
    version does not publish is null. Exit codes: 0, or 1 if no worker is alive. `sluice queue list` shows all queues.

    \b
    Examples:
      sluice workers
      sluice workers --json | jq .queued.interactive
    """
    if context.invoked_subcommand is not None:
        _refuse_misplaced(context)
        return
    alive, depths, queues = asyncio.run(_read_workers(redis_url))
    note_unserved(queues)
    if not alive:
        raise CliError(
            "no worker is alive on this server. Start one: sluice worker --model FOLDER_OR_HUB_ID; or select another "
            "server with --redis-url.",
            exit_code=1,
        )
    if as_json:
        for worker in alive:
            print_json({**{name: worker[name] for name in _SHOWN}, "queued": depths[worker["model"]]})
        return
    _print_workers(alive)
    _print_depths(depths)


async def _read_workers(url: str) -> tuple[list[WorkerFields], Depths, list[Queue]]:
    async with connected(url) as client:
        alive = list(filter(None, map(parse_worker, await client.workers())))
        alive.sort(key=lambda worker: (worker["model"], worker["name"]))
        depths = {model: await _depth(client, model) for model in dict.fromkeys(w["model"] for w in alive)}
        return alive, depths, await client.queues()


async def _depth(client: Client, model: str) -> dict[str, int]:
    return {lane: await client.queued(model, lane) for lane in LANES}


def _print_workers(alive: list[WorkerFields]) -> None:
    for worker in alive:
        if notes := host_notes(worker):
            note(f"{worker['name']}: {notes}")
    print_table(
        "Workers",
        {
            "name": "left",
            "model": "left",
            "state": "left",
            "rows / max": "right",
            "offline max": "right",
            "jobs/s": "right",
            "tokens/s": "right",
            "load": "right",
            "images": "left",
            "up for": "right",
            "version": "left",
        },
        [
            (
                worker["name"],
                worker["model"],
                worker["state"],
                f"{_number(worker['rows'])} / {_number(worker['max_rows'])}",
                _number(worker["offline_rows"]),
                _number(worker["jobs_per_s"], ".2f"),
                _number(worker["tokens_per_s"], ",.0f"),
                _number(worker["load"], ".0%"),
                "yes" if worker["images"] else "no",
                format_duration(time.time() - worker["started_at"]) if worker["started_at"] else "–",
                worker["version"],
            )
            for worker in alive
        ],
    )


def _number(value: float | None, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def _print_depths(depths: Depths) -> None:
    print_table(
        "Jobs queued and running",
        {"model": "left", **dict.fromkeys(LANES, "right")},
        [(model, *(f"{count:,}" for count in lanes.values())) for model, lanes in depths.items()],
    )


def _refuse_misplaced(context: typer.Context) -> None:
    """Refuse an option of the list in front of another command, which would not receive it. Raises `CliError`."""
    for option, name in (("--redis-url", "redis_url"), ("--json", "as_json")):
        if is_given(context, name):
            raise CliError(f"{option}: it must follow the command. See: sluice workers {context.invoked_subcommand} -h")


@workers.command()
def drain(
    names: Annotated[list[str], typer.Argument(help="Workers, as `sluice workers` names them.", metavar="NAME...")],
    no_wait: NoWait = False,
    timeout_s: Timeout = 600.0,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Let workers end their jobs, and leave.

    They take no more. What still runs after SLUICE_GRACE_S (30 s) continues on other workers, as at SIGTERM. The
    process ends with code 0, so a supervisor must not start it again for that. Shows what is left until the workers are
    gone. Exit codes: 0, 1 if nothing changes for --timeout, 2 for an unknown name.

    \b
    Example:
      sluice workers drain mac-2
    """
    asyncio.run(_ask_all(redis_url, names, "drain", None if no_wait else timeout_s))


@workers.command()
def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="Workers.  [default: all of the server]", metavar="NAME...")
    ] = None,
    no_wait: NoWait = False,
    timeout_s: Timeout = 600.0,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Restart workers, one after the other.

    That is, those of each model, for example after an upgrade. Each drains, executes itself again with its arguments,
    environment and process id, and loads its model; the next begins when it serves again. One that does not come back
    ends the series. The workers take turns by themselves: Ctrl-C ends only the display. Exit codes: 0, 1 if one does
    not restart or nothing changes for --timeout, 2 for an unknown name.

    \b
    Examples:
      sluice workers restart
      sluice workers restart mac-1 mac-2 --no-wait
    """
    asyncio.run(_ask_all(redis_url, names or [], "restart", None if no_wait else timeout_s))


_Fields = Mapping[str, str]


async def _ask_all(url: str, names: list[str], what: Literal["drain", "restart"], timeout_s: float | None) -> None:
    async with connected(url) as client:
        asked = _select(await client.workers(), names)
        for name, fields in asked.items():
            if not await client.ask_worker(fields, what):
                note(f"{name} has ended meanwhile")
        if timeout_s is None:
            note(f"asked to {what}: {', '.join(asked)}")
        else:
            await _follow(client, asked, what, timeout_s)


def _select(alive: list[dict[str, str]], names: list[str]) -> dict[str, _Fields]:
    """Return the named workers, or all, by name. Raises `CliError` if one is unknown, or cannot be asked."""
    known = {each["name"]: each for each in alive if {"name", "started_at"} <= each.keys()}
    there_are = ", ".join(sorted(known)) or "none"
    if unknown := [name for name in names if name not in known]:
        raise CliError(f"no worker named {unknown[0]!r} is alive; the workers of this server: {there_are}.")
    if not known:
        raise CliError("no worker is alive on this server.", exit_code=1)
    selected: dict[str, _Fields] = {name: known[name] for name in names or sorted(known)}
    if old := [name for name, fields in selected.items() if "protocol" not in fields]:
        raise CliError(f"{old[0]} is a worker of an earlier version, which cannot be asked; send SIGTERM to it.")
    return selected


async def _follow(
    client: Client, asked: Mapping[str, _Fields], what: Literal["drain", "restart"], timeout_s: float
) -> None:
    """Print what the workers do, a line for each change, until all have done it. Raises `CliError`."""
    shown = dict[str, str]()
    changed_at = time.monotonic()
    while True:
        alive = {each.get("name", ""): each for each in await client.workers()}
        now = {name: _progress(fields, alive.get(name), what) for name, fields in asked.items()}
        for name, progress in now.items():
            if progress != shown.get(name):
                note(f"{name}: {progress}")
                changed_at = time.monotonic()
        shown = now
        left = [name for name, progress in now.items() if progress not in _DONE]
        if lost := [name for name in left if now[name] == _WITHDRAWN]:
            raise CliError(
                f"{lost[0]} will not {what}: a worker before it did not come back, as its log says, or the server lost "
                "the request. Ask again.",
                exit_code=1,
            )
        if not left:
            return
        if time.monotonic() - changed_at > timeout_s:
            raise CliError(f"nothing has changed for {timeout_s:g} s: {left[0]} {now[left[0]]}.", exit_code=1)
        await asyncio.sleep(0.5)


_GONE, _BACK = "has left", "is back"
_WITHDRAWN = "is not asked any more"
_DONE = (_GONE, _BACK)


def _progress(asked: _Fields, now: _Fields | None, what: Literal["drain", "restart"]) -> str:
    """Return how far a worker is. `asked`, `now`: its fields when it was asked, and now; None if it is not there."""
    if now is None:
        return _GONE if what == "drain" else "starts, and loads its model"
    if now.get("started_at") != asked["started_at"]:
        return _GONE if what == "drain" else _BACK
    if now.get("state") == DRAINING:
        return f"drains, rows left: {now.get('rows')}"
    if "asked" not in now:
        return _WITHDRAWN
    return "waits for its turn" if what == "restart" else "is asked to drain"
