"""Runs ordinary streams next to requests that are as expensive as a client can make them."""

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

from sluice import Client
from tests.support.chaos.attacked import Memory, Phase, event_times, gaps, queue_bodies, server_now, wait_for_endings
from tests.support.chaos.harness import Figure, chat_request, until_decoding
from tests.support.stack import WorkerProcess

_ORDINARY_CHARACTERS = 3_000
_PICKED_UP_S = 180.0


@dataclass(frozen=True, slots=True)
class Greedy:
    """One kind of expensive request. `bodies` returns the bodies at a share of their full size."""

    label: str
    bodies: Callable[[float], list[bytes]]
    verdicts: frozenset[str]  # accepted outcomes: types of errors, or "finished"
    probes: str = "short"  # kind of the ordinary jobs that run meanwhile: see `_ORDINARY`


def _arq(request: str) -> bytes:
    return f'{{"t":null,"f":"chat","a":[{request}],"k":{{}},"et":1}}'.encode()


def _chat(content: str, **more: Any) -> bytes:
    return _arq(json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}))


def _body_with(field_and_value: str) -> bytes:
    """Return a short chat with one more field, given as raw JSON."""
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
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(int(220_000 * share))}}
    return [_chat("Answer.", response_format=response_format)] * 2


def _parts(share: float) -> list[bytes]:
    content = [{"type": "text", "text": "word"}] * int(10_000 * share)
    return [_arq(json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}))] * 6


def _exchanges(share: float) -> list[bytes]:
    """Return histories of 10,000 parts with tool calls, for which several forms of the template are tried."""
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
    """Return schemas whose alternatives would each have to be compared with all other members."""
    many: list[dict[str, Any]] = [{}] * int(14_900 * share)
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": many, "allOf": many}}}
    return [_chat("Answer.", response_format=response_format, seed=i) for i in range(4)]


