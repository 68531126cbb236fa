"""Asking on the page, and a worker's chat whose answers the messages dictate."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from tests.fakes import FakeChat
from tests.gateway.page.browser import Browser
from worker.queue.job.job import JobResult

ENDED = "document.querySelector('.facts') && !document.querySelector('.facts.busy')"
WORDS = [f"w{number} " for number in range(60)]


class ObedientChat(FakeChat):
    """Takes `think`, `say`, `pace_s`, `then` and the reason `finish` from the text of the last message,
    and repeats any other text."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        self.asked.append(request)
        text = _text(request["messages"][-1]["content"])
        orders = json.loads(text) if text.startswith("{") else {"say": [text]}
        done = await super().chat(ctx, {**request, **orders})
        said = {"role": "assistant", "content": "".join(orders["say"])}
        choice = {"index": 0, "message": said, "finish_reason": orders.get("finish", "stop")}
        timings = {"queue_s": 0.01, "ttft_s": 0.02, "tokens_per_s": 42.0}
        ours = {"worker": "mac-1", "timings": timings}
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        done.result.update(id=ctx["job"].claim.job_id, choices=[choice], usage=usage, sluice=ours)
        return replace(done, finish_reason=choice["finish_reason"])


def _text(content: Any) -> str:
    return content if isinstance(content, str) else str(content[-1]["text"])


def do(action: Callable[..., Any], *arguments: Any, **named: Any) -> Awaitable[Any]:
    """Run a method of the browser, which blocks, in a thread."""
    return asyncio.to_thread(action, *arguments, **named)


async def send(page: Browser, text: str) -> None:
    """Type a message, and send it."""
    await do(page.evaluate, "document.querySelector('#box').focus()")
    await do(page.type, text)
    await do(page.press, "Enter")


async def ask(page: Browser, *say: str, **more: Any) -> None:
    """Send a message that dictates its answer."""
    await send(page, json.dumps({"say": say, **more}))
