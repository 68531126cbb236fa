"""`sluice dead`: lists, retries and drops the jobs that crashed workers."""

import asyncio
import time
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.follow import mention_missing_worker
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.errors import UnknownJob
from sluice.queues import DeadLetter
from sluice.submission import Submitted

JobId = Annotated[str, typer.Argument(help="Id of the job, as in `sluice dead list`.", metavar="ID")]

dead = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@dead.callback()
def _about() -> None:
    """Show the jobs that crashed workers; retry or drop them.

    A job becomes a dead letter after three crashes of workers on which it was the only suspect. It is kept until it is
    retried or dropped; beyond a thousand, the oldest is deleted.

    \b
    Example:
      sluice dead list
    """


@dead.command("list")
def list_letters(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List the dead letters, oldest first.

    With --json, print an object for each, with the error but without the request, which `sluice dead show` prints.

    \b
    Examples:
      sluice dead list
      sluice dead list --json | jq -r .id
    """
    letters = asyncio.run(_read_all(redis_url))
    if not letters:
        note("there are no dead letters.")
    elif as_json:
        for letter in letters:
            print_json(_without_body(letter))
    else:
        _print_letters(letters)


@dead.command()
def show(id: JobId, redis_url: RedisUrl = REDIS_URL) -> None:
    """Show a dead letter: the error and the request.

    The request goes to stdout as JSON, all else to stderr. Exit codes: 0, or 2 if there is no such letter.

    \b
    Example:
      sluice dead show report-7 > request.json
    """
    letter = asyncio.run(_find(redis_url, id))
    parked = datetime.fromtimestamp(letter.parked_at).astimezone()
    crashes = "1 crash" if letter.crashes == 1 else f"{letter.crashes} crashes"
    note(f"parked {_ago(letter)} ({parked:%Y-%m-%d %H:%M:%S %Z}) after {crashes}")
    note(f"model {letter.model}, lane {letter.lane}")
    note(f"{letter.error.get('type')}: {letter.error.get('message')}", style="red")
    try:
        print_json(letter.request, indent=2)
    except ValueError as error:
        raise _unreadable(id, error) from None


@dead.command()
def retry(id: JobId, redis_url: RedisUrl = REDIS_URL) -> None:
    """Submit a dead letter again under a new id, and print that id.

    The letter is deleted. Exit codes: 0, 2 if there is no such letter, 4 if the queue is full; then the letter is kept.

    \b
    Examples:
      sluice dead retry report-7
      sluice tail $(sluice dead retry report-7)
    """
    job = asyncio.run(_retry(redis_url, id))
    print(job.id)
    note(f"{id} is queued again. Follow it: sluice tail {job.id}")


@dead.command("drop")
def drop_letter(id: JobId, redis_url: RedisUrl = REDIS_URL) -> None:
    """Delete a dead letter and its request.

    Exit codes: 0, or 2 if there is no such letter.

    \b
    Example:
      sluice dead drop report-7
    """
    asyncio.run(_drop(redis_url, id))
    note(f"{id} is dropped")


async def _read_all(url: str) -> list[DeadLetter]:
    async with connected(url) as client:
        return await client.dead_letters()


async def _find(url: str, id: str) -> DeadLetter:
    async with connected(url) as client:
        return await _letter(client, id)


async def _retry(url: str, id: str) -> Submitted:
    async with connected(url) as client:
        letter = await _letter(client, id)
        try:
            job = await client.retry(id)
        except ValueError as error:
            raise _unreadable(id, error) from None
        await mention_missing_worker(client, letter.model)
        return job


async def _drop(url: str, id: str) -> None:
    async with connected(url) as client:
        await _letter(client, id)
        await client.drop_dead_letter(id)


async def _letter(client: Client, id: str) -> DeadLetter:
    for letter in await client.dead_letters():
        if letter.id == id:
            return letter
    raise UnknownJob(f"there is no dead letter {id!r}")


def _unreadable(id: str, error: ValueError) -> CliError:
    """Return the error for a letter without a request: its body expired between two crashes, or is broken."""
    return CliError(f"the request of {id} is missing or broken ({error}); delete it with: sluice dead drop {id}")


def _without_body(letter: DeadLetter) -> dict[str, Any]:
    return {name: value for name, value in asdict(letter).items() if name != "body"}


def _print_letters(letters: list[DeadLetter]) -> None:
    print_table(
        "Dead letters",
        {"id": "left", "model": "left", "lane": "left", "crashes": "right", "parked": "right"},
        [(letter.id, letter.model, letter.lane, str(letter.crashes), _ago(letter)) for letter in letters],
    )


def _ago(letter: DeadLetter) -> str:
    return f"{format_duration(time.time() - letter.parked_at)} ago"
