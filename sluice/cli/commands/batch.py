"""`sluice batch`: runs files of requests offline, after the interactive jobs."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import typer

from sluice.batch.source import WINDOW
from sluice.batch.table_run import TableRun
from sluice.cli import worker_commands
from sluice.cli.commands import batch_tables as tables
from sluice.cli.errors import CliError, connected, sentence
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
    retry_options,
    server_of,
)
from sluice.cli.remote import download, offline_runs, run_there, submit_there
from sluice.cli.terminal.batch_view import ProgressView, print_problems, print_report, print_runs, read_models
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.table_view import print_comparison
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused, UnknownBatch

T = TypeVar("T")

OnProgress = Callable[[Batch], None]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def stoppable(work: Coroutine[Any, Any, T], *, at_eof: bool = False) -> T | None:
    """Run the coroutine and return its result; None if a signal, or with `at_eof` the end of stdin, cancelled it. A
    second signal ends the process at once."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        task.cancel()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    if at_eof:
        _call_at_eof(stop)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _call_at_eof(stop: Callable[[], None]) -> None:
    """Call `stop` in the event loop at the end of stdin. Uses a daemon thread, since not every stdin can be polled."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        while os.read(0, 4096):
            pass
        try:
            loop.call_soon_threadsafe(stop)
        except RuntimeError:
            pass  # the event loop has ended

    threading.Thread(target=read, daemon=True).start()


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
    raise typer.Exit(code=0 if finished else 3)


async def _feed(url: str, folder: Path, take: bool, models: dict[str, str]) -> bool:
    async with connected(url) as client:
        await client.feed_batches(folder, take=take, models=models)
    return True


ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Send all lines to this model, except those of --map.")
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="NAME=SERVED",
        help="Send lines for model NAME, or for models that begin with NAME*, to SERVED; repeatable.",
    ),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--completion-window",
        metavar="TIME",
        help="Lines that are not done after it end as expired: 90m, 2d.  [default: 24h]",
    ),
]


def _mapping(map: list[str] | None, model: str | None) -> dict[str, str] | None:
    models = read_models(map or [])
    if model is not None:
        models.setdefault("*", model)
    return models or None


def run_file(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="IN", help="The file of requests, one per line; or a table.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The file for the answers, one per line; or a table.")
    ],
    prompt: tables.Prompt = None,
    system: tables.System = None,
    schema: tables.Schema = None,
    image: tables.Image = None,
    image_dir: tables.ImageDir = None,
    key_column: tables.KeyColumn = None,
    param: tables.Param = None,
    rows: tables.Rows = None,
    sample: tables.Sample = None,
    sample_seed: tables.SampleSeed = 0,
    encoding: tables.Encoding = None,
    delimiter: tables.Delimiter = None,
    prefix: tables.Prefix = "",
    details: tables.Details = False,
    dry_run: tables.DryRun = False,
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file for the failed lines.  [default: next to the output, .errors.jsonl]"
        ),
    ] = None,
    model: ModelOption = None,
    map: MapOption = None,
    completion_window: WindowOption = None,
    window: Annotated[
        int, typer.Option(parser=integer(1), metavar="N", help="Lines of one model in the queue at once.")
    ] = WINDOW,
    wait: Annotated[
        bool, typer.Option("--wait", help="Queue lines for a model that no worker serves, even if others are served.")
    ] = False,
    retry: Retry = None,
    retries: Retries = None,
    on_end: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this in a shell after the end, with SLUICE_BATCH_ID, _STATUS, _OUTPUT and _ERRORS in its "
            "environment and the status object on stdin.",
        ),
    ] = None,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Run a file of requests, or a prompt for each row of a table, offline, and show the progress.

    If the command, a worker or the server stops, run the same command again: it resumes, and each line is answered
    once. Ctrl-C pauses the run. The report goes to stdout, with --json as OpenAI's Batch object; all else to stderr.
    A file made for another service names models that no worker serves here: --map names the served model to use.

    With --prompt the input is a table (.csv, .tsv, .jsonl, .parquet). {name} in the prompt is the cell of that column,
    {{ is a brace. The output is the table with the columns `answer`, or the fields of --schema, and `error`, in the
    format of its suffix; it is written when the run ends. Its state is in OUT.run, a folder.

    With --url the gateway runs the file, and goes on when this command stops: the same command waits again, and
    fetches the answers at the end.

    \b
    The exit code is the state of the run; repeating the command after the end gives the same code:
      0 every line is answered     1 the run has ended, and some lines are not answered
      2 refused: nothing was done  3 paused by Ctrl-C or SIGTERM: the same command resumes

    \b
    Examples:
      sluice batch run in.jsonl -o out.jsonl
      sluice batch run for-openai.jsonl -o out.jsonl --map gpt-4o-mini=default
      sluice batch run in.jsonl -o out.jsonl --url http://mac.local:8000
      sluice batch run in.jsonl -o out.jsonl --on-end 'mail -s "$SLUICE_BATCH_STATUS" me@example.com'
      sluice batch run in.jsonl -o out.jsonl --retry invalid,cut,failed
      sluice batch run reviews.csv -o out.csv --prompt prompt.txt --schema answer.json --dry-run
      sluice batch run reviews.csv -o out.csv --prompt prompt.txt --schema answer.json --param temperature=0
    """
    server = server_of(context, redis_url, url, key)
    table = tables.prepare(file, output, model, errors, tables.TableOptions.of(locals()))
    if table and dry_run:
        tables.dry_run(table, server, model)
        return
    options = {
        "errors": errors,
        "models": _mapping(map, model),
        "completion_window": completion_window,
        "served_only": not wait,
        **({"window": window} if is_given(context, "window") else {}),
        **retry_options(retry, retries),
    }
    requests, answers = (table.requests, table.answers) if table else (file, output)
    batch = asyncio.run(stoppable(_run(server, requests, answers, options)))
    paused = "the run goes on at the gateway" if isinstance(server, Remote) else "paused"
    finish(batch, file, as_json, on_end, paused=paused, table=table)


