"""A conversation at the terminal."""

import asyncio

from sluice.cli.errors import CliError, connected
from sluice.cli.terminal.conversation import Conversation
from sluice.cli.terminal.follow import ask, check_images, mention_missing_worker
from sluice.cli.terminal.inputs import read_image
from sluice.cli.terminal.multiline import read_typed
from sluice.cli.terminal.view import View, note
from sluice.wire import Lane

_COMMANDS = {
    "/image FILE": "show an image with your next message",
    "/system TEXT": "set the system prompt; without a text, drop it",
    "/reset": "start the conversation over",
    "/help": "this list",
    "/quit": "end, as Ctrl-D does",
}
_KEYS = {
    "\\ at the end": "go on with the next line",
    '"""': "begin and end a text of several lines; pasted ones need none",
    "Ctrl-C": "stop an answer, or drop what you have typed",
}


def talk(url: str, model: str, lane: Lane | None, conversation: Conversation) -> None:
    asyncio.run(_greet(url, model))
    while (message := read_typed()) is not None:
        match _words(message):
            case []:
                continue
            case ["/quit"]:
                return
            case ["/help"]:
                _help()
            case ["/reset"]:
                _reset(conversation)
            case ["/image", path]:
                _show(url, model, conversation, path)
            case ["/system", *text]:
                conversation.system = " ".join(text)
                note("the system prompt is set" if text else "there is no system prompt now")
            case [word, *rest] if word.startswith("/"):
                note(_misused(word, rest))
            case _:
                _turn(url, model, lane, conversation, message)


def _words(message: str) -> list[str]:
    """The command and the rest of its line. Of a message that is no command, what it begins with does not matter."""
    return ["a text"] if "\n" in message.strip() else message.split(maxsplit=1)


def _help() -> None:
    for name, meaning in {**_COMMANDS, **_KEYS}.items():
        note(f"  {name:<13} {meaning}")


def _misused(word: str, rest: list[str]) -> str:
    """Say how a command is written, or which ones there are."""
    usage = next((usage for usage in _COMMANDS if usage.split()[0] == word), None)
    if usage is None:
        return f"there is no {word}; the commands are {', '.join(_COMMANDS)}"
    if not rest:
        return f"{word} needs a {usage.split()[1].lower()}: {usage}"
    return f"{word} takes nothing after it: write {word} alone"


def _reset(conversation: Conversation) -> None:
    conversation.turns.clear()
    conversation.images.clear()
    note("the conversation starts over")


def _show(url: str, model: str, conversation: Conversation, path: str) -> None:
    try:
        image = read_image(path)
        asyncio.run(check_images(url, model))
        conversation.images.append(image)
        note(f"{path} is shown with your next message")
    except CliError as trouble:
        note(str(trouble), style="red")


async def _greet(url: str, model: str) -> None:
    """Tell at once, not after the first question, that there is no server, or nobody who answers."""
    async with connected(url) as client:
        if await mention_missing_worker(client, model, waits="what you say waits"):
            note(f"connected to {model}. Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands.")


def _turn(url: str, model: str, lane: Lane | None, conversation: Conversation, message: str) -> None:
    view = View()
    try:
        asyncio.run(ask(url, model, lane, conversation.request(message), view.shown()))
    except CliError as trouble:
        note(str(trouble), style="red")
    except KeyboardInterrupt:
        pass  # pressed again while the cancel was on its way: back to the prompt
    conversation.add(message, view.answer.text)
