"""The commands in one place, and the border where trouble becomes a sentence and an exit code."""

import sys
from typing import Annotated

import typer

from sluice import __version__
from sluice.cli.batch import batch
from sluice.cli.cancel import cancel
from sluice.cli.chat import chat
from sluice.cli.check import check
from sluice.cli.dead import dead
from sluice.cli.queue import queue
from sluice.cli.submit import submit
from sluice.cli.tail import tail
from sluice.cli.trouble import Trouble
from sluice.cli.up import up
from sluice.cli.worker import worker
from sluice.cli.workers import workers

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='\b\nExample:\n  sluice chat "What is the capital of Ghana?"',
)
app.command(context_settings={"allow_extra_args": True})(worker)
for command in (up, check, chat, submit, tail, cancel, workers):
    app.command()(command)
app.add_typer(batch, name="batch")
app.add_typer(dead, name="dead")
app.add_typer(queue, name="queue")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sluice {__version__}")
        raise typer.Exit


@app.callback()
def sluice(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Chat models on Apple MLX behind a message queue: serve one, talk to it, queue jobs and follow them.

    Exit codes: 0 finished, 1 the job failed, 2 it could not be done as asked, 3 the job was cancelled, 4 the queue is
    full.
    """


def run() -> None:
    try:
        app(prog_name="sluice")
    except Trouble as trouble:
        print(f"sluice: {trouble}", file=sys.stderr)
        sys.exit(trouble.exit_code)