def finish(
    batch: Batch | None,
    file: str | Path,
    as_json: bool,
    on_end: str | None = None,
    *,
    paused: str = "paused",
    table: TableRun | None = None,
) -> None:
    """Write the table of a run, print the report, run the command for its end, and exit with its code. None: it was
    interrupted, and is `paused`."""
    if batch is None:
        note(f"{paused}. Run the same command again to resume.")
        raise typer.Exit(code=3)
    num_errors = tables.finish(table, batch) if table else 0
    _print_outcome(file, batch, as_json)
    if on_end is not None:
        _run_at_end(on_end, replace(batch, output_file_id=str(table.output)) if table else batch)
    raise typer.Exit(_exit_code(batch) or min(num_errors, 1))


def _print_outcome(file: str | Path, batch: Batch, as_json: bool) -> None:
    if as_json:
        print_json(asdict(batch))
    elif batch.status != "failed":
        print_report(batch)
    if batch.errors:
        note(f"{file} was refused, and none of its lines was run:", style="red")
        print_problems(batch)
        if any(problem.code == "unserved_model" for problem in batch.errors.data):
            note("Change the options as shown, or add --wait to queue the lines until there is a worker.", style="red")


def _run_at_end(command: str, batch: Batch) -> None:
    """Run a user's command with the status of a run. What it prints goes to stderr, and a failure is only told: the
    exit code is that of the run."""
    about = {"ID": batch.id, "STATUS": batch.status, "OUTPUT": batch.output_file_id, "ERRORS": batch.error_file_id}
    env = os.environ | {f"SLUICE_BATCH_{name}": value or "" for name, value in about.items()}
    code = subprocess.run(command, shell=True, env=env, input=batch.to_json().encode(), stdout=2).returncode
    if code:
        note(f"--on-end: the command has failed with exit code {code}; the run is {batch.status}.", style="red")


async def _run(server: str | Remote, input: Path, output: Path, options: dict[str, Any]) -> Batch:
    async def run(on_progress: OnProgress) -> Batch:
        if isinstance(server, Remote):
            return await run_there(server, input, output, {**options, "on_progress": on_progress})
        async with connected(server) as client:
            return await client.batch(input, output, **options, on_progress=on_progress)

    return await run_shown(run, output)


async def run_shown(run: Callable[[OnProgress], Awaitable[Batch]], output: str | Path) -> Batch:
    """Perform a run and show its progress. Raises `CliError`."""
    with ProgressView() as view, _log_as_notes("sluice.batch"):
        try:
            batch = await run(view.update)
        except UnknownBatch as error:
            raise _unknown(error) from None
        except (BatchRefused, ValueError) as error:
            raise CliError(sentence(str(error))) from None
        except OSError as error:
            raise CliError(f"{error.filename or output}: {error.strerror}. The run is unchanged.") from None
    if batch.ended and batch.status != "failed" and not view.started:
        note(f"{batch.id} was complete already; there was nothing to do.")
    return batch


def _exit_code(batch: Batch) -> int:
    if batch.status == "failed":  # the file was refused
        return 2
    counts = batch.request_counts
    return 0 if counts.completed == counts.total else 1


