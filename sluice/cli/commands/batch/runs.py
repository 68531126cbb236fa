"""Runs that a worker or a server feeds: `sluice batch submit`, `status`, `list`, `cancel`, `results` and the feeder."""

import asyncio
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from sluice.batch.pace import OpenHours
from sluice.cli.commands.batch import tables
from sluice.cli.commands.batch.run import MapOption, ModelOption, WindowOption, models_of, stoppable, unknown_run
from sluice.cli.errors import CliError, connected, needs_worker, sentence
from sluice.cli.options import (
    REDIS_URL,
    ApiKey,
    AsJson,
    GatewayUrl,
    RedisUrl,
    Remote,
    Retries,
    Retry,
    integer,
    is_given,
    moment,
    retry_options,
    server_of,
)
from sluice.cli.remote import download, offline_runs, submit_there
from sluice.cli.terminal.batch_view import print_problems, print_report, print_runs, read_models
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused, UnknownBatch

RunId = Annotated[str, typer.Argument(help="Id of the run.", metavar="ID")]


def submit_run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="The file of requests.")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", envvar="SLUICE_BATCH_DIR", help="The folder that the workers check."),
    ] = None,
    model: ModelOption = None,
    map: MapOption = None,
    completion_window: WindowOption = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata for the run's status object; repeatable."),
    ] = None,
    retry: Retry = None,
    retries: Retries = None,
    not_before: Annotated[
        float | None,
        typer.Option(parser=moment, metavar="TIME", help="Start it no earlier: 22:00, 90m, or 2026-12-24T22:00."),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            parser=integer(-100, 100), metavar="N", help="Lines of runs with a higher one are queued first, by model."
        ),
    ] = 0,
    id: Annotated[str | None, typer.Option("--id", hidden=True, help="Id of the run; one that exists stays.")] = None,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Submit a file to the workers' folder or a gateway; print its id.

    It is copied or uploaded. It is run at a time of the workers' schedule, and its completion window begins then. The
    answers will be in DIR/done/ID/output.jsonl; those at a gateway are fetched with `sluice batch results`. Model names
    that neither --map nor --model maps are mapped by the workers' SLUICE_BATCH_MODELS. With --json, print the status
    object instead of the id.

    \b
    Examples:
      sluice batch submit in.jsonl --dir /var/lib/sluice
      sluice batch submit in.jsonl --dir /var/lib/sluice --model default --metadata team=search
      sluice batch submit in.jsonl --url http://mac.local:8000
      sluice batch submit in.jsonl --dir /var/lib/sluice --not-before 22:00 --priority 10
    """
    if tables.is_table(file):
        raise CliError(
            f"{file} is a table: run it with `sluice batch run`, and the prompt of a row with --prompt FILE."
        )
    is_here = is_given(context, "folder") and not is_given(context, "url")  # --dir overrides SLUICE_URL
    server = redis_url if is_here else server_of(context, redis_url, url, key)
    if isinstance(server, Remote) and is_given(context, "folder"):
        raise CliError("--dir and --url exclude one another: a gateway has its folder from its own settings.")
    if not isinstance(server, Remote) and folder is None:
        raise CliError("there is no folder: give the workers' with --dir, or a gateway with --url.")
    options = {
        "models": models_of(map, model),
        "completion_window": completion_window,
        "metadata": _metadata(metadata or []),
        **retry_options(retry, retries),
        "not_before": not_before,
        "priority": priority,
        "id": id,
    }
    submitted = asyncio.run(_submit(server, file, folder, options))
    if as_json:
        print_json(asdict(submitted))
        return
    print(submitted.id)
    if submitted.status != "validating":
        note(f"{submitted.id} was submitted before, and is {submitted.status}.")
        return
    until = submitted.sluice.not_before
    waits = "its scheduled time" if until is None else f"{datetime.fromtimestamp(until):%Y-%m-%d %H:%M}"
    note(f"{submitted.id} waits for {waits}. See: sluice batch status {submitted.id}")


def _metadata(options: list[str]) -> dict[str, str] | None:
    pairs = [option.partition("=") for option in options]
    for key, equals, value in pairs:
        if not (key and equals):
            raise CliError(f"{key + equals + value!r} is not metadata: write KEY=VALUE, as in team=search.")
    return {key: value for key, _, value in pairs} or None


async def _submit(server: str | Remote, file: Path, folder: Path | None, options: dict[str, Any]) -> Batch:
    try:
        if isinstance(server, Remote):
            return await submit_there(server, file, options)
        assert folder is not None
        async with connected(server) as client:
            return await client.submit_batch(file, folder, **options)
    except (BatchRefused, ValueError) as error:
        raise CliError(sentence(str(error))) from None
    except OSError as error:
        raise CliError(f"{error.filename or file}: {error.strerror or error}.") from None


def feed_folder(
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
    hours: Annotated[
        str | None, typer.Option(metavar="FROM-TO", help="Hours of offline jobs, in UTC, for the estimated ends.")
    ] = None,
    until_eof: Annotated[
        bool,
        typer.Option("--until-eof", help="Stop at the end of stdin, as on Ctrl-C. A line of it is another --take."),
    ] = False,
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
    takes = asyncio.Event()
    feeding = _feed(redis_url, folder, take, mapping, hours, takes)
    finished = asyncio.run(stoppable(feeding, at_eof=until_eof, on_input=takes.set))
    raise typer.Exit(code=0 if finished else 3)


async def _feed(
    url: str, folder: Path, take: bool, models: dict[str, str], hours: str | None, takes: asyncio.Event
) -> bool:
    from sluice.batch.folder import RunFolder, feed_runs  # imported here, since it needs fcntl, which Windows lacks

    offline: OpenHours | None = None
    if hours:
        with needs_worker():  # for its crontabs
            from sluice.batch.times import Hours
        offline = Hours.read(hours)
    async with connected(url) as client:
        await feed_runs(
            client.redis,
            RunFolder(folder.absolute()),
            take=take,
            models=models,
            redis_of=lambda model: client.of_model(model).redis,
            hours=offline,
            takes=takes,
        )
    return True


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

    It has to run on the machine that has the files of the run. With --url it may run anywhere, the run has to have
    ended, and of a table there are the lines: repeat its `sluice batch run` for the table.

    \b
    Examples:
      sluice batch results batch_1b9d6bcd4f0a -o out.jsonl
      sluice batch results batch_1b9d6bcd4f0a --errors
    """
    server = server_of(context, redis_url, url, key)
    if isinstance(server, Remote) and output and tables.is_table(output):
        raise CliError(
            f"{output}: a gateway has the lines of a run, and not its table; repeat the `sluice batch run` that wrote "
            "it, or give -o FILE.jsonl."
        )
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
