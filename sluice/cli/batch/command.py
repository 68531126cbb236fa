"""`sluice batch`: runs files of requests offline, after the interactive jobs."""

import asyncio
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli import worker_commands
from sluice.cli.batch.feed import feed
from sluice.cli.batch.run import run
from sluice.cli.batch.view import describe_state, print_problems, print_report
from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import UnknownBatch

RunId = Annotated[str, typer.Argument(help="Id of the run.", metavar="ID")]

batch = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@batch.callback()
def about() -> None:
    """Run files of requests offline, in OpenAI's Batch format.

    Interactive jobs go first. Each line of the input is a request, and each line of the output an answer:

    \b
      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

    \b
    Example:
      sluice batch run in.jsonl -o out.jsonl
    """


batch.command()(run)
worker_commands.add(batch, "batch.schedule")
batch.command(hidden=True)(feed)


@batch.command()
def submit(
    file: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="The file of requests.")],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", envvar="SLUICE_BATCH_DIR", help="The folder that the workers check.")
    ],
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Copy a file into the workers' folder, and print the run's id.

    It is run at a time of their schedule. The answers will be in DIR/done/ID/output.jsonl. With --json, print the
    status object instead of the id.

    \b
    Example:
      sluice batch submit in.jsonl --dir /var/lib/sluice
    """
    submitted = asyncio.run(_submit(redis_url, file, folder))
    if as_json:
        print_json(asdict(submitted))
        return
    print(submitted.id)
    note(f"{submitted.id} waits for its scheduled time. See: sluice batch status {submitted.id}")


@batch.command()
def status(id: RunId, redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """Show the status of a run.

    A run is paused while no process feeds it. If `batch run` started it, run the same command again to resume it; a run
    in the workers' folder is resumed within a minute. With --json, print the status object in the format of OpenAI's
    Batch; sluice.paused_at is when the run was paused. Exit codes: 0, or 2 if there is no such run.

    \b
    Examples:
      sluice batch status batch_1b9d6bcd4f0a
      sluice batch status batch_1b9d6bcd4f0a --json | jq .request_counts
    """
    offline_run = asyncio.run(_read(redis_url, id))
    if as_json:
        print_json(asdict(offline_run))
        return
    print_report(offline_run)
    print_problems(offline_run)


@batch.command("list")
def list_runs(redis_url: RedisUrl = REDIS_URL, as_json: AsJson = False) -> None:
    """List the runs of the last week, oldest first. A run is paused while no process feeds it.

    \b
    Examples:
      sluice batch list
      sluice batch list --json | jq -r 'select(.status == "completed").output_file_id'
    """
    runs = asyncio.run(_read_all(redis_url))
    if as_json:
        for each in runs:
            print_json(asdict(each))
    elif runs:
        _print_runs(runs)
    else:
        note("no offline runs in the last week.")


@batch.command()
def cancel(id: RunId, redis_url: RedisUrl = REDIS_URL) -> None:
    """Request the cancellation of a run. Answers are kept; the other lines end as `batch_cancelled`.

    Exit codes: 0, or 2 if there is no such run.

    \b
    Example:
      sluice batch cancel batch_1b9d6bcd4f0a
    """
    offline_run = asyncio.run(_cancel(redis_url, id))
    print(f"{id}  {f'already {offline_run.status}' if offline_run.ended else 'requested; its feeder will end it'}")


@batch.command()
def results(
    id: RunId,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the answers to this file.  [default: stdout]"),
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Fetch the failed lines instead.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Fetch the answers of a run, even if it has not ended.

    It has to run on the machine that has the files of the run.

    \b
    Examples:
      sluice batch results batch_1b9d6bcd4f0a -o out.jsonl
      sluice batch results batch_1b9d6bcd4f0a --errors
    """
    offline_run = asyncio.run(_read(redis_url, id))
    path = offline_run.error_file_id if errors else offline_run.output_file_id
    if path is None:
        note(f"{id} has no {'failed' if errors else 'answered'} lines.")
        return
    if output and output.resolve() in _files(offline_run):
        raise CliError(f"{output} is a file of the run itself, and would be overwritten: give another with -o.")
    _copy(Path(path), output, offline_run)


def _files(run: Batch) -> set[Path]:
    return {Path(name).resolve() for name in (run.input_file_id, run.output_file_id, run.error_file_id) if name}


def _copy(path: Path, output: Path | None, offline_run: Batch) -> None:
    try:
        with path.open("rb") as file:
            if output is None:
                shutil.copyfileobj(file, sys.stdout.buffer)
            else:
                with output.open("wb") as there:
                    shutil.copyfileobj(file, there)
    except BrokenPipeError:
        raise  # the reader of stdout has closed it, which typer handles
    except OSError as error:
        raise CliError(
            f"{error.filename} cannot be opened: {error.strerror}. {offline_run.id} is {offline_run.status}, and its "
            f"files are on {offline_run.sluice.host}."
        ) from None


async def _submit(url: str, file: Path, folder: Path) -> Batch:
    async with connected(url) as client:
        try:
            return await client.submit_batch(file, folder)
        except OSError as error:
            raise CliError(f"{error.filename or file}: {error.strerror or error}.") from None


async def _read(url: str, id: str) -> Batch:
    async with connected(url) as client:
        try:
            return await client.batch_status(id)
        except UnknownBatch as error:
            raise _unknown(error) from None


async def _read_all(url: str) -> list[Batch]:
    async with connected(url) as client:
        return await client.batches()


async def _cancel(url: str, id: str) -> Batch:
    async with connected(url) as client:
        try:
            return await client.cancel_batch(id)
        except UnknownBatch as error:
            raise _unknown(error) from None


def _unknown(error: UnknownBatch) -> CliError:
    return CliError(f"{error}, or its last update is more than a week old. List the runs: sluice batch list")


def _print_runs(runs: list[Batch]) -> None:
    print_table(
        "Offline runs",
        {"id": "left", "status": "left", "answered": "right", "failed": "right", "lines": "right", "created": "right"},
        [
            (
                run.id,
                describe_state(run),
                f"{run.request_counts.completed:,}",
                f"{run.request_counts.failed:,}",
                f"{run.request_counts.total:,}",
                f"{format_duration(time.time() - run.created_at)} ago",
            )
            for run in runs
        ],
    )
