"""Runs a conversation on the terminal."""

import asyncio

from sluice.cli.errors import CliError, connected
from sluice.cli.terminal.conversation import Conversation
from sluice.cli.terminal.follow import ask, check_images, mention_missing_worker
from sluice.cli.terminal.inputs import read_image
from sluice.cli.terminal.multiline import read_typed
from sluice.cli.terminal.view import View, note
from sluice.contract.keys import Lane

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


def run_repl(url: str, model: str, lane: Lane | None, conversation: Conversation) -> None:
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


def _reset(conversation: Conversation) -> None:
    conversation.turns.clear()
    conversation.images.clear()
    note("a new conversation has started")


def _attach_image(url: str, model: str, conversation: Conversation, path: str) -> None:
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


def _ask(url: str, model: str, lane: Lane | None, conversation: Conversation, message: str) -> None:
    view = View()
    try:
        asyncio.run(ask(url, model, lane, conversation.request(message), view.active()))
    except CliError as error:
        note(str(error), style="red")
    except KeyboardInterrupt:
        pass  # Ctrl-C again while the cancel was pending: back to the prompt
    conversation.add(message, view.answer.text)
