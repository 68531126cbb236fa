"""A job with a long log does not block the event loop, which publishes the tokens of all jobs."""

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from tests.fakes import ByteTokenizer, FakeEngine, worker_context
from tests.queue.helpers import ended, envelope, put, settings, types, words, working
from worker.jobs import chat

EVENTS, ALTERNATIVES = 8_000, 20
ANSWER = ("word " * EVENTS)[:EVENTS] + "end."
REQUEST = {"messages": [{"role": "user", "content": "Hello"}], "seed": 7, "max_tokens": len(ANSWER)}
# Of the loop's thread; some 0.015 s on two slow cores, where the log is 11 MB and the result as large.
LONGEST_TURN_S = 0.04


class Turns:
    """CPU time of the event loop's turns, so that a busy machine does not count."""

    def __init__(self) -> None:
        self.longest_s, self.what = 0.0, ""

    def measure(self, run: Any, handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        took_s = time.thread_time() - began
        if took_s > self.longest_s:
            self.longest_s, self.what = took_s, repr(handle)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    found, run = Turns(), asyncio.Handle._run
    monkeypatch.setattr(asyncio.Handle, "_run", lambda handle: found.measure(run, handle))
    gc.collect()
    gc.freeze()  # as a worker does once it has loaded its model
    yield found
    gc.unfreeze()


def entry(token: int) -> dict[str, Any]:
    one = {"token": chr(token), "logprob": -0.123456789012, "bytes": [token]}
    return {**one, "top_logprobs": [one] * ALTERNATIVES}


def delta(seq: int, token: int, logprobs: bool) -> bytes:
    common = {"id": "a", "seq": seq, "attempt": 1, "type": "delta", "ts": time.time()}
    more = {"logprobs": [entry(token)]} if logprobs else {}
    return json.dumps({**common, "token_ids": [token], "content": chr(token), **more}).encode()


async def write_log(db: Redis, logprobs: bool) -> None:
    started = {"id": "a", "seq": 0, "attempt": 1, "type": "started", "ts": time.time(), "seed": 7}
    events = [json.dumps({**started, "model": "default", "fingerprint": "fp_fake", "worker": "old"}).encode()]
    events += [delta(1 + k, token, logprobs) for k, token in enumerate(ANSWER[:EVENTS].encode())]
    for start in range(0, len(events), 500):
        await db.rpush(keys.log("a"), *events[start : start + 500])
    await db.hset(keys.job("a"), mapping={"state": "queued", "attempt": 1})


@pytest.mark.timing
@pytest.mark.parametrize(
    "logprobs",
    [
        pytest.param(False, id="words alone"),
        pytest.param(True, id="logprobs of 20 alternatives", marks=pytest.mark.slow),
    ],
)
async def test_a_job_with_a_long_log_is_taken_up_and_ended_in_short_turns_of_the_loop(
    redis_url: str, db: Redis, turns: Turns, logprobs: bool
) -> None:
    tokenizer, known = ByteTokenizer(), settings(redis_url, max_output_tokens=20_000)
    engine = FakeEngine(lambda sequence: ANSWER.encode())
    model = worker_context(known, engine, tokenizer, context_tokens=20_000)
    await write_log(db, logprobs)
    asks = {"logprobs": True, "top_logprobs": ALTERNATIVES} if logprobs else {}
    async with engine, working(known, chat, context=model):
        turns.longest_s = 0.0
        await put(db, "a", envelope({**REQUEST, **asks}))
        while await db.hget(keys.job("a"), "state") != b"finished":
            await asyncio.sleep(0.01)
        longest_s, what = turns.longest_s, turns.what
    said = await ended(db, "a")
    assert ("resumed" in types(said), words(said)) == (True, ANSWER)
    result = json.loads(await db.get(keys.result("a")))["choices"][0]
    assert result["message"]["content"] == ANSWER
    if logprobs:
        assert result["logprobs"]["content"][:EVENTS] == [entry(token) for token in ANSWER[:EVENTS].encode()]
    assert longest_s < LONGEST_TURN_S, what


@pytest.mark.parametrize("token", [-1, 256, 2_000_000_000, 2**70, True])
async def test_a_log_with_a_token_outside_the_vocabulary_never_reaches_the_engine(
    redis_url: str, db: Redis, token: int
) -> None:
    tokenizer, known = ByteTokenizer(), settings(redis_url)
    engine = FakeEngine(lambda sequence: b"Hello")
    started = {
        "id": "a",
        "seq": 0,
        "attempt": 1,
        "ts": time.time(),
        "type": "started",
        "seed": 7,
        "fingerprint": "fp_fake",
    }
    foreign = {"id": "a", "seq": 1, "attempt": 1, "ts": time.time(), "type": "delta", "token_ids": [token]}
    await db.rpush(keys.log("a"), json.dumps(started), json.dumps(foreign))
    await db.hset(keys.job("a"), mapping={"state": "queued", "attempt": 1})
    async with engine, working(known, chat, context=worker_context(known, engine, tokenizer)):
        await put(db, "a", envelope({**REQUEST, "max_tokens": 5}))
        said = await ended(db, "a")
    assert types(said)[2:3] == ["restarted"]
    assert words(said) == "Hello"
    assert [sequence.resume_tokens for sequence in engine.sequences] == [()]
