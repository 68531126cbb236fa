"""A chat job continues what a worker of this or another version left in Redis."""

import json
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from tests.queue.helpers import ended, envelope, field, put, types, words
from tests.queue.test_worker import ANSWER, HELLO, chatting

PROMPT = len("<user>Hello<assistant>")
KEPT = ((0, 5), (9, PROMPT))
REPORT = {"fingerprint": "fp_fake", "draft": "small", "why_whole": "", "kept": KEPT, "scoring_s": 0.25}
STATE = {"fingerprint": "fp_fake", "seed": "7", "specprefill": json.dumps(REPORT), "images": ""}


async def leave(
    db: Redis, request: dict[str, Any] | None = None, *, answer: str = ANSWER[:10], content: str = "", **state: Any
) -> None:
    """Write a job as its worker does that is stopped after the tokens of `answer`. `content`: if not all of it."""
    events: list[dict[str, Any]] = [
        {"type": "started", "model": "default", "fingerprint": "fp_fake", "worker": "old", "seed": 7},
        {"type": "delta", "token_ids": list(answer.encode()), "content": content or answer},
    ]
    head = {"id": "a", "attempt": 1, "ts": (await db.time())[0]}
    await db.rpush(keys.log("a"), *(json.dumps({**head, "seq": k, **event}) for k, event in enumerate(events)))
    await db.hset(keys.job("a"), mapping={"state": "queued", "attempt": 1, **STATE, **state})
    await put(db, "a", envelope({"messages": HELLO, "seed": 7, **(request or {})}))


@pytest.mark.parametrize(("stop", "tokens"), [(" slowly", 9), ("unt", 7)])
async def test_a_new_attempt_reports_the_stop_string_that_ended_the_answer(
    redis_url: str, db: Redis, stop: str, tokens: int
) -> None:
    """The earlier attempt was stopped in the middle of the stop string, or after it."""
    said = ANSWER[: ANSWER.index(stop)]
    await leave(db, {"stop": ["never", stop]}, answer=ANSWER[:tokens], content=said)
    async with chatting(redis_url):
        events = await ended(db, "a")
    assert [kind for kind in types(events) if kind != "delta"] == ["started", "resumed", "finished"]
    assert (words(events), events[-1]["stop_sequence"]) == (said, stop)
    assert json.loads(await db.get(keys.result("a")))["sluice"]["stop_sequence"] == stop


async def test_a_new_attempt_drops_the_tokens_that_an_earlier_one_dropped(redis_url: str, db: Redis) -> None:
    await leave(db)
    async with chatting(redis_url) as engine:
        events = await ended(db, "a")
    (request,) = engine.sequences
    assert (bytes(request.resume_tokens).decode(), request.kept_ranges) == (ANSWER[:10], KEPT)
    assert [kind for kind in types(events) if kind != "delta"] == ["started", "resumed", "finished"]
    assert words(events) == ANSWER
    assert events[-1]["usage"]["kept_tokens"] == PROMPT - 4
    assert json.loads(await db.get(keys.result("a")))["sluice"]["specprefill"]["kept"] == round(1 - 4 / PROMPT, 4)
    assert {name: await field(db, "a", name) for name in ("fingerprint", "seed", "images")} == {
        "fingerprint": "fp_fake", "seed": "7", "images": "",
    }  # fmt: skip
    assert json.loads(await field(db, "a", "specprefill") or "") == json.loads(STATE["specprefill"])


@pytest.mark.parametrize(
    "state",
    [
        {"images": "digest"},
        {"specprefill": "no JSON"},
        {"specprefill": json.dumps({**REPORT, "kept": [[0, 5]]})},
        {"specprefill": json.dumps({**REPORT, "fingerprint": "fp_other"})},
    ],
)
async def test_a_new_attempt_that_cannot_continue_forgets_the_earlier_decisions(
    redis_url: str, db: Redis, state: dict[str, str]
) -> None:
    await leave(db, **state)
    async with chatting(redis_url) as engine:
        events = await ended(db, "a")
    (request,) = engine.sequences
    assert (request.resume_tokens, request.kept_ranges) == ((), None)
    assert words(events[types(events).index("restarted") :]) == ANSWER
    assert [await field(db, "a", name) for name in ("images", "specprefill")] == ["", ""]
