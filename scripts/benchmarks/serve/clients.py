"""The two ways to a server: a worker's queue, and OpenAI's chat completions over HTTP."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.benchmarks.serve.driver import Reply, Request, Send, Unanswered
from sluice import Client, Delta, Failed, Finished
from sluice.errors import SluiceError

_RETRY_S = 0.01
_CONNECT_S = 30.0  # a server that accepts no connection for so long is gone
_RESET = httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError


@dataclass(slots=True)
class _Pieces:
    """The part of an answer that has arrived."""

    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, text: str | None) -> None:
        """Note the time of a piece; one without text is no piece."""
        if text:
            self.arrivals.append(time.perf_counter())
            self.texts.append(text)

    def reply(self, usage: Mapping[str, Any], server_first_s: float | None = None) -> Reply:
        """Return the complete answer. One without text has arrived when it ended. `usage` is OpenAI's."""
        return Reply(
            tuple(self.arrivals or [time.perf_counter()]),
            "".join(self.texts),
            usage.get("completion_tokens", len(self.arrivals)),
            usage.get("prompt_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            server_first_s,
        )


# The queue


@asynccontextmanager
async def queue(redis_url: str, model: str) -> AsyncIterator[Send]:
    """Yield a function that submits a request and follows its stream, with one client for all requests."""
    async with Client(redis_url) as client:
        yield lambda request: _queued(client, model, request)


async def _queued(client: Client, model: str, request: Request) -> Reply:
    pieces = _Pieces()
    try:
        job = await client.submit(request.body(), model=model, lane=request.lane)
        async for event in client.stream(job.id):
            if isinstance(event, Delta):
                pieces.add(event.content or event.reasoning)
            if isinstance(event, Finished):
                return _finished(pieces, event)
            if isinstance(event, Failed):
                raise Unanswered(event.error.message)
    except SluiceError as error:
        raise Unanswered(str(error)) from None
    raise Unanswered(f"job {job.id} was cancelled")


def _finished(pieces: _Pieces, event: Finished) -> Reply:
    usage = {
        "completion_tokens": event.usage.completion_tokens,
        "prompt_tokens": event.usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": event.usage.cached_tokens},
    }
    return pieces.reply(usage, event.timings.queue_s + event.timings.ttft_s)


# HTTP


@asynccontextmanager
async def openai(url: str, model: str | None, key: str | None = None) -> AsyncIterator[Send]:
    """Yield a function that posts a request to `{url}/chat/completions` and reads its stream.

    Each request has a connection of its own. `key`: a bearer token.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(limits=limits, timeout=None, headers=headers, trust_env=False) as client:
        yield lambda request: _posted(client, f"{url}/chat/completions", model, request)


async def _posted(client: httpx.AsyncClient, url: str, model: str | None, request: Request) -> Reply:
    body = request.body() | {"stream": True, "stream_options": {"include_usage": True}}
    if model:
        body["model"] = model
    until = time.perf_counter() + _CONNECT_S
    while True:
        pieces = _Pieces()
        try:
            async with client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise Unanswered(f"the server answered {response.status_code}: {text[:500]}")
                return await _read(response, pieces)
        except _RESET as error:
            # With a short listen backlog some of many simultaneous connections are refused or reset.
            if pieces.arrivals or time.perf_counter() > until:
                raise Unanswered(f"the connection broke: {error!r}") from None
        await asyncio.sleep(_RETRY_S)


async def _read(response: httpx.Response, pieces: _Pieces) -> Reply:
    usage: Mapping[str, Any] = {}
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise Unanswered(f"the stream ended with an error: {event['error']}")
        for choice in event.get("choices") or ():
            pieces.add(_text(choice.get("delta") or {}))
        usage = event.get("usage") or usage
    return pieces.reply(usage)


def _text(delta: Mapping[str, Any]) -> str | None:
    return delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
