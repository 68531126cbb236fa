"""`sluice queue`: what waits on a server, and how to get rid of it."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sluice.cli import option_values
from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note, notes
from sluice.client import Client
from sluice.queues import Queue
from sluice.wire import Lane
from sluice.wording import counted

queue = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
NOBODY = "nobody"


@queue.callback()
def about() -> None:
    """List the queues with jobs in them; cancel what waits there.

    \b
    Example:
      sluice queue list
    """


@queue.command("list")
def list_queues(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List every queue in which there are jobs, and who serves it.

    A job stays in its queue while it runs, and is counted there. With --json, one object for each queue; `workers` is
    the number of those that serve it.

    \b
    Examples:
      sluice queue list
      sluice queue list --json | jq -r 'select(.workers == 0).model'
    """
    found = asyncio.run(_read(redis_url))
    if as_json:
        for each in found:
            print_json(asdict(each))
    elif found:
        print_queues(found)
    else:
        note("there are no jobs here.")


@queue.command()
def purge(
    model: Annotated[str, typer.Argument(help="The model whose jobs are to be cancelled.", metavar="MODEL")],
    lane: Annotated[
        Lane | None,
        typer.Option(
            "--lane", parser=option_values.lane, metavar="[interactive|batch]", help="One lane alone.  [default: both]"
        ),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only jobs that were queued so long ago: 90s, 15m, 2h, 3d.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Cancel the jobs of a model that wait. Those that run go on.

    Each ends as `cancelled`, as by `sluice cancel`. Exit codes: 0, or 2 when the question was not answered with yes.

    \b
    Examples:
      sluice queue purge misspelt-model
      sluice queue purge default --lane batch --older-than 2h --yes
    """
    older_than_s = _seconds(older_than)
    found = [each for each in asyncio.run(_read(redis_url)) if each.model == model and lane in (None, each.lane)]
    if not found:
        note(f"there are no jobs for {model!r} here.")
    elif not yes:
        _confirm(found, older_than_s)  # with no event loop, which would wait for the answer after Ctrl-C
    ended = asyncio.run(_purge(redis_url, found, older_than_s))
    note(f"{counted(ended, 'job')} cancelled")


def print_queues(found: list[Queue]) -> None:
    """Print a table of queues."""
    print_table(
        "Queues",
        {"model": "left", "lane": "left", "jobs": "right", "oldest": "right", "workers": "right"},
        [
            (q.model, q.lane, f"{q.jobs:,}", format_duration(q.oldest_s), str(q.workers) if q.served else NOBODY)
            for q in found
        ],
    )


def note_unserved(found: list[Queue]) -> None:
    """One line for each model whose jobs wait for ever."""
    for model in dict.fromkeys(each.model for each in found if not each.served):
        waiting = sum(each.jobs for each in found if each.model == model)
        note(
            f"no worker serves {model!r}, for which {counted(waiting, 'job')} {'waits' if waiting == 1 else 'wait'}. "
            "Start one, or cancel what waits: "
            f"sluice queue purge {model}",
            style="yellow",
        )


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    number, unit = age[:-1], age[-1:]
    if unit not in _UNITS_S or not number.isascii() or not number.isdigit():
        raise CliError(f"--older-than {age!r} is no age; one looks like 90s, 15m, 2h or 3d.")
    return float(int(number) * _UNITS_S[unit])


async def _read(url: str) -> list[Queue]:
    async with connected(url) as client:
        return await client.queues()


async def _purge(url: str, found: list[Queue], older_than_s: float) -> int:
    async with connected(url) as client:
        return sum([await _purge_lane(client, each, older_than_s) for each in found])


def _confirm(found: list[Queue], older_than_s: float) -> None:
    lanes = " and ".join(counted(each.jobs, f"{each.lane} job") for each in found)
    age = f", if older than {format_duration(older_than_s)}" if older_than_s else ""
    question = f"Cancel what waits of {lanes} for {found[0].model!r}{age}?"
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # no terminal, or Ctrl-C
        agreed = False
        note("")
    if not agreed:
        raise CliError("nothing was cancelled; --yes does not ask.")


async def _purge_lane(client: Client, each: Queue, older_than_s: float) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(f"{each.model} {each.lane}", total=each.jobs)
        return await client.purge(
            each.model,
            each.lane,
            older_than_s=older_than_s,
            on_progress=lambda done, ended: bar.update(task, completed=done),
        )
