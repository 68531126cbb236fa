"""Whatever is put on the queue: one `failed` event with a type and a sentence, soon, and the worker unharmed."""

import asyncio
import json
import pickle
import time
from typing import Any

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice import Client, JobFailed
from sluice.contract.events import FINAL
from tests.selection import examples
from tests.support.stack import WorkerProcess

QUEUE = "sluice:queue:default:interactive"
WITHIN_S = 60
HELLO = [{"role": "user", "content": "Count to 3."}]
TYPES = {"invalid_request", "unsupported", "too_large", "overloaded", "deadline", "internal"}


def put(db: redis.Redis, job_id: str, body: bytes) -> None:
    """As any producer could, ours or not."""
    db.set(f"arq:job:{job_id}", body, ex=60)
    db.zadd(QUEUE, {job_id: 1})


def arq(request: Any) -> bytes:
    return json.dumps({"t": None, "f": "chat", "a": [request], "k": {}, "et": 1}).encode()


def ending(db: redis.Redis, job_id: str) -> dict[str, Any]:
    """Waits for the log's last event on the channel's news."""
    with db.pubsub() as pubsub:
        pubsub.subscribe(f"sluice:ch:{job_id}")
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            said = [json.loads(raw) for raw in db.lrange(f"sluice:log:{job_id}", 0, -1)]
            if said and said[-1]["type"] in FINAL:
                assert [event["type"] in FINAL for event in said].count(True) == 1
                return said[-1]  # type: ignore[no-any-return]
            pubsub.get_message(timeout=0.1)
    raise AssertionError(f"{job_id} did not end")


@pytest.fixture(scope="module", autouse=True)
def logged_before(worker: WorkerProcess) -> int:
    """The length of the log before these tests: others use the worker too."""
    return len(worker.log())


@pytest.fixture
def sync_db(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


CASES = {
    "not JSON": (b"\x80\x04hello", "invalid_request", "not JSON"),
    "a pickle": (pickle.dumps({"f": "chat", "a": [1]}), "invalid_request", "not JSON"),
    "NaN": (
        b'{"t":null,"f":"chat","a":[NaN],"k":{},"et":1}',
        "invalid_request",
        "NaN, which is not JSON; send a number",
    ),
    "not an envelope": (b"[1, 2]", "invalid_request", "not an arq job"),
    "another function": (b'{"t":null,"f":"rm","a":[1],"k":{},"et":1}', "invalid_request", "'rm'"),
    "two arguments": (b'{"t":null,"f":"chat","a":[1,2],"k":{},"et":1}', "invalid_request", "one positional"),
    "a string": (arq("hello"), "invalid_request", "must be an object"),
    "nothing": (arq({}), "invalid_request", "messages is missing"),
    "no messages": (arq({"messages": []}), "invalid_request", "messages"),
    "wrong type": (arq({"messages": HELLO, "temperature": "hot"}), "invalid_request", "temperature must be a number"),
    "unknown field": (arq({"messages": HELLO, "max_token": 5}), "invalid_request", "did you mean max_tokens"),
    "max_tokens 0": (arq({"messages": HELLO, "max_tokens": 0}), "invalid_request", "max_tokens"),
    "another model": (arq({"messages": HELLO, "model": "gpt-9"}), "invalid_request", "'default', not 'gpt-9'"),
    "a video": (
        arq({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]}),
        "invalid_request",
        "video_url",
    ),
    "an image": (
        arq({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}),
        "unsupported",
        "does not support images",
    ),
    "a schema that means nothing": (
        arq(
            {
                "messages": HELLO,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "number", "minimum": 2, "maximum": 1}},
                },
            }
        ),
        "invalid_request",
        "response_format",
    ),
    "a schema for the whole web": (
        arq(
            {
                "messages": HELLO,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "https://example.org/schema.json"}},
                },
            }
        ),
        "invalid_request",
        "example.org",
    ),
    "too long": (
        arq({"messages": [{"role": "user", "content": "key " * 40_000}]}),
        "too_large",
        "maximum context length is 32768 tokens",
    ),
    "deep": (arq({"messages": HELLO, "metadata": json.loads("[" * 900 + "]" * 900)}), "invalid_request", "metadata"),
    "deeper": (b'{"f":"chat","a":[' + b"[" * 50_000 + b"]" * 50_000 + b"]}", "invalid_request", "too deeply"),
    "deepest": (b'{"f":"chat","a":[' + b"[" * 150_000 + b"]" * 150_000 + b"]}", "too_large", "150,003 JSON values"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_job_fails_with_a_sentence(worker: WorkerProcess, sync_db: redis.Redis, name: str) -> None:
    body, type, words = CASES[name]
    put(sync_db, "bad", body)
    final = ending(sync_db, "bad")
    assert final["type"] == "failed"
    assert final["error"]["type"] == type
    assert words in final["error"]["message"]
    assert final["error"]["retryable"] is False
    assert sync_db.zcard(QUEUE) == 0


@pytest.mark.timing
@pytest.mark.parametrize("name", ["too long", "deep", "deeper", "deepest"])
def test_a_costly_bad_job_fails_within_a_second(worker: WorkerProcess, sync_db: redis.Redis, name: str) -> None:
    put(sync_db, "bad", CASES[name][0])
    final = ending(sync_db, "bad")
    assert final["type"] == "failed"
    assert final["ts"] - float(sync_db.hget("sluice:job:bad", "started_at") or 0) < 1.0


def test_an_expired_body_fails_by_name(worker: WorkerProcess, sync_db: redis.Redis) -> None:
    sync_db.zadd(QUEUE, {"gone": 1})
    assert "expired" in ending(sync_db, "gone")["error"]["message"]


async def test_a_deadline_below_zero_is_the_request_s_fault(worker: WorkerProcess, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "deadline_s": -5})
    with pytest.raises(JobFailed) as raised:
        await client.result(job.id)
    assert (raised.value.error.type, raised.value.error.retryable) == ("invalid_request", False)
    assert raised.value.error.message.startswith("deadline_s: -5 is too small")


