"""Clients of the gateway's three interfaces, which read streams to their end, to an error, or until they break off."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import httpx

from tests.support.chaos.paced import expected_text

# "truncated" is what must never happen: a body that ends as if it were complete, without the last event.
Ending = Literal["complete", "error", "refused", "broken off", "truncated"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event: its JSON, or `[DONE]`, and its id."""

    data: Any
    id: str | None


class Interface(Protocol):
    """One of the gateway's interfaces."""

    name: str
    path: str

    @abstractmethod
    def body(self, tokens: int) -> dict[str, Any]:
        """Return a request for an answer of this many tokens."""

    @abstractmethod
    def text(self, data: Any) -> str:
        """Return the text of the answer in an event's data."""

    @abstractmethod
    def is_last(self, data: Any) -> bool:
        """Return True for the event that ends a complete stream."""

    @abstractmethod
    def resumption(self, id: str, last: str | None) -> tuple[str, Mapping[str, str]] | None:
        """Return path and headers of the request for the events after `last`; None if the interface has none."""


class Chat(Interface):
    """OpenAI's chat completions."""

    name = "chat"
    path = "/v1/chat/completions"

    def body(self, tokens: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "go"}], "max_tokens": tokens}

    def text(self, data: Any) -> str:
        choices = data.get("choices", ()) if isinstance(data, dict) else ()
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def is_last(self, data: Any) -> bool:
        return bool(data == "[DONE]")

    def resumption(self, id: str, last: str | None) -> tuple[str, Mapping[str, str]]:
        return f"{self.path}/{id}/stream", {"last-event-id": last or ""}


class Responses(Interface):
    """OpenAI's Responses."""

    name = "responses"
    path = "/v1/responses"

    def body(self, tokens: int) -> dict[str, Any]:
        return {"input": "go", "max_output_tokens": tokens}

    def text(self, data: Any) -> str:
        return str(data["delta"]) if _type(data) == "response.output_text.delta" else ""

    def is_last(self, data: Any) -> bool:
        return _type(data) in ("response.completed", "response.incomplete")

    def resumption(self, id: str, last: str | None) -> tuple[str, Mapping[str, str]]:
        after = "" if last is None else f"&starting_after={last}"
        return f"{self.path}/{id}?stream=true{after}", {}


class Messages(Interface):
    """Anthropic's Messages. A stream that breaks off can only be retried as a whole."""

    name = "messages"
    path = "/v1/messages"

    def body(self, tokens: int) -> dict[str, Any]:
        return {"model": "default", "messages": [{"role": "user", "content": "go"}], "max_tokens": tokens}

    def text(self, data: Any) -> str:
        return str(data["delta"].get("text", "")) if _type(data) == "content_block_delta" else ""

    def is_last(self, data: Any) -> bool:
        return _type(data) == "message_stop"

    def resumption(self, id: str, last: str | None) -> None:
        return None


INTERFACES: tuple[Interface, ...] = (Chat(), Responses(), Messages())


@dataclass(slots=True)
class Answer:
    """What one client has of a streamed answer of `tokens` tokens, over all its connections."""

    interface: Interface
    tokens: int
    key: str | None = None  # sent as Idempotency-Key
    id: str = ""
    frames: list[Frame] = field(default_factory=list)
    ending: Ending | None = None  # None while it is being read

    @property
    def is_whole(self) -> bool:
        """True if the stream is complete, with each token once, and its ids ascend."""
        ids = [int(frame.id) for frame in self.frames if frame.id is not None]
        ascend = all(before < after for before, after in pairwise(ids))
        text = "".join(self.interface.text(frame.data) for frame in self.frames)
        return self.ending == "complete" and ascend and text == expected_text(self.tokens)

    @property
    def can_continue(self) -> bool:
        """True if a client that was cut off can get the rest of the answer."""
        return self.key is not None or self.interface.resumption(self.id, None) is not None

    async def read(self, http: httpx.AsyncClient, url: str) -> None:
        """Post the request to the gateway at `url`, and read the stream from its beginning."""
        self.frames.clear()
        headers = {} if self.key is None else {"idempotency-key": self.key}
        body = {**self.interface.body(self.tokens), "temperature": 0, "stream": True}
        await self._read(http.stream("POST", url + self.interface.path, json=body, headers=headers))

    async def read_on(self, http: httpx.AsyncClient, url: str) -> None:
        """Read the answer after a break at another gateway: all of it if it has a key, else its rest."""
        last = next((frame.id for frame in reversed(self.frames) if frame.id is not None), None)
        resumption = self.interface.resumption(self.id, last)
        if self.key is not None:
            await self.read(http, url)
        elif resumption is not None:
            path, headers = resumption
            await self._read(http.stream("GET", url + path, headers=headers))

    async def _read(self, request: Any) -> None:
        self.ending = None
        try:
            async with request as response:
                self.ending = await self._ending_of(response)
        except httpx.TransportError:
            self.ending = "broken off"

    async def _ending_of(self, response: httpx.Response) -> Ending:
        if response.status_code != 200:
            return "refused"
        self.id = response.headers["x-request-id"]
        received = ""
        async for text in response.aiter_text():
            *blocks, received = (received + text).split("\n\n")
            self.frames += [_frame(block) for block in blocks]
        last = self.frames[-1].data if self.frames else {}
        if "error" in last or _type(last) == "response.failed":
            return "error"
        return "complete" if self.interface.is_last(last) and not received else "truncated"


def _type(data: Any) -> str | None:
    """Return the type that an event of Responses or Messages has in its data."""
    return data.get("type") if isinstance(data, dict) else None


def _frame(block: str) -> Frame:
    fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
    data = fields["data"]
    return Frame(data if data == "[DONE]" else json.loads(data), fields.get("id"))
