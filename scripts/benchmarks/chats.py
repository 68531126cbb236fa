"""Sends chats all at once, to a worker through the queue or to an OpenAI server, and measures them at the client."""

import asyncio
import http.client
import json
import math
import statistics
import string
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from scripts.tiny_chat.data import ITEMS, PLACES
from sluice import Client, Delta, Finished

WORDS = 5, 60  # of a prompt: at least, at most
_VOCABULARY = " ".join([*ITEMS, *PLACES]).split()
_RETRY_S = 0.01
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Measurements of one client; seconds count from the time at which all chats were sent."""

    tokens: int
    arrivals: tuple[float, ...]  # of each piece of the answer, in seconds

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two pieces."""
        return max((after - before for before, after in pairwise(self.arrivals)), default=0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurements of one burst."""

    tokens_per_s: float
    first_median_s: float
    first_last_s: float
    longest_gap_s: float
    all_streaming_s: float  # median gap while all answers stream; NaN if they never all do

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Figures":
        """Return the figures of one burst."""
        firsts = [answer.arrivals[0] for answer in answers]
        return cls(
            sum(answer.tokens for answer in answers) / max(answer.arrivals[-1] for answer in answers),
            statistics.median(firsts),
            max(firsts),
            max(answer.longest_gap_s for answer in answers),
            _all_streaming_s(answers),
        )

    @classmethod
    def median(cls, rounds: Sequence["Figures"]) -> "Figures":
        """Return the median of each figure over several bursts."""
        return cls(
            statistics.median(each.tokens_per_s for each in rounds),
            statistics.median(each.first_median_s for each in rounds),
            statistics.median(each.first_last_s for each in rounds),
            statistics.median(each.longest_gap_s for each in rounds),
            _median([each.all_streaming_s for each in rounds if not math.isnan(each.all_streaming_s)]),
        )


def _all_streaming_s(answers: Sequence[Answer]) -> float:
    begin, end = max(answer.arrivals[0] for answer in answers), min(answer.arrivals[-1] for answer in answers)
    gaps = [
        after - before
        for answer in answers
        for before, after in pairwise(answer.arrivals)
        if begin <= before and after <= end
    ]
    return _median(gaps)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


class Prompts:
    """Draws texts of 5 to 60 words. Each begins with a unique made-up word, so that no prefix cache can help."""

    def __init__(self, seed: int = 0) -> None:
        self._dice, self._used = Random(seed), set[str]()

    def draw(self, number: int) -> list[str]:
        """Return this many new texts."""
        return [" ".join([self._new_word(), *self._others()]) for _ in range(number)]

    def _others(self) -> list[str]:
        return self._dice.choices(_VOCABULARY, k=self._dice.randint(*WORDS) - 1)

    def _new_word(self) -> str:
        while (word := "".join(self._dice.choices(string.ascii_lowercase, k=7))) in self._used:
            pass
        self._used.add(word)
        return word


def body_of(text: str, tokens: int) -> dict[str, Any]:
    """Return a greedy request for at most `tokens` tokens."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}


# Through the queue


async def through_queue(url: str, model: str, texts: Sequence[str], tokens: int) -> list[Answer]:
    """Submit all texts with one client, which has one connection for all channels, and measure the streams."""
    async with Client(url) as client:
        began = time.perf_counter()
        return await asyncio.gather(*(_queued(client, model, body_of(text, tokens), began) for text in texts))


async def _queued(client: Client, model: str, body: dict[str, Any], began: float) -> Answer:
    job = await client.submit(body, model=model)
    arrivals = list[float]()
    tokens = 0
    async for event in client.stream(job.id):
        if isinstance(event, Delta):
            arrivals.append(time.perf_counter() - began)
            tokens += len(event.token_ids)
        if isinstance(event, Finished):
            return Answer(tokens, tuple(arrivals))
    raise RuntimeError(f"job {job.id} did not finish")


# Through HTTP


def through_http(port: int, texts: Sequence[str], tokens: int) -> list[Answer]:
    """Send all texts, with a thread for each: fewer would delay them in the client."""
    with ThreadPoolExecutor(max_workers=max(len(texts), 256)) as pool:
        began = time.perf_counter()
        return list(pool.map(partial(_posted, port, began), [body_of(text, tokens) for text in texts]))


def _posted(port: int, began: float, body: dict[str, Any]) -> Answer:
    request = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/chat/completions", request, {"Content-Type": "application/json"})
            return _read(connection.getresponse(), began)
        except (ConnectionError, http.client.BadStatusLine):
            # With a short listen backlog some of many simultaneous connections are refused or reset.
            time.sleep(_RETRY_S)
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse, began: float) -> Answer:
    if response.status != 200:
        raise RuntimeError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
    arrivals, tokens = list[float](), 0
    for event in _events(response):
        if any(choice["delta"].get("content") or choice["delta"].get("reasoning") for choice in event["choices"]):
            arrivals.append(time.perf_counter() - began)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return Answer(tokens, tuple(arrivals))


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield json.loads(data)
