"""`sluice batch run` and `rerun`, and how the commands of runs follow one, show it and end."""

import asyncio
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sluice.batch.source import WINDOW
from sluice.batch.table_run import TableRun
from sluice.cli.commands.batch import tables
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
from sluice.cli.remote import run_there
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


def models_of(map: list[str] | None, model: str | None) -> dict[str, str] | None:
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
        "models": models_of(map, model),
        "completion_window": completion_window,
        "served_only": not wait,
        **({"window": window} if is_given(context, "window") else {}),
        **retry_options(retry, retries),
    }
    requests, answers = (table.requests, table.answers) if table else (file, output)
    batch = asyncio.run(stoppable(run_file_at(server, requests, answers, options)))
    paused = "the run goes on at the gateway" if isinstance(server, Remote) else "paused"
    finish(batch, file, as_json, on_end, table, paused=paused)


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
    shown = replace(batch, output_file_id=str(table.output)) if table else batch
    _print_outcome(file, batch if as_json else shown, as_json)
    if on_end is not None:
        _run_at_end(on_end, shown)
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


def unknown_run(error: UnknownBatch) -> CliError:
    return CliError(f"{error}, or its last update is more than a week old. List the runs: sluice batch list")
