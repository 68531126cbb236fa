"""`sluice batch run`: runs a file of requests, and shows the progress."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.batch.options import WINDOW
from sluice.cli import option_values
from sluice.cli.batch.view import ProgressView, print_problems, print_report, read_models
from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.signals import stoppable
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused

_EXIT_FAILED_LINES = 1
_EXIT_REFUSED = 2
_EXIT_PAUSED = 3


def run(
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
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Send all lines to this model, except those of --map.")
    ] = None,
    map: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="NAME=SERVED",
            help="Send lines for model NAME, or for models that begin with NAME*, to SERVED; repeatable.",
        ),
    ] = None,
    completion_window: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Lines that are not done after it end as expired: 90m, 2d.  [default: 24h]"),
    ] = None,
    window: Annotated[
        int, typer.Option(parser=option_values.integer(1), metavar="N", help="Lines of one model in the queue at once.")
    ] = WINDOW,
    wait: Annotated[
        bool, typer.Option("--wait", help="Queue lines for a model that no worker serves, even if others are served.")
    ] = False,
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
    """
    models = read_models(map or [])
    if model is not None:
        models.setdefault("*", model)
    options = {
        "errors": errors,
        "models": models or None,
        "completion_window": completion_window,
        "window": window,
        "served_only": not wait,
    }
    batch = asyncio.run(stoppable(_run(redis_url, file, output, options)))
    if batch is None:
        note("paused. Run the same command again to resume.")
        raise typer.Exit(_EXIT_PAUSED)
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


async def _run(url: str, input: Path, output: Path, options: dict[str, Any]) -> Batch:
    async with connected(url) as client:
        with ProgressView() as view, _log_as_notes("sluice.batch"):
            try:
                batch = await client.batch(input, output, **options, on_progress=view.update)
            except (BatchRefused, ValueError) as error:
                raise CliError(sentence(str(error))) from None
            except OSError as error:
                raise CliError(f"{error.filename or output}: {error.strerror}. The run is unchanged.") from None
        if batch.status != "failed" and not view.started:
            note(f"{batch.id} was complete already; there was nothing to do.")
        return batch


def _exit_code(batch: Batch) -> int:
    if batch.status == "failed":
        return _EXIT_REFUSED
    counts = batch.request_counts
    return 0 if counts.completed == counts.total else _EXIT_FAILED_LINES


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
