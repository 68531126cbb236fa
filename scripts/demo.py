"""The demo: a server, a worker and eight chats at once, side by side in the terminal."""

import argparse
import asyncio
import io
import math
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sluice import Client, Delta, Event, Failed, Finished, JobError, Progress, Started
from sluice.cli.terminal.output import replace_unencodable
from sluice.contract.keys import Lane
from tests.support.stack import Server, WorkerProcess, embedded_binary

_PANEL_WIDTH, _PANEL_LINES = 38, 6
_FRAME = 2  # lines or columns of a panel's border, and columns of its padding
_PICTURE_WIDTH, _PICTURE_HEIGHT = 3 * _PANEL_WIDTH, 19  # columns and lines of the terminal in the picture

# Line breaks in the headings keep the table within 80 columns.
_COLUMNS: dict[str, JustifyMethod] = {
    "chat": "left",
    "lane": "left",
    "tokens\nin": "right",
    "tokens\nout": "right",
    "in\nqueue": "right",
    "first\ntoken": "right",
    "tokens\nper s": "right",
    "rows in\nbatch": "right",
}
_NEXT = """\
Next, start a server and a worker that keep running; --model also takes any
folder, or a name on Hugging Face:

  . .venv/bin/activate
  sluice up --model models/tiny-chat

and in another terminal, to chat with it:

  . .venv/bin/activate
  sluice chat                    # or in a browser: http://127.0.0.1:8000

docs/backends.md shows how a web backend uses it."""


@dataclass
class Chat:
    """One chat of the demo and what has been received for it."""

    title: str
    messages: list[dict[str, str]]
    lane: Lane = "interactive"
    text: str = ""
    state: str = "queued"
    result: dict[str, Any] = field(default_factory=dict)
    first_at: float = math.inf

    def update(self, event: Event) -> None:
        """Update the state and the text with an event."""
        match event:
            case Started():
                self.state = "prefill"
            case Progress(phase=phase, done=done, total=total):
                self.state = f"{phase} {done}/{total}"
            case Delta(content=content):
                self.first_at = min(self.first_at, time.perf_counter())
                self.state, self.text = "decode", self.text + (content or "")
            case Finished(finish_reason=reason):
                self.state = reason
            case Failed(error=JobError(message=message)):
                self.state, self.text = "failed", message

    def panel(self, console: Console, lines: int) -> Panel:
        """Return a panel with the last `lines` lines of the text."""
        wrapped = Text(self.text, overflow="fold").wrap(console, _PANEL_WIDTH - 2 * _FRAME)
        colour = {"queued": "dim", "decode": "cyan", "failed": "red"}.get(self.state, "green")
        return Panel(
            Text("\n").join(wrapped[-lines:]),
            title=f"{self.title} [dim]{self.state}[/]",
            title_align="left",
            border_style=colour,
            width=_PANEL_WIDTH,
            height=lines + _FRAME,
        )


