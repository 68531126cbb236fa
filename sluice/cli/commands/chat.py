"""`sluice chat`: sends one message, or runs a conversation."""

import asyncio
import sys
from typing import Annotated

import typer

from sluice.cli import option_values
from sluice.cli.errors import CliError
from sluice.cli.options import MODEL, REDIS_URL, AsJson, LaneChoice, ModelName, RedisUrl
from sluice.cli.terminal.conversation import Conversation
from sluice.cli.terminal.follow import ask, check_images, exit_code
from sluice.cli.terminal.inputs import read_image, read_message
from sluice.cli.terminal.repl import run_repl
from sluice.cli.terminal.view import event_printer


def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE", help="The message; `-` reads it from stdin. If absent, a conversation starts."
        ),
    ] = None,
    image: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Send this image; repeatable.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(parser=option_values.integer(), metavar="N", help="Longest answer, in tokens.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(parser=option_values.number(), metavar="T", help="0 always selects the likeliest token."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(parser=option_values.integer(), metavar="N", help="The same seed samples the same tokens."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; repeatable.")] = None,
    lane: LaneChoice = None,
    model: ModelName = None,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Send a message to a model and print its answer as it is made.

    The answer goes to stdout; progress, timings and errors go to stderr. Ctrl-C cancels the job.
    In a conversation a pasted text is one message, a line that ends in a backslash continues on the next, and /help
    lists the commands.
    Exit codes: 0 finished, 1 failed, 3 cancelled, 4 the queue is full, and nothing was queued.

    \b
    Examples:
      sluice chat "What is the capital of Ghana?" --temperature 0
      sluice chat "What is this?" --image cat.jpg
    """
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or None}
    conversation = Conversation(system, {name: value for name, value in options.items() if value is not None})
    conversation.images += map(read_image, image or [])
    served = model or MODEL
    if image:
        asyncio.run(check_images(redis_url, served))
    if message is None:
        _require_terminal(as_json)
        run_repl(redis_url, served, lane, conversation)
        return
    request = conversation.request(read_message(message))
    last = asyncio.run(ask(redis_url, served, lane, request, event_printer(as_json=as_json)))
    raise typer.Exit(exit_code(last))


def _require_terminal(as_json: bool) -> None:
    if as_json:
        raise CliError('--json is for one message: sluice chat "Hello!" --json')
    if not sys.stdin.isatty():
        raise CliError("a conversation needs a terminal: give a message, or `-` to read it from stdin.")
