"""`sluice batch`: runs files of requests offline, after the interactive jobs."""

import asyncio
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sluice.batch.source import WINDOW
from sluice.cli import worker_commands
from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl, integer
from sluice.cli.terminal.batch_view import ProgressView, describe_state, print_problems, print_report, read_models
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note
from sluice.client import Client
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused, UnknownBatch

T = TypeVar("T")

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


Retry = Annotated[
    str | None,
    typer.Option(
        "--retry", metavar="KINDS", help="Run such lines again: invalid,cut,failed,refused, or some of these."
    ),
]
Retries = Annotated[
    int | None,
    typer.Option("--retries", parser=integer(1), metavar="N", help="At most so many times each.  [default: 2]"),
]


def _retry_options(retry: str | None, retries: int | None) -> dict[str, Any]:
    """Return the options of `Client.batch`. Raises `CliError`."""
    if retry is None:
        if retries is not None:
            raise CliError("--retries: it says how often lines of --retry are run again; give --retry, too.")
        return {}
    kinds = [kind.strip() for kind in retry.split(",")]
    return {"retry": dict.fromkeys(kinds, 2 if retries is None else retries)}


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
    file: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="The file of requests, one per line.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The file for the answers, one per line.")
    ],
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
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Run a file of requests offline, and show the progress.

    If the command, a worker or the server stops, run the same command again: it resumes, and each line is answered
    once. Ctrl-C pauses the run. The report goes to stdout, with --json as OpenAI's Batch object; all else to stderr.
    A file made for another service names models that no worker serves here: --map names the served model to use.

    \b
    The exit code is the state of the run; repeating the command after the end gives the same code:
      0 every line is answered     1 the run has ended, and some lines are not answered
      2 refused: nothing was done  3 paused by Ctrl-C or SIGTERM: the same command resumes

    \b
    Examples:
      sluice batch run in.jsonl -o out.jsonl
      sluice batch run for-openai.jsonl -o out.jsonl --map gpt-4o-mini=default
      sluice batch run in.jsonl -o out.jsonl --retry invalid,cut,failed
    """
    options = {
        "errors": errors,
        "models": _mapping(map, model),
        "completion_window": completion_window,
        "window": window,
        "served_only": not wait,
        **_retry_options(retry, retries),
    }

    async def run(client: Client, on_progress: Callable[[Batch], None]) -> Batch:
        return await client.batch(file, output, **options, on_progress=on_progress)

    _finish(asyncio.run(stoppable(_run(redis_url, run, output))), file, as_json)


def _finish(batch: Batch | None, file: str | Path, as_json: bool) -> None:
    """Print the report of a run, and exit with its code. None: it was interrupted."""
    if batch is None:
        note("paused. Run the same command again to resume.")
        raise typer.Exit(code=3)
    if as_json:
        print_json(asdict(batch))
    elif batch.status != "failed":
        print_report(batch)
    if batch.errors:
        note(f"{file} was refused, and none of its lines was run:", style="red")
        print_problems(batch)
        if any(problem.code == "unserved_model" for problem in batch.errors.data):
            note("Change the options as shown, or add --wait to queue the lines until there is a worker.", style="red")
    raise typer.Exit(_exit_code(batch))


async def _run(
    url: str, run: Callable[[Client, Callable[[Batch], None]], Awaitable[Batch]], output: str | Path
) -> Batch:
    async with connected(url) as client:
        with ProgressView() as view, _log_as_notes("sluice.batch"):
            try:
                batch = await run(client, view.update)
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
worker_commands.add(batch, "batch.schedule")
batch.command("feed", hidden=True)(feed_folder)


@batch.command("rerun")
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
    """Run lines of an ended run again, by default all failed and invalid ones.

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
    options = _retry_options(retry, retries)

    async def rerun(client: Client, on_progress: Callable[[Batch], None]) -> Batch:
        return await client.rerun_batch(run, kinds, **options, on_progress=on_progress)

    again = asyncio.run(stoppable(_run(redis_url, rerun, run)))
    if again is None or again.ended:
        _finish(again, run, as_json)
    elif as_json:
        print_json(asdict(again))
    else:
        note(f"{again.id} waits for the workers of its folder. See: sluice batch status {again.id}")


@batch.command("submit")
def submit_run(
    file: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="The file of requests.")],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", envvar="SLUICE_BATCH_DIR", help="The folder that the workers check.")
    ],
    model: ModelOption = None,
    map: MapOption = None,
    completion_window: WindowOption = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata for the run's status object; repeatable."),
    ] = None,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Copy a file into the workers' folder, and print the run's id.

    It is run at a time of their schedule, and its completion window begins then. The answers will be in
    DIR/done/ID/output.jsonl. Model names that neither --map nor --model maps are mapped by the workers'
    SLUICE_BATCH_MODELS. With --json, print the status object instead of the id.

    \b
    Examples:
      sluice batch submit in.jsonl --dir /var/lib/sluice
      sluice batch submit in.jsonl --dir /var/lib/sluice --model default --metadata team=search
    """
    options = {
        "models": _mapping(map, model),
        "completion_window": completion_window,
        "metadata": _metadata(metadata or []),
    }
    submitted = asyncio.run(_submit(redis_url, file, folder, options))
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


@batch.command("cancel")
def cancel_run(id: RunId, redis_url: RedisUrl = REDIS_URL) -> None:
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


def _metadata(options: list[str]) -> dict[str, str] | None:
    pairs = [option.partition("=") for option in options]
    for key, equals, value in pairs:
        if not (key and equals):
            raise CliError(f"{key + equals + value!r} is not metadata: write KEY=VALUE, as in team=search.")
    return {key: value for key, _, value in pairs} or None


async def _submit(url: str, file: Path, folder: Path, options: dict[str, Any]) -> Batch:
    async with connected(url) as client:
        try:
            return await client.submit_batch(file, folder, **options)
        except ValueError as error:
            raise CliError(sentence(str(error))) from None
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