@contextmanager
def _log_as_notes(name: str) -> Iterator[None]:
    """Print the messages of a logger as notes while the context is open."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage(), style="yellow")

    logger, handler = logging.getLogger(name), Notes()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


RunId = Annotated[str, typer.Argument(help="Id of the run.", metavar="ID")]

batch = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@batch.callback()
def _about() -> None:
    """Run files of requests offline, in OpenAI's Batch format.

    Interactive jobs go first. Each line of the input is a request, and each line of the output an answer:

    \b
      {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

    \b
    Example:
      sluice batch run in.jsonl -o out.jsonl
    """


batch.command("run")(run_file)


@batch.command("compare")
def compare_prompts(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="TABLE", help="The table: .csv, .tsv, .jsonl or .parquet.")],
    prompt: Annotated[
        list[Path], typer.Option("--prompt", metavar="FILE", help="A prompt for a row; give two.", show_default=False)
    ],
    sample: tables.Sample = 20,
    sample_seed: tables.SampleSeed = 0,
    system: tables.System = None,
    schema: tables.Schema = None,
    image: tables.Image = None,
    image_dir: tables.ImageDir = None,
    key_column: tables.KeyColumn = None,
    param: tables.Param = None,
    rows: tables.Rows = None,
    encoding: tables.Encoding = None,
    delimiter: tables.Delimiter = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="The model that answers.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Keep the answers here, and use those of earlier calls."),
    ] = None,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Run two prompts over the same rows of a table, and show how the answers agree.

    It prints the sums of both, how many rows have equal values in each field, and the rows that differ; with --json all
    of them as one object. Exit codes as those of `batch run`.

    \b
    Examples:
      sluice batch compare reviews.csv --prompt short.txt --prompt long.txt
      sluice batch compare reviews.csv --prompt a.txt --prompt b.txt --schema answer.json --sample 50 -o compared
    """
    given = tables.TableOptions.of({**locals(), "prompt": None})

    server = server_of(context, redis_url, url, key)

    def ask(requests: Path, answers: Path) -> Batch | None:
        options = {"models": _mapping(None, model), "served_only": True}
        batch = asyncio.run(stoppable(_run(server, requests, answers, options)))
        if batch and batch.errors:
            print_problems(batch)
            raise typer.Exit(2)
        return batch

    found = tables.compare(file, prompt, given, model, folder, ask)
    if found is None:
        note("interrupted. Run the same command again." + (" The answers so far are kept." if folder else ""))
        raise typer.Exit(3)
    if as_json:
        print_json(asdict(found))
    else:
        print_comparison(found)
    raise typer.Exit(1 if any(score.errors for score in found.scores) else 0)


worker_commands.add(batch, "batch.schedule")
batch.command("feed", hidden=True)(feed_folder)


@batch.command("submit")
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
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Copy a file into the workers' folder, or upload it to a gateway, and print the run's id.

    It is run at a time of the workers' schedule, and its completion window begins then. The answers will be in
    DIR/done/ID/output.jsonl; those at a gateway are fetched with `sluice batch results`. Model names that neither --map
    nor --model maps are mapped by the workers' SLUICE_BATCH_MODELS. With --json, print the status object instead of the
    id.

    \b
    Examples:
      sluice batch submit in.jsonl --dir /var/lib/sluice
      sluice batch submit in.jsonl --dir /var/lib/sluice --model default --metadata team=search
      sluice batch submit in.jsonl --url http://mac.local:8000
    """
    server = server_of(context, redis_url, url, key)
    if isinstance(server, Remote) and is_given(context, "folder"):
        raise CliError("--dir and --url exclude one another: a gateway has its folder from its own settings.")
    if not isinstance(server, Remote) and folder is None:
        raise CliError("there is no folder: give the workers' with --dir, or a gateway with --url.")
    options = {
        "models": _mapping(map, model),
        "completion_window": completion_window,
        "metadata": _metadata(metadata or []),
        **retry_options(retry, retries),
    }
    submitted = asyncio.run(_submit(server, file, folder, options))
    if as_json:
        print_json(asdict(submitted))
        return
    print(submitted.id)
    note(f"{submitted.id} waits for its scheduled time. See: sluice batch status {submitted.id}")


@batch.command()
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


@batch.command("list")
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


@batch.command("cancel")
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


@batch.command()
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
    """Fetch the answers of a run, even if it has not ended; of a table's run the table.

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
    if not errors and not isinstance(server, Remote) and tables.export(Path(file), output):
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


async def _read(server: str | Remote, id: str) -> Batch:
    async with offline_runs(server) as runs:
        try:
            return await runs.batch_status(id)
        except UnknownBatch as error:
            raise _unknown(error) from None


async def _read_all(server: str | Remote) -> list[Batch]:
    async with offline_runs(server) as runs:
        return await runs.batches()


async def _cancel(server: str | Remote, id: str) -> Batch:
    async with offline_runs(server) as runs:
        try:
            return await runs.cancel_batch(id)
        except UnknownBatch as error:
            raise _unknown(error) from None


def _unknown(error: UnknownBatch) -> CliError:
    return CliError(f"{error}, or its last update is more than a week old. List the runs: sluice batch list")
