"""The demo: a server, a worker and eight chats at once, side by side in the terminal."""

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.stack import Server, WorkerProcess, embedded_binary
from sluice import Client, Delta, Event, Failed, Finished, JobError, Progress, Started
from sluice.wire import Lane

_PANEL_WIDTH, _PANEL_LINES = 38, 6


@dataclass
class Chat:
    title: str
    messages: list[dict[str, str]]
    lane: Lane = "interactive"
    text: str = ""
    state: str = "queued"
    result: dict[str, Any] = field(default_factory=dict)
    first_at: float = math.inf

    def heard(self, event: Event) -> None:
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

    def panel(self) -> Panel:
        lines = Text(self.text, overflow="fold")
        colour = {"queued": "dim", "decode": "cyan", "failed": "red"}.get(self.state, "green")
        return Panel(
            lines,
            title=f"{self.title} [dim]{self.state}[/]",
            title_align="left",
            border_style=colour,
            width=_PANEL_WIDTH,
            height=_PANEL_LINES + 2,
        )


def user(*turns: str) -> list[dict[str, str]]:
    """Turns of user, assistant, user ..."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def chats() -> list[Chat]:
    """What the tiny model can do: its whole world is in models/tiny-chat/README.md."""
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
    dice = random.Random(4)
    things, places = ("key", "lamp", "map", "drum", "kite"), ("river", "market", "station", "harbour", "hill")
    text = [f"The red {dice.choice(things)} was left in the {dice.choice(places)}." for _ in range(sentences)]
    text.insert(sentences // 3, "The secret code of Oslo is 4 6 8 8.")
    return " ".join(text)


async def play(client: Client, chat: Chat) -> None:
    job = await client.submit(chat.messages, lane=chat.lane)
    async for event in client.stream(job.id):
        chat.heard(event)
    chat.result = await client.result(job.id)


def closing_table(shown: list[Chat]) -> Table:
    table = Table(title="What each chat got", title_justify="left", caption_justify="left")
    for name in ("chat", "lane", "tokens in", "tokens out", "in queue", "first token", "tokens/s", "rows in batch"):
        table.add_column(name, justify="left" if name in ("chat", "lane") else "right")
    for chat in shown:
        usage, ours = chat.result["usage"], chat.result["sluice"]
        timings = ours["timings"]
        table.add_row(
            chat.title,
            chat.lane,
            str(usage["prompt_tokens"]),
            str(usage["completion_tokens"]),
            f"{timings['queue_s'] * 1000:.0f} ms",
            f"{timings['ttft_s'] * 1000:.0f} ms",
            f"{timings['tokens_per_s']:.0f}",
            f"{ours['rows_mean']:.1f}",
        )
    return table


@contextmanager
def stack(console: Console) -> Iterator[tuple[str, WorkerProcess]]:
    """A server and a worker, both gone at the end whatever happens."""
    with ExitStack() as running:
        server = running.enter_context(Server(embedded_binary()))
        worker = WorkerProcess(server.url)
        running.callback(worker.stop)
        worker.start(wait=False)
        console.print(f"[dim]server on port {server.port}; loading models/tiny-chat ...[/]")
        worker.wait_ready()
        yield server.url, worker


async def stream_all(url: str, shown: list[Chat], console: Console) -> float:
    """Returns the seconds until all were done."""
    began = time.perf_counter()
    with Live(console=console, refresh_per_second=20, get_renderable=lambda: _grid(shown)):
        async with Client(url) as client:
            await asyncio.gather(*(play(client, chat) for chat in shown))
    return time.perf_counter() - began


def _grid(shown: list[Chat]) -> Columns:
    return Columns([chat.panel() for chat in shown], padding=(0, 0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.parse_args()
    console, began = Console(), time.perf_counter()
    try:
        with stack(console) as (url, _):
            shown = chats()
            took = asyncio.run(stream_all(url, shown, console))
            console.print()
            console.print(closing_table(shown))
            tokens = sum(chat.result["usage"]["completion_tokens"] for chat in shown)
            first = min(chat.first_at for chat in shown) - began
            console.print(f"[dim]{len(shown)} chats, {tokens} tokens in {took:.1f} s.[/]")
            console.print(f"[dim]The first token came {first:.1f} s after the start.[/]")
    except KeyboardInterrupt:
        console.print("[dim]stopped, and everything that was started with it[/]")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
