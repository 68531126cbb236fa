"""`sluice batch feed`: the process that a worker starts for its folder of runs."""

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.batch.view import read_models
from sluice.cli.errors import connected
from sluice.cli.options import REDIS_URL, RedisUrl
from sluice.cli.terminal.signals import stoppable

_EXIT_STOPPED = 3


def feed(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with inbox, running, done and failed.")],
    take: Annotated[bool, typer.Option("--take", help="Start the files in the inbox too.")] = False,
    models: Annotated[
        str,
        typer.Option(
            metavar="NAME=SERVED,...",
            envvar="SLUICE_BATCH_MODELS",
            help="Served names for the names in the files; `*` stands for all others.",
        ),
    ] = "",
    until_eof: Annotated[bool, typer.Option("--until-eof", help="Stop at the end of stdin, as on Ctrl-C.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Resume the unfinished runs of a folder that no other process feeds, then exit.

    Exit codes: 0 these runs have ended, 3 stopped by a signal; the next feeder resumes unfinished runs.

    \b
    Example:
      sluice batch feed /var/lib/sluice --take
    """
    stamp = "" if until_eof else "%(asctime)s %(levelname).1s %(name)s: "  # a worker's log adds its own
    logging.basicConfig(level="WARNING", format=f"{stamp}%(message)s")
    logging.getLogger("sluice").setLevel("INFO")
    mapping = read_models(models.split(",") if models else [])
    finished = asyncio.run(stoppable(_feed(redis_url, folder, take, mapping), at_eof=until_eof))
    raise typer.Exit(0 if finished else _EXIT_STOPPED)


async def _feed(url: str, folder: Path, take: bool, models: dict[str, str]) -> bool:
    async with connected(url) as client:
        await client.feed_batches(folder, take=take, models=models)
    return True
