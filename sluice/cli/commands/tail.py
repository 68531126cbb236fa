"""`sluice tail`: watch a job, from its first event on, wherever it runs."""

import asyncio
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from sluice.cli import option_values
from sluice.cli.errors import check_job_id, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.follow import exit_code, follow, mention_waiting
from sluice.cli.terminal.view import Show, showing
from sluice.wire import Event

_UNKNOWN_S = 1.0  # whoever has an id has it from a submit that is over


def tail(
    id: Annotated[str, typer.Argument(help="The job's id, as `sluice submit` printed it.", metavar="ID")],
    after: Annotated[
        int, typer.Option(parser=option_values.whole(), metavar="SEQ", help="Show the events after this `seq` only.")
    ] = -1,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Follow a job to its end, from its first event on.

    Ctrl-C ends the watching and leaves the job alone. Exit codes: 0 finished, 1 failed, 3 cancelled.

    \b
    Example:
      sluice tail $(sluice submit "Count to 12.")
    """
    check_job_id(id)
    last = asyncio.run(_tail(redis_url, id, showing(as_json=as_json, announce=True), after))
    raise typer.Exit(exit_code(last))


async def _tail(url: str, job_id: str, shown: AbstractContextManager[Show], after: int) -> Event:
    async with connected(url) as client:
        await mention_waiting(client, job_id)
        with shown as show:
            return await follow(client, job_id, show, after=after, unknown_s=_UNKNOWN_S)
