"""`sluice batch`: runs files of requests offline, after the interactive jobs."""

import asyncio
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sluice.batch.pace import OpenHours
from sluice.batch.source import WINDOW
from sluice.batch.table_run import TableRun
from sluice.cli.commands import batch_tables as tables
from sluice.cli.commands.batch_runs import cancel_run, list_runs, results, status, unknown_run
from sluice.cli.commands.batch_schedule import schedule
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
from sluice.cli.remote import run_there, submit_there
from sluice.cli.terminal.batch_view import ProgressView, print_problems, print_report, read_models
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused, UnknownBatch

T = TypeVar("T")

OnProgress = Callable[[Batch], None]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def stoppable(
    work: Coroutine[Any, Any, T], *, at_eof: bool = False, on_input: Callable[[], None] = lambda: None
) -> T | None:
    """Run the coroutine and return its result; None if a signal, or with `at_eof` the end of stdin, cancelled it. A
    second signal ends the process at once. `on_input` is called in the event loop when stdin has bytes."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

    def stop() -> None:
        task.cancel()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    if at_eof:
        _read_stdin(on_input, stop)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def _read_stdin(on_input: Callable[[], None], at_eof: Callable[[], None]) -> None:
    """Call the functions in the event loop. Uses a daemon thread, since not every stdin can be polled."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(RuntimeError):  # the event loop has ended
            while os.read(0, 4096):
                loop.call_soon_threadsafe(on_input)
            loop.call_soon_threadsafe(at_eof)

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
    """Run a file of requests, or a prompt for each row of a table.

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
    batch = asyncio.run(stoppable(run_file_at(server, requests, answers, options)))
    paused = "the run goes on at the gateway" if isinstance(server, Remote) else "paused"
    finish(batch, file, as_json, on_end, table, paused=paused)


def finish(
    batch: Batch | None,
    file: str | Path,
    as_json: bool,
    on_end: str | None = None,
    table: TableRun | None = None,
    *,
    paused: str = "paused",
) -> None:
    """Print the report of a run, write its table, run the command for its end, and exit with its code. None: it was
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


async def run_file_at(server: str | Remote, input: Path, output: Path, options: dict[str, Any]) -> Batch:
    """Run a file to its end at either kind of server, and show its progress. Raises `CliError`."""

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
            raise unknown_run(error) from None
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
batch.add_typer(schedule, name="schedule")
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
    is_here = is_given(context, "folder") and not is_given(context, "url")  # --dir overrides SLUICE_URL
    server = redis_url if is_here else server_of(context, redis_url, url, key)
    if isinstance(server, Remote) and is_given(context, "folder"):
        raise CliError("--dir and --url exclude one another: a gateway has its folder from its own settings.")
    if not isinstance(server, Remote) and folder is None:
        raise CliError("there is no folder: give the workers' with --dir, or a gateway with --url.")
    options = {
        "models": _mapping(map, model),
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


batch.command("status")(status)
batch.command("list")(list_runs)
batch.command("cancel")(cancel_run)
batch.command("results")(results)
