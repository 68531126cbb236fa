"""`sluice cancel`: ask for the end of jobs, and say what became of each."""

import asyncio
from typing import Annotated

import typer

from sluice.cli.errors import check_job_id, connected
from sluice.cli.options import REDIS_URL, RedisUrl
from sluice.cli.terminal.follow import PATIENCE_S, follow
from sluice.client import Client
from sluice.errors import CancelNotStored, UnknownJob

_UNKNOWN = "unknown: never submitted, or its traces have expired"


def cancel(
    ids: Annotated[list[str], typer.Argument(help="The jobs' ids.", metavar="ID")],
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Ask for the end of jobs, queued or running, and say what became of each.

    A job that waits ends at once, whether a worker is there or not; one that runs is ended by its worker.

    Exit codes: 0 when all were known, 2 when one was not.

    \b
    Example:
      sluice cancel report-7 report-8
    """
    for job_id in ids:
        check_job_id(job_id)
    fates = asyncio.run(_cancel_all(redis_url, ids))
    for job_id, fate in zip(ids, fates, strict=True):
        print(f"{job_id}  {fate}")
    raise typer.Exit(2 if _UNKNOWN in fates else 0)


async def _cancel_all(url: str, ids: list[str]) -> list[str]:
    async with connected(url) as client:
        return await asyncio.gather(*(_cancel(client, job_id) for job_id in ids))


async def _cancel(client: Client, job_id: str) -> str:
    """An unknown id is not cancelled: the wish would outlive the mistake, and end a later job of that name."""
    match await client.state(job_id):
        case None:
            return _UNKNOWN
        case "queued" | "running":
            return await _ask_for_end(client, job_id)
        case state:
            return f"already {state}"


async def _ask_for_end(client: Client, job_id: str) -> str:
    try:
        await client.cancel(job_id)
    except CancelNotStored:
        return f"{await _fate(client, job_id)} (the server is full: the workers were told, but it is not kept)"
    return await _fate(client, job_id)


async def _fate(client: Client, job_id: str) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            last = await follow(client, job_id, lambda *_: None)
    except TimeoutError:
        return f"requested; the worker that runs it has not answered in {PATIENCE_S:g} s"
    except UnknownJob:
        return _UNKNOWN
    return "cancelled" if last.type == "cancelled" else f"already {last.type}"
