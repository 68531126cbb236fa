"""All commands, and the place that turns an error into a message and an exit code."""

import sys
from typing import Annotated, Any

import typer

from sluice import __version__
from sluice.cli import worker_commands
from sluice.cli.commands.batch import batch
from sluice.cli.commands.capture import capture, replay_jobs
from sluice.cli.commands.chat import chat
from sluice.cli.commands.dead import dead
from sluice.cli.commands.jobs import cancel, submit, tail
from sluice.cli.commands.keys import keys
from sluice.cli.commands.models import models
from sluice.cli.commands.queue import queue
from sluice.cli.commands.service import service
from sluice.cli.commands.top import top
from sluice.cli.commands.up import serve, up
from sluice.cli.commands.webhooks import webhooks
from sluice.cli.commands.why import why
from sluice.cli.commands.workers import workers
from sluice.cli.errors import CliError
from sluice.cli.terminal.output import replace_unencodable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='\b\nExample:\n  sluice chat "What is the capital of Ghana?"',
)
worker_commands.add(app, "worker", takes_any_arguments=True)
app.command()(up)
app.command()(serve)
for name in ("check", "doctor", "prompt", "parse"):
    worker_commands.add(app, name)
for command in (chat, submit, tail, cancel, why, top, capture):
    app.command()(command)
app.command("replay")(replay_jobs)
app.add_typer(workers, name="workers")
app.add_typer(models, name="models")
for name in ("models.pull", "models.rm"):
    worker_commands.add(models, name)
app.add_typer(batch, name="batch")
app.add_typer(dead, name="dead")
app.add_typer(keys, name="keys")
worker_commands.add(app, "prefix")
app.add_typer(queue, name="queue")
app.add_typer(service, name="service")
app.add_typer(webhooks, name="webhooks")


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"sluice {__version__}")
        raise typer.Exit


@app.callback()
def sluice(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Chat models on Apple MLX behind a message queue: serve a model, chat with it, queue jobs and follow them.

    Exit codes: 0 finished, 1 the job failed, 2 an error that the message explains, 3 the job was cancelled, 4 the
    queue is full.
    """


def _hide_types(command: Any) -> None:
    """Let the help of a command and of those below it name arguments without the types of Python, as options are."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None
    for each in getattr(command, "commands", {}).values():
        _hide_types(each)


def run() -> None:
    """Run the command line; errors become a message and an exit code."""
    replace_unencodable()
    command = typer.main.get_command(app)
    _hide_types(command)
    try:
        command(prog_name="sluice")
    except CliError as error:
        print(f"sluice: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
