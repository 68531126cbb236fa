"""`sluice batch status`, `list`, `cancel` and `results`: runs that another command or a worker feeds."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from sluice.cli.commands import batch_tables as tables
from sluice.cli.errors import CliError
from sluice.cli.options import REDIS_URL, ApiKey, AsJson, GatewayUrl, RedisUrl, Remote, server_of
from sluice.cli.remote import download, offline_runs
from sluice.cli.terminal.batch_view import print_problems, print_report, print_runs
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import UnknownBatch

RunId = Annotated[str, typer.Argument(help="Id of the run.", metavar="ID")]


def status(
    context: typer.Context,
    id: RunId,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of a run.

    A run is paused while no process feeds it. If `batch run` started it, run the same command again to resume it; a run
    in the workers' folder is resumed within a minute. With --json, print the status object in the format of OpenAI's
    Batch; sluice.paused_at is when the run was paused. Exit codes: 0, or 2 if there is no such run.

    \b
    Examples:
      sluice batch status batch_1b9d6bcd4f0a
      sluice batch status batch_1b9d6bcd4f0a --json | jq .request_counts
    """
    offline_run = asyncio.run(_read(server_of(context, redis_url, url, key), id))
    if as_json:
        print_json(asdict(offline_run))
        return
    print_report(offline_run)
    print_problems(offline_run)


def list_runs(
    context: typer.Context,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of the last week, oldest first. A run is paused while no process feeds it.

    \b
    Examples:
      sluice batch list
      sluice batch list --json | jq -r 'select(.status == "completed").output_file_id'
    """
    runs = asyncio.run(_read_all(server_of(context, redis_url, url, key)))
    if as_json:
        for each in runs:
            print_json(asdict(each))
    elif runs:
        print_runs(runs)
    else:
        note("no offline runs in the last week.")


def cancel_run(
    context: typer.Context, id: RunId, redis_url: RedisUrl = REDIS_URL, url: GatewayUrl = None, key: ApiKey = None
) -> None:
    """Request the cancellation of a run. Answers are kept; the other lines end as `batch_cancelled`.

    Exit codes: 0, or 2 if there is no such run.

    \b
    Example:
      sluice batch cancel batch_1b9d6bcd4f0a
    """
    offline_run = asyncio.run(_cancel(server_of(context, redis_url, url, key), id))
    print(f"{id}  {f'already {offline_run.status}' if offline_run.ended else 'requested; its feeder will end it'}")


def results(
    context: typer.Context,
    id: RunId,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the answers to this file.  [default: stdout]"),
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Fetch the failed lines instead.")] = False,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
) -> None:
    """Fetch the answers of a run, or its table, also before its end.

    It has to run on the machine that has the files of the run. With --url it may run anywhere, and the run has to have
    ended.

    \b
    Examples:
      sluice batch results batch_1b9d6bcd4f0a -o out.jsonl
      sluice batch results batch_1b9d6bcd4f0a --errors
    """
    server = server_of(context, redis_url, url, key)
    offline_run = asyncio.run(_read(server, id))
    file = offline_run.error_file_id if errors else offline_run.output_file_id
    if file is None:
        at_end = " yet" if isinstance(server, Remote) and not offline_run.ended else ""
        note(f"{id} has no {'failed' if errors else 'answered'} lines{at_end}.")
        return
    own = (offline_run.input_file_id, offline_run.output_file_id, offline_run.error_file_id)
    if output and not isinstance(server, Remote) and output.resolve() in {Path(name).resolve() for name in own if name}:
        raise CliError(f"{output} is a file of the run itself, and would be overwritten: give another with -o.")
    if not (errors or isinstance(server, Remote)) and tables.export(Path(file), output):
        return
    with _named(output, offline_run), _opened(server, file, output) as found:
        if output is None:
            shutil.copyfileobj(found, sys.stdout.buffer)
            return
        with output.open("wb") as written:
            shutil.copyfileobj(found, written)


def _opened(server: str | Remote, file: str, output: Path | None) -> BinaryIO:
    if not isinstance(server, Remote):
        return open(file, "rb")
    fetched = tempfile.TemporaryFile(dir=output and output.parent)  # noqa: SIM115 - its caller closes it
    asyncio.run(download(server, file, fetched))
    fetched.seek(0)
    return fetched


@contextmanager
def _named(output: Path | None, run: Batch) -> Iterator[None]:
    """Raise `CliError` for a file that cannot be opened in the block."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of stdout has closed it, which typer handles
    except OSError as error:
        where = f" {run.id} is {run.status}, and its files are on {run.sluice.host}." if run.sluice.host else ""
        raise CliError(f"{error.filename or output} cannot be opened: {error.strerror}.{where}") from None


async def _read(server: str | Remote, id: str) -> Batch:
    async with offline_runs(server) as runs:
        try:
            return await runs.batch_status(id)
        except UnknownBatch as error:
            raise unknown_run(error) from None


async def _read_all(server: str | Remote) -> list[Batch]:
    async with offline_runs(server) as runs:
        return await runs.batches()


async def _cancel(server: str | Remote, id: str) -> Batch:
    async with offline_runs(server) as runs:
        try:
            return await runs.cancel_batch(id)
        except UnknownBatch as error:
            raise unknown_run(error) from None


def unknown_run(error: UnknownBatch) -> CliError:
    return CliError(f"{error}, or its last update is more than a week old. List the runs: sluice batch list")
