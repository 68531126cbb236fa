"""`sluice batch`: runs files of requests offline, after the interactive jobs."""

import asyncio
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sluice.batch.source import WINDOW
from sluice.cli import worker_commands
from sluice.cli.commands.batch_runs import cancel_run, list_runs, results, status
from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import (
    REDIS_URL,
    ApiKey,
    AsJson,
    GatewayUrl,
    RedisUrl,
    Remote,
    integer,
    is_given,
    server_of,
)
from sluice.cli.remote import run_there, submit_there
from sluice.cli.terminal.batch_view import ProgressView, print_problems, print_report, read_models
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused

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
    """Run a file of requests offline, and show the progress.

    If the command, a worker or the server stops, run the same command again: it resumes, and each line is answered
    once. Ctrl-C pauses the run. The report goes to stdout, with --json as OpenAI's Batch object; all else to stderr.
    A file made for another service names models that no worker serves here: --map names the served model to use.

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
    """
    server = server_of(context, redis_url, url, key)
    options = {
        "errors": errors,
        "models": _mapping(map, model),
        "completion_window": completion_window,
        "served_only": not wait,
        **({"window": window} if is_given(context, "window") else {}),
    }
    batch = asyncio.run(stoppable(_run(server, file, output, options)))
    if batch is None:
        paused = "the run goes on at the gateway" if isinstance(server, Remote) else "paused"
        note(f"{paused}. Run the same command again to resume.")
        raise typer.Exit(code=3)
    _print_outcome(file, batch, as_json)
    if on_end is not None:
        _run_at_end(on_end, batch)
    raise typer.Exit(_exit_code(batch))


def _print_outcome(file: Path, batch: Batch, as_json: bool) -> None:
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
    with ProgressView() as view, _log_as_notes("sluice.batch"):
        try:
            batch = await _to_end(server, input, output, {**options, "on_progress": view.update})
        except (BatchRefused, ValueError) as error:
            raise CliError(sentence(str(error))) from None
        except OSError as error:
            raise CliError(f"{error.filename or output}: {error.strerror}. The run is unchanged.") from None
    if batch.status != "failed" and not view.started:
        note(f"{batch.id} was complete already; there was nothing to do.")
    return batch


async def _to_end(server: str | Remote, input: Path, output: Path, options: dict[str, Any]) -> Batch:
    if isinstance(server, Remote):
        return await run_there(server, input, output, options)
    async with connected(server) as client:
        return await client.batch(input, output, **options)


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
    }
    submitted = asyncio.run(_submit(server, file, folder, options))
    if as_json:
        print_json(asdict(submitted))
        return
    print(submitted.id)
    note(f"{submitted.id} waits for its scheduled time. See: sluice batch status {submitted.id}")


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
