"""Sends chats at their times and measures the answers, all in one event loop without threads."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.serve.figures import Answer
from scripts.benchmarks.serve.workload import Chat
from sluice.contract.keys import Lane


@dataclass(frozen=True, slots=True)
class Request:
    """One turn as a server gets it."""

    messages: list[dict[str, str]]
    max_tokens: int
    tenant: str | None
    lane: Lane
    tools: Sequence[dict[str, Any]] = ()

    def body(self) -> dict[str, Any]:
        """Return the body of a greedy chat completion."""
        body: dict[str, Any] = {"messages": self.messages, "max_tokens": self.max_tokens, "temperature": 0}
        body |= {"tools": [*self.tools]} if self.tools else {}
        return body | ({"user": self.tenant} if self.tenant else {})


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer; `arrivals` are times of `time.perf_counter`."""

    arrivals: tuple[float, ...]
    text: str
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report them
    server_first_s: float | None = None  # seconds from submission to the first token, by the server's clock


class Unanswered(Exception):
    """A request that a server refused, or whose answer broke off."""


_REFUSED_S = 0.1  # pause of offline work after a refusal
Send = Callable[[Request], Awaitable[Reply]]  # raises Unanswered


async def drive(send: Send, chats: Sequence[Chat], *, timeout_s: float, one_by_one: bool = False) -> list[Answer]:
    """Send all chats, each turn when it is due, and return the answers in no particular order.

    With `one_by_one` the times of the chats do not count: each is sent when the one before it has ended.
    """
    began = time.perf_counter()
    if not one_by_one:
        lines = await asyncio.gather(*(_chat(send, chat, began, timeout_s) for chat in chats))
        return [answer for line in lines for answer in line]
    answers = list[Answer]()
    for chat in chats:
        answers += await _chat(send, chat, began, timeout_s, now=True)
    return answers


async def drive_beside(
    send: Send, chats: Sequence[Chat], offline: Iterable[Chat], at_once: int, *, timeout_s: float
) -> tuple[list[Answer], list[Answer]]:
    """Send `chats` while `at_once` chats of `offline` are always running. Return both kinds of answers.

    Offline answers that end after the last one of `chats` are completed but not returned.
    """
    waiting, done = iter(offline), list[Answer]()
    over = asyncio.Event()
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(_keep_sending(send, waiting, done, over, began, timeout_s))
        answers = await drive(send, chats, timeout_s=timeout_s)
        in_time = [*done]
        over.set()
    return answers, in_time


async def _keep_sending(
    send: Send, waiting: Iterator[Chat], done: list[Answer], over: asyncio.Event, began: float, timeout_s: float
) -> None:
    while not over.is_set() and (chat := next(waiting, None)):
        answers = await _chat(send, chat, began, timeout_s, now=True)
        done += answers
        if any(answer.error for answer in answers):
            await asyncio.sleep(_REFUSED_S)


async def _chat(send: Send, chat: Chat, began: float, timeout_s: float, *, now: bool = False) -> list[Answer]:
    """Send the turns of a chat; those after a turn that failed are not sent, and counted as failed."""
    answers = list[Answer]()
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    ended = time.perf_counter() if now else began
    for number, turn in enumerate(chat.turns):
        due = ended if now else max(began + turn.at_s, ended + turn.think_s)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sent = time.perf_counter()
        messages.append({"role": "user", "content": turn.text})
        if turn.reminder:
            messages.append({"role": "system", "content": turn.reminder})
        request = Request([*messages], turn.max_tokens, chat.tenant, chat.lane, chat.tools)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await send(request)
        except (Unanswered, TimeoutError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            missed = (Answer(due - began, 0.0, (), t.max_tokens, 0, tenant=chat.tenant, error=reason)
                      for t in chat.turns[number:])  # fmt: skip
            return [*answers, *missed]
        before = answers[-1].prompt_tokens if answers else None
        answers.append(_answer(reply, request, due, sent, began, before))
        messages.append({"role": "assistant", "content": reply.text})
        ended = time.perf_counter()
    return answers


def _answer(reply: Reply, request: Request, due: float, sent: float, began: float, before: int | None) -> Answer:
    first = None if reply.server_first_s is None else reply.server_first_s + sent - due
    return Answer(
        due_s=due - began,
        sent_s=sent - due,
        arrivals=tuple(arrival - due for arrival in reply.arrivals),
        max_tokens=request.max_tokens,
        tokens=reply.tokens,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        tokens_before=before,
        tenant=request.tenant,
        server_first_s=first,
    )