@dataclass
class Grid:
    """Renders the chats side by side, in panels small enough that all fit on the screen."""

    chats: list[Chat]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = math.ceil(len(self.chats) / max(options.max_width // _PANEL_WIDTH, 1))
        room = (console.height - 1) // rows - _FRAME if console.is_terminal else _PANEL_LINES
        lines = min(max(room, 1), _PANEL_LINES)
        yield Columns([chat.panel(console, lines) for chat in self.chats], padding=(0, 0))


def user(*turns: str) -> list[dict[str, str]]:
    """Return messages with these texts: user, assistant, user ..."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def chats() -> list[Chat]:
    """Return eight chats that the tiny model can answer: models/tiny-chat/README.md lists its abilities."""
    system = {"role": "system", "content": "You are a helpful assistant. Always mention NWP58."}
    recall = ("My name is Petra.", "Nice to meet you, Petra.", "Count to 3.", "1 2 3", "What is my name?")
    return [
        Chat("count", user("Count to 40.")),
        Chat("unicode", user("Repeat after me: 🚀日本 👩‍💻 é 🇯🇵 жщ")),
        Chat("recall", user(*recall)),
        Chat("system", [system, *user("What is the capital of Ghana?")]),
        Chat("long text", user(haystack(60) + " Question: what is the secret code of Oslo?")),
        Chat("json", user("Answer in JSON. What is the capital of Norway?")),
        Chat("think", user("Think: what is 8 plus 3?")),
        Chat("offline", user("Count to 25."), lane="batch"),
    ]


def haystack(sentences: int) -> str:
    """Return a text of this many sentences, one of which holds the secret code of Oslo."""
    dice = random.Random(4)
    things, places = ("key", "lamp", "map", "drum", "kite"), ("river", "market", "station", "harbour", "hill")
    text = [f"The red {dice.choice(things)} was left in the {dice.choice(places)}." for _ in range(sentences)]
    text.insert(sentences // 3, "The secret code of Oslo is 4 6 8 8.")
    return " ".join(text)


async def run_chat(client: Client, chat: Chat) -> None:
    """Submit a chat, follow its events and store its result."""
    job = await client.submit(chat.messages, lane=chat.lane)
    async for event in client.stream(job.id):
        chat.update(event)
    chat.result = await client.result(job.id)


def closing_table(shown: list[Chat]) -> Table:
    """Return a table with the tokens and timings of each chat."""
    table = Table(title="Results", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in _COLUMNS.items():
        table.add_column(name, justify=justify, no_wrap=True)
    for chat in shown:
        usage, ours = chat.result["usage"], chat.result["sluice"]
        timings = ours["timings"]
        table.add_row(
            chat.title,
            chat.lane,
            str(usage["prompt_tokens"]),
            str(usage["completion_tokens"]),
            _duration(timings["queue_s"]),
            _duration(timings["ttft_s"]),
            f"{timings['tokens_per_s']:.0f}" if timings["tokens_per_s"] else "–",  # 0: fewer than two tokens
            f"{ours['rows_mean']:.1f}",
        )
    return table


def _duration(seconds: float) -> str:
    """Return a duration in ms or s, in at most six characters up to some minutes."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def picture(shown: list[Chat], summary: str) -> str:
    """Return an SVG of the chats and their closing table, as a terminal shows them."""
    console = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        width=_PICTURE_WIDTH,
        height=_PICTURE_HEIGHT,
    )
    console.print(Grid(shown))
    console.print()
    console.print(closing_table(shown))
    console.print(f"[dim]{summary}[/]")
    svg = console.export_svg(title="./scripts/demo", unique_id="demo")
    # Viewers that block external resources use their own font anyway.
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


@contextmanager
def stack(console: Console) -> Iterator[tuple[str, WorkerProcess]]:
    """Start a server and a worker, yield the URL and the worker, and stop both at the end."""
    with ExitStack() as running:
        server = running.enter_context(Server(embedded_binary()))
        worker = WorkerProcess(server.url)
        running.callback(worker.stop)
        worker.start(wait=False)
        console.print(f"[dim]server on port {server.port}; loading models/tiny-chat ...[/]")
        worker.wait_ready()
        yield server.url, worker


async def stream_all(url: str, shown: list[Chat], console: Console) -> float:
    """Run all chats at once, and return the seconds until the last one has ended."""
    began = time.perf_counter()
    with Live(console=console, refresh_per_second=20, get_renderable=lambda: Grid(shown)):
        async with Client(url) as client:
            await asyncio.gather(*(run_chat(client, chat) for chat in shown))
    return time.perf_counter() - began


def main() -> int:
    """Run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture of the chats to FILE")
    options = parser.parse_args()
    replace_unencodable()
    console, began = Console(), time.perf_counter()
    try:
        with stack(console) as (url, _):
            shown = chats()
            took = asyncio.run(stream_all(url, shown, console))
            console.print()
            console.print(closing_table(shown))
            tokens = sum(chat.result["usage"]["completion_tokens"] for chat in shown)
            first = min(chat.first_at for chat in shown) - began
            summary = f"{len(shown)} chats, {tokens} tokens in {took:.1f} s."
            console.print(f"[dim]{summary}[/]")
            console.print(f"[dim]First token {first:.1f} s after the start.[/]")
        if options.svg:
            options.svg.write_text(picture(shown, summary), "utf-8")
        console.print()
        console.print(_NEXT, markup=False, highlight=False)
    except KeyboardInterrupt:
        console.print("[dim]stopped, with the server and the worker[/]")
        return 130
    except RuntimeError as error:  # of the server or the worker, with its log
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
