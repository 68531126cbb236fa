"""`sluice queue`: the queues of a server."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sluice.batch.source import UNITS_S
from sluice.cli.errors import CliError, confirm, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl, lane
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note, notes
from sluice.client import Client
from sluice.contract.keys import Lane
from sluice.queues import MisplacedJobs, Queue
from sluice.wording import counted

queue = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@queue.callback()
def _about() -> None:
    """List the queues with jobs; cancel their waiting jobs.

    \b
    Example:
      sluice queue list
    """


@queue.command("list")
def list_queues(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List every queue that holds jobs, and how many workers serve it.

    A job stays in its queue while it runs, and is counted there. With --json, print an object for each queue. A key
    that only looks like a queue, for example without a lane, is shown with its `problem` and what would be right.

    \b
    Examples:
      sluice queue list
      sluice queue list --json | jq -r 'select(.workers == 0).model'
    """
    queues, misplaced = asyncio.run(_read_all(redis_url))
    if as_json:
        shown: list[Queue | MisplacedJobs] = [*queues, *misplaced]
        for each in shown:
            print_json(asdict(each))
    elif queues:
        print_queues(queues)
        note_unserved(queues)
    elif not misplaced:
        note("there are no jobs on this server.")
    for found in () if as_json else misplaced:
        note(f"no worker takes {_them(found.jobs)} in {found.key!r}: {found.problem}.", style="yellow")


@queue.command()
def purge(
    model: Annotated[str, typer.Argument(help="The model whose jobs to cancel.", metavar="MODEL")],
    lane: Annotated[
        Lane | None,
        typer.Option("--lane", parser=lane, metavar="[interactive|batch]", help="Only this lane.  [default: both]"),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only jobs queued at least this long ago: 90s, 15m, 2h, 3d.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Cancel the waiting jobs of a model; running ones continue.

    Each ends as `cancelled`, as with `sluice cancel`. Exit codes: 0, or 2 if the question was not answered with yes.

    \b
    Examples:
      sluice queue purge misspelt-model
      sluice queue purge default --lane batch --older-than 2h --yes
    """
    older_than_s = _seconds(older_than)
    queues = [each for each in asyncio.run(_read(redis_url)) if each.model == model and lane in (None, each.lane)]
    if not queues:
        note(f"there are no jobs for {model!r} on this server.")
    elif not yes:
        _confirm(queues, older_than_s)  # outside the event loop, which would wait for the answer after Ctrl-C
    ended = asyncio.run(_purge(redis_url, queues, older_than_s))
    note(f"{counted(ended, 'job')} cancelled")


def print_queues(queues: list[Queue]) -> None:
    """Print a table of queues."""
    print_table(
        "Queues",
        {"model": "left", "lane": "left", "jobs": "right", "oldest": "right", "workers": "right"},
        [
            (q.model, q.lane, f"{q.jobs:,}", format_duration(q.oldest_s), str(q.workers) if q.served else "none")
            for q in queues
        ],
    )


def note_unserved(queues: list[Queue]) -> None:
    """Print a note for each model that has jobs and no worker."""
    for model in dict.fromkeys(each.model for each in queues if not each.served):
        waiting = sum(each.jobs for each in queues if each.model == model)
        note(
            f"no worker serves {model!r}, for which {counted(waiting, 'job')} {'waits' if waiting == 1 else 'wait'}. "
            "Start one, or cancel its jobs: "
            f"sluice queue purge {model}",
            style="yellow",
        )


def _them(jobs: int) -> str:
    return "the job" if jobs == 1 else f"the {jobs:,} jobs"


def _seconds(age: str | None) -> float:
    if age is None:
        return 0.0
    number, unit = age[:-1], age[-1:]
    if unit not in UNITS_S or not number.isascii() or not number.isdigit():
        raise CliError(f"--older-than {age!r} is not a duration; one looks like 90s, 15m, 2h or 3d.")
    return float(int(number) * UNITS_S[unit])


async def _read(url: str) -> list[Queue]:
    async with connected(url) as client:
        return await client.queues()


async def _read_all(url: str) -> tuple[list[Queue], list[MisplacedJobs]]:
    async with connected(url) as client:
        return await client.queues(), await client.misplaced_jobs()


async def _purge(url: str, queues: list[Queue], older_than_s: float) -> int:
    async with connected(url) as client:
        return sum([await _purge_lane(client, each, older_than_s) for each in queues])


def _confirm(queues: list[Queue], older_than_s: float) -> None:
    lanes = " and ".join(counted(each.jobs, f"{each.lane} job") for each in queues)
    age = f", if older than {format_duration(older_than_s)}" if older_than_s else ""
    question = f"Cancel the waiting ones of {lanes} for {queues[0].model!r}{age}?"
    confirm(question, refusal="nothing was cancelled; --yes cancels without asking.")


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
