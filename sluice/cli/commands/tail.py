"""`sluice tail`: follows a job from its first event, whichever worker runs it."""

import asyncio
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from sluice.cli import option_values
from sluice.cli.errors import check_job_id, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.follow import exit_code, follow, mention_waiting
from sluice.cli.terminal.view import ShowEvent, event_printer
from sluice.contract.events import Event

_UNKNOWN_S = 1.0  # short, since an id is printed only after the job was queued


def tail(
    id: Annotated[str, typer.Argument(help="Id of the job, as printed by `sluice submit`.", metavar="ID")],
    after: Annotated[
        int, typer.Option(parser=option_values.integer(), metavar="SEQ", help="Show only the events after this `seq`.")
    ] = -1,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Follow a job from its first event to its end.

    Ctrl-C stops following; the job continues. Exit codes: 0 finished, 1 failed, 3 cancelled.

    \b
    Example:
      sluice tail $(sluice submit "Count to 12.")
    """
    check_job_id(id)
    last = asyncio.run(_tail(redis_url, id, event_printer(as_json=as_json, announce=True), after))
    raise typer.Exit(exit_code(last))


async def _tail(url: str, job_id: str, printer: AbstractContextManager[ShowEvent], after: int) -> Event:
    async with connected(url) as client:
        await mention_waiting(client, job_id)
        with printer as show:
            return await follow(client, job_id, show, after=after, unknown_s=_UNKNOWN_S)