HALF = "\ud83d"


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {HALF: 1}},
        {"chat_template_kwargs": {"a": HALF}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"description": HALF}}}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_half_of_a_surrogate_pair_is_the_request_s_fault(
    worker: WorkerProcess, sync_db: redis.Redis, fields: dict[str, Any]
) -> None:
    put(sync_db, "half", arq({"messages": HELLO, **fields}))
    error = ending(sync_db, "half")["error"]
    assert error["type"] == "invalid_request"
    assert error["message"].startswith(next(iter(fields)))


async def test_an_absurd_max_tokens_is_cut_to_what_the_context_leaves(worker: WorkerProcess, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "max_tokens": 10**12})
    assert (await client.result(job.id))["choices"][0]["message"]["content"] == "1 2 3"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=12), children, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["messages", "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "logit_bias", "tools"]
    + ["response_format", "deadline_s", "metadata", "chat_template_kwargs", "specprefill", "n", "user", "logprobs"]
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "robot"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": JSON}), max_size=4)
REQUESTS = st.dictionaries(FIELDS, JSON, max_size=5) | st.builds(
    lambda messages, rest: {**rest, "messages": messages}, MESSAGES, st.dictionaries(FIELDS, JSON, max_size=3)
)
BODIES = st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()) | REQUESTS.map(arq)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES)
def test_anything_at_all_has_one_ending_and_harms_nobody(
    worker: WorkerProcess, sync_db: redis.Redis, body: bytes
) -> None:
    sync_db.delete("sluice:job:any", "sluice:log:any", "sluice:result:any")
    put(sync_db, "any", body)
    final = ending(sync_db, "any")
    assert final["type"] in ("failed", "finished")
    if final["type"] == "failed":
        assert final["error"]["type"] in TYPES - {"internal"}, final
        assert final["error"]["message"]


async def test_the_worker_still_answers_after_all_that(
    worker: WorkerProcess, client: Client, logged_before: int
) -> None:
    job = await client.submit(HELLO)
    answer = await asyncio.wait_for(client.result(job.id), WITHIN_S)
    assert answer["choices"][0]["message"]["content"] == "1 2 3"
    assert "Traceback" not in worker.log()[logged_before:]
