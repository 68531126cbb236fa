"""A conversation at the terminal."""

import asyncio

from sluice.cli.conversation import Conversation
from sluice.cli.follow import ask
from sluice.cli.given import read_image
from sluice.cli.trouble import Trouble, connected
from sluice.cli.view import View, note
from sluice.wire import Lane

try:
    import readline  # noqa: F401  input() then edits the line and remembers the ones before
except ImportError:
    pass

_COMMANDS = "/image FILE, /system TEXT, /reset, /quit"


def talk(url: str, model: str, lane: Lane | None, conversation: Conversation) -> None:
    asyncio.run(_greet(url, model))
    while (line := _read_line()) is not None:
        match line.split(maxsplit=1):
            case []:
                continue
            case ["/quit"]:
                return
            case ["/reset"]:
                conversation.turns.clear()
                conversation.images.clear()
                note("the conversation starts over")
            case ["/image", path]:
                _show(conversation, path)
            case ["/system", *text]:
                conversation.system = " ".join(text)
                note("the system prompt is set" if text else "there is no system prompt now")
            case [word, *_] if word.startswith("/"):
                note(f"there is no {word}; the commands are {_COMMANDS}")
            case _:
                _turn(url, model, lane, conversation, line)


def _show(conversation: Conversation, path: str) -> None:
    try:
        conversation.images.append(read_image(path))
        note(f"{path} is shown with your next message")
    except Trouble as trouble:
        note(str(trouble), style="red")


async def _greet(url: str, model: str) -> None:
    """Says at once, not after the first question, that there is no server."""
    async with connected(url):
        note(f"{model} listens. Ctrl-C stops an answer, Ctrl-D ends; {_COMMANDS}.")


def _read_line() -> str | None:
    try:
        return input("> ")
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _turn(url: str, model: str, lane: Lane | None, conversation: Conversation, message: str) -> None:
    view = View()
    try:
        asyncio.run(ask(url, model, lane, conversation.request(message), view.shown()))
    except Trouble as trouble:
        note(str(trouble), style="red")
    except KeyboardInterrupt:
        pass  # pressed again while the cancel was on its way: back to the prompt
    conversation.add(message, view.answer.text)
