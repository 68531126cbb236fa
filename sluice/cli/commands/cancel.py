"""`sluice cancel`: cancels jobs, and prints the outcome of each."""

import asyncio
from typing import Annotated

import typer

from sluice.cli.errors import check_job_id, connected
from sluice.cli.options import REDIS_URL, RedisUrl
from sluice.cli.terminal.follow import CANCEL_WAIT_S, follow
from sluice.client import Client
from sluice.errors import CancelNotStored, UnknownJob

_UNKNOWN = "unknown: never submitted, or its events have expired"


def cancel(
    ids: Annotated[list[str], typer.Argument(help="Ids of the jobs.", metavar="ID")],
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Cancel queued or running jobs, and print the outcome of each.

    A waiting job ends at once, even without a worker; a running job is ended by its worker.

    Exit codes: 0 if all ids are known, else 2.

    \b
    Example:
      sluice cancel report-7 report-8
    """
    for job_id in ids:
        check_job_id(job_id)
    outcomes = asyncio.run(_cancel_all(redis_url, ids))
    for job_id, outcome in zip(ids, outcomes, strict=True):
        print(f"{job_id}  {outcome}")
    raise typer.Exit(2 if _UNKNOWN in outcomes else 0)


async def _cancel_all(url: str, ids: list[str]) -> list[str]:
    async with connected(url) as client:
        return await asyncio.gather(*(_cancel(client, job_id) for job_id in ids))


async def _cancel(client: Client, job_id: str) -> str:
    """Cancel one job and return the outcome as text. An unknown id is skipped: the stored request would cancel a later
    job with that id."""
    match await client.state(job_id):
        case None:
            return _UNKNOWN
        case "queued" | "running":
            return await _request_cancel(client, job_id)
        case state:
            return f"already {state}"


async def _request_cancel(client: Client, job_id: str) -> str:
    try:
        await client.cancel(job_id)
    except CancelNotStored:
        return f"{await _outcome(client, job_id)} (the workers got the request, but the full server did not store it)"
    return await _outcome(client, job_id)


async def _outcome(client: Client, job_id: str) -> str:
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            last = await follow(client, job_id, lambda *_: None)
    except TimeoutError:
        return f"requested; the worker that runs it has not answered in {CANCEL_WAIT_S:g} s"
    except UnknownJob:
        return _UNKNOWN
    return "cancelled" if last.type == "cancelled" else f"already {last.type}"
