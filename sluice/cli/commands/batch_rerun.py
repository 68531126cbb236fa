"""`sluice batch rerun`: runs lines of an ended run again."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from sluice.cli.commands import batch_tables as tables
from sluice.cli.commands.batch import finish, run_shown, stoppable
from sluice.cli.errors import connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl, Retries, Retry, retry_options
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch


def rerun_lines(
    run: Annotated[str, typer.Argument(metavar="ID|OUT.JSONL", help="Id or output file of a run that has ended.")],
    failed: Annotated[bool, typer.Option("--failed", help="Run lines again that failed.")] = False,
    invalid: Annotated[bool, typer.Option("--invalid", help="… whose answer is not the JSON asked for.")] = False,
    cut: Annotated[bool, typer.Option("--cut", help="… whose answer was cut off; with a higher limit.")] = False,
    refused: Annotated[bool, typer.Option("--refused", help="… that the model refused to answer.")] = False,
    retry: Retry = None,
    retries: Retries = None,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Run failed and invalid lines of an ended run again, or others.

    The new outcomes are written to the same files in place of the old ones; an old one that is better is kept. Nothing
    is lost if the command stops: run it again. A run of the workers' folder is moved back to `running`, and its workers
    resume it. It has to run on the machine that has the files of the run. Exit codes as for `batch run`.

    \b
    Examples:
      sluice batch rerun out.jsonl
      sluice batch rerun batch_1b9d6bcd4f0a --cut --retry cut --retries 3
    """
    named = {"failed": failed, "invalid": invalid, "cut": cut, "refused": refused}
    kinds = [kind for kind, wanted in named.items() if wanted] or ["failed", "invalid"]
    options = retry_options(retry, retries)

    async def rerun(on_progress: Callable[[Batch], None]) -> Batch:
        async with connected(redis_url) as client:
            return await client.rerun_batch(run, kinds, **options, on_progress=on_progress)

    again = asyncio.run(stoppable(run_shown(rerun, run)))
    if again is None or again.ended:
        finish(again, run, as_json, table=tables.of_answers(again.output_file_id) if again else None)
    elif as_json:
        print_json(asdict(again))
    else:
        note(f"{again.id} waits for the workers of its folder. See: sluice batch status {again.id}")
