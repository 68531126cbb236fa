"""Ordinary streams beside requests that are as dear as a client can make them."""

import asyncio
import itertools
import json
import random
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from scripts.scenarios.attacked import Memory, Phase, endings, gaps, put, server_now, told
from scripts.scenarios.harness import Figure, ask, until_decoding
from scripts.stack import WorkerProcess
from sluice import Client

_ORDINARY_CHARACTERS = 3_000
_PICKED_UP_S = 180.0


@dataclass(frozen=True, slots=True)
class Greedy:
    """Requests of one kind. `bodies` makes them at a share of their full size."""

    what: str
    bodies: Callable[[float], list[bytes]]
    verdicts: frozenset[str]  # an error's type, or "finished"
    visitors: str = "short"  # the ordinary prompts beside them: see `_ORDINARY`


def _arq(request: str) -> bytes:
    return f'{{"t":null,"f":"chat","a":[{request}],"k":{{}},"et":1}}'.encode()


def _chat(content: str, **more: Any) -> bytes:
    return _arq(json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}))


def _beside(field_and_value: str) -> bytes:
    """A short chat with another field, written by hand."""
    return _arq('{"messages":[{"role":"user","content":"Count to 3."}],"max_tokens":1,' + field_and_value + "}")


def _words(characters: int) -> str:
    dice = random.Random(characters)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randrange(2, 9))) for _ in range(2_000)]
    text = " ".join(dice.choices(words, k=min(characters // 5, 20_000)))
    return (text * (1 + characters // len(text)))[:characters]


def _schema(properties: int) -> dict[str, Any]:
    named = {f"property_{i}": {"type": "string", "description": "what it is for"} for i in range(properties)}
    return {"type": "object", "properties": named}


def _tools(count: int) -> str:
    return json.dumps(
        [{"type": "function", "function": {"name": f"f{i}", "parameters": _schema(40)}} for i in range(count)]
    )


def _schemas(share: float) -> list[bytes]:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(int(220_000 * share))}}
    return [_chat("Answer.", response_format=asked)] * 2


def _parts(share: float) -> list[bytes]:
    content = [{"type": "text", "text": "word"}] * int(10_000 * share)
    return [_arq(json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}))] * 6


def _exchanges(share: float) -> list[bytes]:
    """Calls and results that the template takes after some trials, in a history of 10,000 parts."""
    function = {"name": "f", "arguments": '{"a": "b"}'}
    messages: list[dict[str, Any]] = []
    for i in range(int(2_500 * share)):
        call = {"id": f"c{i}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": "word"},
            {"role": "assistant", "content": "word", "tool_calls": [call]},
            {"role": "tool", "content": "word", "tool_call_id": f"c{i}"},
        ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": _schema(1)}}]
    return [_arq(json.dumps({"messages": messages, "tools": tools, "max_tokens": 1}))] * 6


def _comparisons(share: float) -> list[bytes]:
    """Alternatives of which each would be compared with everything beside them."""
    many: list[dict[str, Any]] = [{}] * int(14_900 * share)
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": many, "allOf": many}}}
    return [_chat("Answer.", response_format=asked, seed=i) for i in range(4)]


TOO_LARGE, REFUSED = frozenset({"too_large"}), frozenset({"too_large", "invalid_request"})
KINDS = (
    Greedy("six prompts of 1.5 MB", lambda s: [_chat(_words(int(1.5e6 * s)))] * 6, TOO_LARGE),
    Greedy("eight prompts of 14.5 MB", lambda s: [_chat(_words(int(14.5e6 * s)))] * 8, TOO_LARGE),
    Greedy("8 MB of digits", lambda s: [_chat("1234567890" * int(800_000 * s))], TOO_LARGE),
    Greedy(
        "15.9 MB of empty lists as metadata",
        lambda s: [_beside('"metadata":{"a":[' + ",".join(["[]"] * int(5.3e6 * s)) + "]}")] * 2,
        REFUSED,
    ),
    Greedy("one string of 15.9 MB", lambda s: [_chat("a" * int(15.9e6 * s) + "\U0001f600")] * 2, TOO_LARGE),
    Greedy("a schema of 16 MB", _schemas, REFUSED),
    Greedy("tools of 15 MB", lambda s: [_beside(f'"tools":{_tools(int(5_500 * s))}')] * 2, REFUSED),
    Greedy(
        "chat_template_kwargs of 15 MB",
        lambda s: [_beside('"chat_template_kwargs":{"a":[' + ",".join(["{}"] * int(5e6 * s)) + "]}")] * 2,
        REFUSED,
    ),
    Greedy("10,000 parts, six times", _parts, REFUSED | {"finished"}),
    Greedy("calls and results, 10,000 parts, six times", _exchanges, REFUSED | {"finished"}, "long"),
    Greedy("oneOf beside a long allOf, four times", _comparisons, REFUSED, "guided"),
    Greedy(
        "15.9 MB of escapes",
        lambda s: [_arq('{"messages":[{"role":"user","content":"' + "a\\n" * int(5.3e6 * s) + '"}]}')] * 2,
        TOO_LARGE,
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    alone: Phase
    beside: Phase
    grown_mb: float
    verdicts: Counter[str]
    took_s: float
    stop_s: float


async def beside_greedy(
    url: str, *, streams: int, alone_s: float, share: float = 1.0, kinds: Sequence[Greedy] = KINDS
) -> list[Figure]:
    """Each kind of request beside the same streams, on a worker of its own."""
    figures = list[Figure]()
    for kind in kinds:
        figures += judge(kind, await one_kind(url, kind, streams=streams, alone_s=alone_s, share=share))
    return figures


async def one_kind(url: str, kind: Greedy, *, streams: int, alone_s: float, share: float) -> Outcome:
    bodies = await asyncio.to_thread(kind.bodies, share)
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        await db.flushdb()
        with WorkerProcess(url, max_rows=streams + 16, reserved_rows=0, step_ms=50, lease_s=10) as worker:
            ids = [(await client.submit(ask(30_000, logit_bias={"2": -100}))).id for _ in range(streams)]
            await until_decoding(client, ids, 10)
            async with Visits(client, db, kind.visitors) as before:
                await asyncio.sleep(alone_s)
            async with Visits(client, db, kind.visitors) as beside, Memory(worker) as memory:
                await put(db, "greedy", bodies)
                verdicts, took_s = await endings(db, "greedy", len(bodies))
                await asyncio.sleep(max(0.0, alone_s - took_s))
            async with Visits(client, db, kind.visitors) as after:  # what else the machine does comes and goes
                await asyncio.sleep(alone_s)
            await put(db, "again", bodies)
            stop_s = await stopped(worker)
        for phase in (before, beside, after):
            phase.gaps_s = [gap for job_id in ids for gap in await gaps(db, job_id, phase)]
    return Outcome(before.and_also(after), beside, memory.grown_mb, verdicts, took_s, stop_s)


def judge(kind: Greedy, found: Outcome) -> list[Figure]:
    step_ms, alone_ms, beside_ms = (
        1000 * number
        for number in (statistics.median(found.alone.gaps_s), max(found.alone.gaps_s), max(found.beside.gaps_s))
    )
    gap_bar_ms = alone_ms + step_ms + 50
    pickup_s, pickup_alone_s = max(found.beside.pickups_s), max(found.alone.pickups_s)
    said = ", ".join(f"{count} {type}" for type, count in sorted(found.verdicts.items()))
    return [
        Figure(f"{kind.what}: longest gap of a stream (alone {alone_ms:.0f} ms, step {step_ms:.0f} ms)",
               f"≤ {gap_bar_ms:.0f} ms", f"{beside_ms:.0f} ms", beside_ms <= gap_bar_ms),
        Figure(f"{kind.what}: slowest pickup of an ordinary job (alone {pickup_alone_s:.2f} s)",
               f"≤ {pickup_alone_s + 2:.2f} s", f"{pickup_s:.2f} s", pickup_s <= pickup_alone_s + 2),
        Figure(f"{kind.what}: memory on top", "≤ 1,000 MB", f"{found.grown_mb:,.0f} MB", found.grown_mb <= 1000),
        Figure(f"{kind.what}: end after the second signal", "≤ 3 s", f"{found.stop_s:.1f} s", found.stop_s <= 3),
        Figure(f"{kind.what}: verdicts, within {found.took_s:.1f} s", " or ".join(sorted(kind.verdicts)), said,
               found.verdicts.keys() <= kind.verdicts),
    ]  # fmt: skip


async def stopped(worker: WorkerProcess) -> float:
    """Seconds from the second signal to the worker's end."""
    await asyncio.sleep(1)
    worker.signal(signal.SIGTERM)
    await asyncio.sleep(1)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    try:
        await asyncio.to_thread(worker.wait, 90)
    except subprocess.TimeoutExpired:
        return float("inf")
    return time.monotonic() - began


def _guided(number: int) -> dict[str, Any]:
    """A request whose schema no worker has tried before."""
    schema = {"type": "object", "properties": {f"a{number}": {"type": "string", "pattern": "^[a-z]+$"}}}
    return ask(
        2,
        f"{number} {_words(300)}",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )


_ORDINARY: dict[str, Callable[[int], dict[str, Any]]] = {
    "short": lambda number: ask(2, f"{number} {_words(_ORDINARY_CHARACTERS)}"),
    # Of some 22,000 tokens, and longer than what is tokenized beside others.
    "long": lambda number: ask(2, f"{number} {'The weather in Oslo is fine. ' * 2_420}"),
    "guided": _guided,
}


class Visits:
    """Ordinary jobs, one after the other, for as long as the phase lasts."""

    def __init__(self, client: Client, db: redis.asyncio.Redis, kind: str) -> None:
        """`kind`: one of `_ORDINARY`."""
        self._client, self._db, self._phase, self._coming = client, db, Phase(), True
        self._request = _ORDINARY[kind]

    async def __aenter__(self) -> Phase:
        self._phase.began = await server_now(self._db)
        self._visiting = asyncio.create_task(self._visit())
        return self._phase

    async def __aexit__(self, *_: object) -> None:
        self._phase.ended = await server_now(self._db)
        self._coming = False
        await self._visiting

    async def _visit(self) -> None:
        for number in itertools.count():
            job = await self._client.submit(self._request(number))
            await asyncio.wait_for(until_decoding(self._client, [job.id], 0), _PICKED_UP_S)
            self._phase.pickups_s.append(await _pickup_s(self._db, job.id))
            await self._client.cancel(job.id)
            if not self._coming:
                return
            await asyncio.sleep(0.1)


async def _pickup_s(db: redis.asyncio.Redis, job_id: str) -> float:
    """From the submission to `started`, which a worker says when it has made the prompt."""
    queued_at = await db.hget(f"sluice:job:{job_id}", "queued_at")  # type: ignore[misc]
    return (await told(db, job_id))[0][0] - float(queued_at or 0)