TOO_LARGE, REFUSED = frozenset({"too_large"}), frozenset({"too_large", "invalid_request"})
KINDS = (
    Greedy("six prompts of 1.5 MB", lambda s: [_chat(_words(int(1.5e6 * s)))] * 6, TOO_LARGE),
    Greedy("eight prompts of 14.5 MB", lambda s: [_chat(_words(int(14.5e6 * s)))] * 8, TOO_LARGE),
    Greedy("8 MB of digits", lambda s: [_chat("1234567890" * int(800_000 * s))], TOO_LARGE),
    Greedy(
        "15.9 MB of empty lists as metadata",
        lambda s: [_body_with('"metadata":{"a":[' + ",".join(["[]"] * int(5.3e6 * s)) + "]}")] * 2,
        REFUSED,
    ),
    Greedy("one string of 15.9 MB", lambda s: [_chat("a" * int(15.9e6 * s) + "\U0001f600")] * 2, TOO_LARGE),
    Greedy("a schema of 16 MB", _schemas, REFUSED),
    Greedy("tools of 15 MB", lambda s: [_body_with(f'"tools":{_tools(int(5_500 * s))}')] * 2, REFUSED),
    Greedy(
        "chat_template_kwargs of 15 MB",
        lambda s: [_body_with('"chat_template_kwargs":{"a":[' + ",".join(["{}"] * int(5e6 * s)) + "]}")] * 2,
        REFUSED,
    ),
    Greedy("10,000 parts, six times", _parts, REFUSED | {"finished"}),
    Greedy("calls and results, 10,000 parts, six times", _exchanges, REFUSED | {"finished"}, "long"),
    Greedy("oneOf next to a long allOf, four times", _comparisons, REFUSED, "guided"),
    Greedy(
        "15.9 MB of escapes",
        lambda s: [_arq('{"messages":[{"role":"user","content":"' + "a\\n" * int(5.3e6 * s) + '"}]}')] * 2,
        TOO_LARGE,
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements without the requests and with them."""

    alone: Phase
    during: Phase
    grown_mb: float
    verdicts: Counter[str]
    took_s: float
    stop_s: float


async def with_greedy_requests(
    url: str, *, streams: int, alone_s: float, share: float = 1.0, kinds: Sequence[Greedy] = KINDS
) -> list[Figure]:
    """Measure each kind of request with the same streams, on its own worker."""
    figures = list[Figure]()
    for kind in kinds:
        figures += figures_of(kind, await run_kind(url, kind, streams=streams, alone_s=alone_s, share=share))
    return figures


async def run_kind(url: str, kind: Greedy, *, streams: int, alone_s: float, share: float) -> Outcome:
    """Measure one kind of request: the streams alone, with the requests, and alone again."""
    bodies = await asyncio.to_thread(kind.bodies, share)
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        await db.flushdb()
        with WorkerProcess(url, max_rows=streams + 16, reserved_rows=0, step_ms=50, lease_s=10) as worker:
            ids = [(await client.submit(chat_request(30_000, logit_bias={"2": -100}))).id for _ in range(streams)]
            await until_decoding(client, ids, 10)
            async with ProbeJobs(client, db, kind.probes) as before:
                await asyncio.sleep(alone_s)
            async with ProbeJobs(client, db, kind.probes) as during, Memory(worker) as memory:
                await queue_bodies(db, "greedy", bodies)
                verdicts, took_s = await wait_for_endings(db, "greedy", len(bodies))
                await asyncio.sleep(max(0.0, alone_s - took_s))
            async with ProbeJobs(
                client, db, kind.probes
            ) as after:  # measured twice, since other processes may disturb one
                await asyncio.sleep(alone_s)
            await queue_bodies(db, "again", bodies)
            stop_s = await stop_worker(worker)
        for phase in (before, during, after):
            phase.gaps_s = [gap for job_id in ids for gap in await gaps(db, job_id, phase)]
    return Outcome(before.merged_with(after), during, memory.grown_mb, verdicts, took_s, stop_s)


def figures_of(kind: Greedy, found: Outcome) -> list[Figure]:
    """Return the results with their limits."""
    step_ms, alone_ms, together_ms = (
        1000 * number
        for number in (statistics.median(found.alone.gaps_s), max(found.alone.gaps_s), max(found.during.gaps_s))
    )
    gap_limit_ms = alone_ms + step_ms + 50
    pickup_s, pickup_alone_s = max(found.during.pickups_s), max(found.alone.pickups_s)
    outcomes = ", ".join(f"{count} {type}" for type, count in sorted(found.verdicts.items()))
    return [
        Figure(f"{kind.label}: longest gap of a stream (alone {alone_ms:.0f} ms, step {step_ms:.0f} ms)",
               f"≤ {gap_limit_ms:.0f} ms", f"{together_ms:.0f} ms", together_ms <= gap_limit_ms),
        Figure(f"{kind.label}: slowest pickup of an ordinary job (alone {pickup_alone_s:.2f} s)",
               f"≤ {pickup_alone_s + 2:.2f} s", f"{pickup_s:.2f} s", pickup_s <= pickup_alone_s + 2),
        Figure(f"{kind.label}: additional memory", "≤ 1,000 MB", f"{found.grown_mb:,.0f} MB", found.grown_mb <= 1000),
        Figure(f"{kind.label}: end after the second signal", "≤ 3 s", f"{found.stop_s:.1f} s", found.stop_s <= 3),
        Figure(f"{kind.label}: verdicts, within {found.took_s:.1f} s", " or ".join(sorted(kind.verdicts)), outcomes,
               found.verdicts.keys() <= kind.verdicts),
    ]  # fmt: skip


async def stop_worker(worker: WorkerProcess) -> float:
    """Send SIGTERM twice, and return the seconds from the second one to the end of the worker."""
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
    """Return a request with a schema that the worker has not compiled before."""
    schema = {"type": "object", "properties": {f"a{number}": {"type": "string", "pattern": "^[a-z]+$"}}}
    return chat_request(
        2,
        f"{number} {_words(300)}",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )


_ORDINARY: dict[str, Callable[[int], dict[str, Any]]] = {
    "short": lambda number: chat_request(2, f"{number} {_words(_ORDINARY_CHARACTERS)}"),
    # Some 22,000 tokens: too long to be tokenized in parallel with others.
    "long": lambda number: chat_request(2, f"{number} {'The weather in Oslo is fine. ' * 2_420}"),
    "guided": _guided,
}


class ProbeJobs:
    """Submits ordinary jobs one after the other while the context is open, and records their pickup times."""

    def __init__(self, client: Client, db: redis.asyncio.Redis, kind: str) -> None:
        """`kind`: one of `_ORDINARY`."""
        self._client = client
        self._db = db
        self._phase = Phase()
        self._continues = True
        self._request = _ORDINARY[kind]

    async def __aenter__(self) -> Phase:
        self._phase.began = await server_now(self._db)
        self._probing = asyncio.create_task(self._submit_probes())
        return self._phase

    async def __aexit__(self, *_: object) -> None:
        self._phase.ended = await server_now(self._db)
        self._continues = False
        await self._probing

    async def _submit_probes(self) -> None:
        for number in itertools.count():
            job = await self._client.submit(self._request(number))
            await asyncio.wait_for(until_decoding(self._client, [job.id], 0), _PICKED_UP_S)
            self._phase.pickups_s.append(await _pickup_s(self._db, job.id))
            await self._client.cancel(job.id)
            if not self._continues:
                return
            await asyncio.sleep(0.1)


async def _pickup_s(db: redis.asyncio.Redis, job_id: str) -> float:
    """Return the seconds from the submission to `started`, which a worker emits when the prompt is ready."""
    queued_at = await db.hget(f"sluice:job:{job_id}", "queued_at")  # type: ignore[misc]
    return (await event_times(db, job_id))[0][0] - float(queued_at or 0)
