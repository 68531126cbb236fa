"""`sluice batch feed`: what a worker starts for its folder of runs."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.batch.view import read_models
from sluice.cli.errors import connected
from sluice.cli.options import REDIS_URL, RedisUrl
from sluice.cli.terminal.signals import stoppable

_EXIT_LEFT = 3


def feed(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="With inbox, running, done and failed.")],
    take: Annotated[bool, typer.Option("--take", help="Take in what lies in the inbox too.")] = False,
    models: Annotated[
        str, typer.Option(metavar="NAME=SERVED,...", envvar="SLUICE_BATCH_MODELS", help="`*` is any other name.")
    ] = "",
    until_eof: Annotated[bool, typer.Option("--until-eof", help="Stop at the end of stdin, as at Ctrl-C.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Run the unfinished runs of a folder that no other process feeds, then exit.

    Exit codes: 0 nothing is left to do, 3 stopped by a signal; the next feeder resumes what is unfinished.

    \b
    Example:
      sluice batch feed /var/lib/sluice --take
    """
    stamp = "" if until_eof else "%(asctime)s %(levelname).1s %(name)s: "  # a worker's log has its own
    logging.basicConfig(level="INFO", format=f"{stamp}%(message)s")
    given = read_models(models.split(",") if models else [])
    fed = asyncio.run(stoppable(_feed(redis_url, folder, take, given), at_eof=until_eof))
    raise typer.Exit(0 if fed else _EXIT_LEFT)


async def _feed(url: str, folder: Path, take: bool, models: dict[str, str]) -> bool:
    async with connected(url) as client:
        await client.feed_batches(folder, take=take, models=models)
    return True
