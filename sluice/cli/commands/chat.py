"""`sluice chat`: sends one message, or runs a conversation."""

import asyncio
import select
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, LaneChoice, ModelName, RedisUrl, integer, number
from sluice.cli.terminal.follow import ask, check_images, exit_code, mention_missing_worker
from sluice.cli.terminal.inputs import read_image, read_message
from sluice.cli.terminal.view import View, event_printer, note
from sluice.contract.keys import DEFAULT_MODEL, Lane


@dataclass
class _Conversation:
    """Turns, options and pending images of a chat."""

    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # sent with every request: max_tokens, seed ...
    images: list[str] = field(default_factory=list)  # data: URLs, sent with the next message
    turns: list[dict[str, Any]] = field(default_factory=list)

    def request(self, message: str) -> dict[str, Any]:
        """Return the request that adds this message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*system, *self.turns, self._turn(message)], **self.options}

    def add(self, message: str, answer: str) -> None:
        """Append a turn, and clear the pending images. A message without an answer is dropped, since most templates
        reject two user messages in a row."""
        if answer:
            self.turns += [self._turn(message), {"role": "assistant", "content": answer}]
        self.images.clear()

    def _turn(self, message: str) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*images, {"type": "text", "text": message}] if images else message}


try:
    import readline  # gives input() line editing and a history
except ImportError:
    pass
else:
    # With bracketed paste, a pasted text is edited as one line until Enter is pressed. Python disables it. macOS's
    # libedit lacks it, so `_read_lines` joins its pasted lines.
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")

_PROMPT, _CONTINUATION = "> ", "... "
_QUOTES = '"""'


def read_typed() -> str | None:
    """Read a message from the terminal; empty after Ctrl-C, None after Ctrl-D."""
    try:
        first = input(_PROMPT)
        return _read_quoted(first) if first.lstrip().startswith(_QUOTES) else _read_lines(first)
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _read_quoted(first: str) -> str:
    """Return the text up to the closing quotes. `first` may already have several lines, if it was pasted."""
    text = first.lstrip().removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + input(_CONTINUATION)
    return text.rstrip().removesuffix(_QUOTES).strip("\n")


def _read_lines(first: str) -> str:
    """Return the message that begins with `first`. A line that ends in a backslash continues on the next one.

    Pasted lines that arrive separately continue until a line is typed, so that the user confirms what is sent.
    """
    lines = [first]
    while True:
        is_pasted = False
        while _is_input_pending():
            lines.append(input(_CONTINUATION))
            is_pasted = True
        if is_pasted:
            lines.append(input(_CONTINUATION))
        elif lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(_CONTINUATION))
        else:
            return "\n".join(lines).rstrip("\n")


def _is_input_pending() -> bool:
    paste_s = 0.05  # within which the next line of a pasted text arrives
    ready, _, _ = select.select([sys.stdin], [], [], paste_s)
    return bool(ready)


_COMMANDS = {
    "/image FILE": "send an image with your next message",
    "/system TEXT": "set the system prompt; without a text, remove it",
    "/reset": "start a new conversation",
    "/help": "show this list",
    "/quit": "quit, as with Ctrl-D",
}
_KEYS = {
    "\\ at the end": "continue on the next line",
    '"""': "start and end a text of several lines; not needed for pasted text",
    "Ctrl-C": "stop an answer, or discard what you have typed",
}


def run_repl(url: str, model: str, lane: Lane | None, conversation: _Conversation) -> None:
    """Read messages and commands from the terminal and print answers, until /quit or Ctrl-D. Raises `CliError` if the
    server does not answer."""
    asyncio.run(_print_greeting(url, model))
    while (message := read_typed()) is not None:
        match _split_command(message):
            case []:
                continue
            case ["/quit"]:
                return
            case ["/help"]:
                _print_help()
            case ["/reset"]:
                _reset(conversation)
            case ["/image", path]:
                _attach_image(url, model, conversation, path)
            case ["/system", *text]:
                conversation.system = " ".join(text)
                note("the system prompt is set" if text else "there is no system prompt now")
            case [word, *rest] if word.startswith("/"):
                note(_usage_error(word, rest))
            case _:
                _ask(url, model, lane, conversation, message)


def _split_command(message: str) -> list[str]:
    """Return a command and its argument; for a message of several lines, which is never a command, a placeholder."""
    return ["a text"] if "\n" in message.strip() else message.split(maxsplit=1)


def _print_help() -> None:
    for name, meaning in {**_COMMANDS, **_KEYS}.items():
        note(f"  {name:<13} {meaning}")


def _usage_error(word: str, rest: list[str]) -> str:
    """Return a message about a wrong command: its usage, or the list of commands."""
    usage = next((usage for usage in _COMMANDS if usage.split()[0] == word), None)
    if usage is None:
        return f"unknown command {word}; the commands are {', '.join(_COMMANDS)}"
    if not rest:
        return f"{word} needs a {usage.split()[1].lower()}: {usage}"
    return f"{word} takes no argument: write {word} alone"


def _reset(conversation: _Conversation) -> None:
    conversation.turns.clear()
    conversation.images.clear()
    note("a new conversation has started")


def _attach_image(url: str, model: str, conversation: _Conversation, path: str) -> None:
    try:
        image = read_image(path)
        asyncio.run(check_images(url, model))
        conversation.images.append(image)
        note(f"{path} will be sent with your next message")
    except CliError as error:
        note(str(error), style="red")


async def _print_greeting(url: str, model: str) -> None:
    """Connect and print how to use the conversation, or a note if no worker serves the model. Raises `CliError`."""
    async with connected(url) as client:
        if await mention_missing_worker(client, model, waits="your message waits"):
            note(f"connected to {model}. Ctrl-C stops an answer, Ctrl-D quits, /help lists the commands.")


def _ask(url: str, model: str, lane: Lane | None, conversation: _Conversation, message: str) -> None:
    view = View()
    try:
        asyncio.run(ask(url, model, lane, conversation.request(message), view.active()))
    except CliError as error:
        note(str(error), style="red")
    except KeyboardInterrupt:
        pass  # Ctrl-C again while the cancel was pending: back to the prompt
    conversation.add(message, view.answer.text)


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
        int | None, typer.Option(parser=integer(), metavar="N", help="Longest answer, in tokens.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(parser=number(), metavar="T", help="0 always selects the likeliest token."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(parser=integer(), metavar="N", help="The same seed samples the same tokens."),
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
    conversation = _Conversation(system, {name: value for name, value in options.items() if value is not None})
    conversation.images += map(read_image, image or [])
    served = model or DEFAULT_MODEL
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
