"""`sluice chat`: one question, or a conversation."""

import asyncio
import sys
from typing import Annotated

import typer

from sluice.cli import option_values
from sluice.cli.errors import CliError
from sluice.cli.options import MODEL, REDIS_URL, AsJson, LaneChoice, Model, RedisUrl
from sluice.cli.terminal.conversation import Conversation
from sluice.cli.terminal.follow import ask, check_images, exit_code
from sluice.cli.terminal.inputs import read_image, read_message
from sluice.cli.terminal.repl import talk
from sluice.cli.terminal.view import showing


def chat(
    message: Annotated[
        str | None,
        typer.Argument(metavar="MESSAGE", help="What to say; `-` reads it from stdin. Without it, a conversation."),
    ] = None,
    image: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Show this; repeatable.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(parser=option_values.whole(), metavar="N", help="The answer's length, at most.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(parser=option_values.number(), metavar="T", help="0 always takes the likeliest token."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(parser=option_values.whole(), metavar="N", help="Draw the same tokens again.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    lane: LaneChoice = None,
    model: Model = None,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Say something to a model and watch its answer come.

    The answer goes to stdout; progress, timings and whatever went wrong go to stderr. Ctrl-C cancels the job.
    In a conversation a pasted text is one message, a backslash at the end of a line continues on the next, and /help
    lists the commands.
    Exit codes: 0 finished, 1 failed, 3 cancelled, 4 the queue is full and nothing was asked.

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
        _needs_terminal(as_json)
        talk(redis_url, served, lane, conversation)
        return
    request = conversation.request(read_message(message))
    last = asyncio.run(ask(redis_url, served, lane, request, showing(as_json=as_json)))
    raise typer.Exit(exit_code(last))


def _needs_terminal(as_json: bool) -> None:
    if as_json:
        raise CliError('--json is for one message: sluice chat "Hello!" --json')
    if not sys.stdin.isatty():
        raise CliError("there is no message, and no terminal to talk on: give a message, or `-` to read it from stdin.")
