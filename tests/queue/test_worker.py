import asyncio
import json
import logging
import pickle
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.keys import Lane
from tests.fakes import TIMINGS, ByteTokenizer, FakeChat, FakeEngine, worker_context
from tests.keyspace import check_all_ended, check_job_keys
from tests.line import Line
from tests.queue.helpers import (
    ask,
    ended,
    envelope,
    field,
    lapse,
    listening,
    log,
    put,
    settings,
    types,
    until,
    until_it_has_said,
    words,
    working,
)
from worker.errors import OwnershipLost
from worker.jobs import chat as real_chat
from worker.queue.job.claims import Claim, lease_key
from worker.queue.job.job import JobResult
from worker.queue.running import RunningJobs

USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
TOO_DEEP = "The job's body is nested too deeply to be read; nest its lists and objects at most 64 levels deep."
NOT_JSON = (
    "The job's body is not JSON: give arq's create_pool a JSON job_serializer, for example "
    "lambda job: json.dumps(job).encode()."
)
ONE_ARGUMENT = "chat takes one positional argument, the request, and nothing by name."
NOT_ARQ = "The job's body is not an arq job: it has no function name."
EXPIRED = "The job's body has expired or was deleted; submit it again."
BAD_ID = "A job id must match [A-Za-z0-9._-]{1,128}."
OURS = "The worker failed on this job; its log says why."


def failed(job_id: str, type: str, message: str, *, retryable: bool = False, **usage: int) -> dict[str, Any]:
    """The one event of a job that is refused at the door."""
    error = {"type": type, "message": message, "retryable": retryable}
    return {"id": job_id, "seq": 0, "attempt": 1, "type": "failed", "error": error, "usage": {**USAGE, **usage}}


@asynccontextmanager
async def at_work(url: str, **given: Any) -> AsyncIterator[FakeChat]:
    chat = FakeChat()
    async with working(settings(url, **given), chat.chat):
        yield chat


async def cancel(db: Redis, job_id: str) -> None:
    await db.set(keys.cancel(job_id), "1", ex=60)
    await db.publish(keys.CONTROL, job_id)


async def running(chat: FakeChat, *job_ids: str) -> None:
    await until(lambda: {job.claim.job_id for job in chat.running} == set(job_ids))


# A job and its one ending


async def test_a_good_job_says_what_it_says_and_leaves_its_result(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url):
        await ask(db, "a", {"say": ["Hel", "lo"]})
        said = await ended(db, "a")
    common = {"id": "a", "attempt": 1}
    assert said == [
        {"seq": 0, "type": "started", "model": "default", "fingerprint": "fp_fake", "worker": "", "seed": 7, **common},
        {"seq": 1, "type": "delta", "token_ids": [0], "content": "Hel", **common},
        {"seq": 2, "type": "delta", "token_ids": [1], "content": "lo", **common},
        {
            "seq": 3, "type": "finished", "finish_reason": "stop", "stop_sequence": None,
            "timings": TIMINGS, "usage": {**USAGE, "completion_tokens": 2}, **common,
        },
    ]  # fmt: skip
    assert json.loads(await db.get(keys.result("a"))) == {"object": "chat.completion", "said": "Hello"}
    await check_job_keys(db, "a")
    await check_all_ended(db)


BODIES: dict[str, tuple[bytes | None, str, str]] = {
    "an unknown function": (
        envelope({}, function="rm"), "invalid_request", "The function 'rm' does not exist; this worker has: chat.",
    ),
    "a function with a long name": (
        envelope({}, function="x" * 500),
        "invalid_request",
        f"The function {'x' * 64!r} does not exist; this worker has: chat.",
    ),
    "not JSON": (b"hello", "invalid_request", NOT_JSON),
    "not UTF-8": (b'{"f": "chat", "a": ["\xff"], "k": {}}', "invalid_request", NOT_JSON),
    "nested too deep": (b'{"f": "chat", "a": [' + b"[" * 50_000 + b"]" * 50_000 + b"]}", "invalid_request", TOO_DEEP),
    "no arq job": (b"[1, 2]", "invalid_request", NOT_ARQ),
    "null": (b"null", "invalid_request", NOT_ARQ),
    "no function": (b'{"a": [1], "k": {}}', "invalid_request", NOT_ARQ),
    "keyword arguments": (envelope({}, temperature=1), "invalid_request", ONE_ARGUMENT),
    "two arguments": (envelope({}, {}), "invalid_request", ONE_ARGUMENT),
    "no argument": (envelope(), "invalid_request", ONE_ARGUMENT),
    "no lists at all": (b'{"f": "chat"}', "invalid_request", ONE_ARGUMENT),
    "an expired body": (None, "invalid_request", EXPIRED),
    "too many bytes": (b" " * 5_001, "too_large", "The job is 5,001 bytes; this worker accepts 5,000."),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_what_cannot_be_run_fails_once_and_says_why(redis_url: str, db: Redis, name: str) -> None:
    body, type, message = BODIES[name]
    async with at_work(redis_url, max_request_bytes=250_000 if "deep" in name else 5_000) as chat:
        await put(db, "bad", body)
        await ask(db, "good", {"say": ["fine"]}, at_ms=2)
        assert await ended(db, "bad") == [failed("bad", type, message, retryable=message == EXPIRED)]
        assert words(await ended(db, "good")) == "fine"
        assert chat.began == ["good"]
    await check_all_ended(db)


@pytest.mark.parametrize("number", ["NaN", "1e999", "9" * 5000])
async def test_a_number_that_is_not_json_is_named(redis_url: str, db: Redis, number: str) -> None:
    async with at_work(redis_url):
        await put(db, "bad", b'{"f": "chat", "a": [' + number.encode() + b'], "k": {}}')
        error = (await ended(db, "bad"))[-1]["error"]
    assert (error["type"], error["retryable"]) == ("invalid_request", False)
    assert "number" in error["message"]
    assert "serializer" not in error["message"]


@pytest.mark.parametrize("size", [60_000, 70_000, 3_000_000])
async def test_a_large_body_is_read_as_a_small_one_is(redis_url: str, db: Redis, size: int) -> None:
    async with at_work(redis_url):
        await ask(db, "a", {"say": ["Hel", "lo"], "more": "x" * size})
        assert words(await ended(db, "a")) == "Hello"


async def test_more_values_than_are_read_end_the_job_as_too_large(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url) as chat:
        await ask(db, "a", {"say": ["Hello"], "more": [[]] * 60_000})
        assert (await ended(db, "a"))[-1]["error"]["type"] == "too_large"
        assert chat.began == []


async def test_a_body_that_is_no_string_holds_up_nobody(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url):
        await db.rpush("arq:job:bad", "a list")
        await put(db, "bad", None)
        await ask(db, "good", {"say": ["fine"]}, at_ms=2)
        assert await ended(db, "bad") == [failed("bad", "invalid_request", EXPIRED, retryable=True)]
        assert words(await ended(db, "good")) == "fine"
    await check_all_ended(db)


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


async def test_a_pickle_is_never_opened(redis_url: str, db: Redis, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    body = pickle.dumps({"t": None, "f": "chat", "a": (Trap(trap),), "k": {}, "et": 1})
    async with at_work(redis_url):
        await put(db, "a", body)
        assert await ended(db, "a") == [failed("a", "invalid_request", NOT_JSON)]
    assert not trap.exists()
    pickle.loads(body)
    assert trap.exists(), "the trap was no trap"


@pytest.mark.parametrize("name", [b"a b", b"\xff\xfe", "né".encode(), b"a\n", b"a:b", b"x" * 129, b"*"])
async def test_an_odd_id_is_refused_and_cleaned_up(redis_url: str, db: Redis, name: bytes) -> None:
    async with at_work(redis_url) as chat:
        await put(db, name, envelope({"say": ["never"]}))
        said = await ended(db, name)
        assert said == [failed(name.decode("utf-8", "surrogateescape"), "invalid_request", BAD_ID)]
        assert chat.began == []
    await check_all_ended(db)


async def test_a_function_that_raises_ends_its_job_and_no_other(
    redis_url: str, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with at_work(redis_url) as chat:
        await ask(db, "other", {"say": ["Hel", "lo"], "pace_s": 0.1})
        await running(chat, "other")
        await ask(db, "a", {"say": ["so far"], "then": "broken by the test"})
        said = await ended(db, "a")
        assert types(said) == ["started", "delta", "failed"]
        assert said[-1] == {**failed("a", "internal", OURS, retryable=True, completion_tokens=1), "seq": 2}
        assert words(await ended(db, "other")) == "Hello"
    assert "ValueError: broken by the test" in caplog.text, "whoever runs the worker sees the traceback"
    await check_all_ended(db)


@pytest.mark.parametrize("result", [None, {"n": 1}])
async def test_a_function_that_returns_no_answer_fails_its_job(redis_url: str, db: Redis, result: Any) -> None:
    async def chat(ctx: dict[Any, Any], request: Any) -> Any:
        return result

    async with working(settings(redis_url), chat):
        await ask(db, "a", {})
        assert await ended(db, "a") == [failed("a", "internal", OURS, retryable=True)]
    await check_all_ended(db)


async def test_an_answer_that_is_no_json_fails_its_job(redis_url: str, db: Redis) -> None:
    async def chat(ctx: dict[Any, Any], request: Any) -> Any:
        return JobResult("stop", TIMINGS, {"said": object()})

    async with working(settings(redis_url), chat):
        await ask(db, "a", {})
        assert await ended(db, "a") == [failed("a", "internal", OURS, retryable=True)]
    await check_all_ended(db)


# Cancelling


async def test_a_running_job_is_cancelled_with_what_it_spent(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url) as chat:
        await ask(db, "a", {"say": ["one"], "then": "hang"})
        await ask(db, "b", {"then": "hang"})
        await running(chat, "a", "b")
        await cancel(db, "a")
        said = await ended(db, "a")
        assert types(said) == ["started", "delta", "cancelled"]
        assert (said[-1]["reason"], said[-1]["usage"]) == ("requested", {**USAGE, "completion_tokens": 1})
        await running(chat, "b")


@pytest.fixture
def cancelled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job is cancelled in the same turn of the event loop as its claim."""
    monkeypatch.setattr(RunningJobs, "start", start_and(lambda jobs, job_id: jobs.cancel(job_id)))


def start_and(then: Callable[[RunningJobs, str], object]) -> Callable[[RunningJobs, Claim], None]:
    start = RunningJobs.start

    def start_and_then(jobs: RunningJobs, claim: Claim) -> None:
        start(jobs, claim)
        then(jobs, claim.job_id)

    return start_and_then


@pytest.mark.usefixtures("cancelled_at_once")
async def test_a_job_cancelled_before_its_first_step_has_its_ending(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat):
        await ask(db, "a", {"then": "hang"})
        assert types(await ended(db, "a")) == ["cancelled"]
    await check_all_ended(db)


@pytest.mark.usefixtures("cancelled_at_once")
async def test_a_job_of_an_earlier_attempt_is_cancelled_before_it_begins_again(redis_url: str, db: Redis) -> None:
    await put(db, "a", envelope({"then": "hang"}))
    await db.hset(keys.job("a"), mapping={"state": "running", "attempt": 1})
    await db.rpush(keys.log("a"), json.dumps({"seq": 0, "type": "delta", "ts": time.time(), "content": "so far"}))
    chat = FakeChat()
    # A short lease: on a server that has only just started, lapsed jobs are left to their owners for so long.
    async with working(settings(redis_url, lease_s=1), chat.chat):
        assert types(await ended(db, "a")) == ["delta", "cancelled"]


# Deadlines, through the real chat


ANSWER = "I count slowly: 1 2 3 4 5 6 7 8 9"
HELLO = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def chatting(
    url: str, *, step_s: float = 0.001, answer: str = ANSWER, fingerprint: str = "fp_fake", **given: Any
) -> AsyncIterator[FakeEngine]:
    tokenizer, known = ByteTokenizer(), settings(url, **given)
    engine = FakeEngine(lambda sequence: tokenizer.encode(answer), step_s=step_s)
    model = worker_context(known, engine, tokenizer, fingerprint=fingerprint)
    async with engine, working(known, real_chat, context=model):
        yield engine


async def queued_ago(db: Redis, seconds: float) -> int:
    now_s, microseconds = await db.time()
    return int((now_s - seconds) * 1000 + microseconds / 1000)


async def test_the_real_chat_says_what_the_engine_says(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url) as engine:
        await ask(db, "a", {"messages": HELLO, "stop": " 4"})
        said = await ended(db, "a")
    assert words(said) == "I count slowly: 1 2 3"
    assert (said[0]["type"], said[-1]["type"], said[-1]["finish_reason"]) == ("started", "finished", "stop")
    assert said[-1]["stop_sequence"] == " 4"
    assert json.loads(await db.get(keys.result("a")))["sluice"]["stop_sequence"] == " 4"
    assert [token for event in said for token in event.get("token_ids", [])] == list(b"I count slowly: 1 2 3 4")
    prompt = len("<user>Hello<assistant>")
    assert said[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 23, "cached_tokens": 0}
    assert engine.running == set()
    await check_all_ended(db)


CALLS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<assistant>"""


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("now", '{"zone": 1}', None),
        ("noww", '{"zone": 1}', "unknown_function"),
        ("now", "{zone; 1}", "no_json_object"),
        ("now", "{}", "missing_argument"),
    ],
)
async def test_calls_that_a_model_wrote_wrong_are_counted_once_the_job_has_finished(
    redis_url: str, db: Redis, name: str, arguments: str, fault: str | None
) -> None:
    written = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    counted, warnings = await faults_of(written, redis_url, db)
    assert (counted, len(warnings)) == ({fault: 1} if fault else {}, 1 if fault else 0)


async def test_of_many_faulty_calls_all_are_counted_and_eight_named(redis_url: str, db: Redis) -> None:
    calls = [f'<tool_call>\n{{"name": "f{k}", "arguments": {{}}}}\n</tool_call>' for k in range(10)]
    counted, warnings = await faults_of("\n".join(calls), redis_url, db)
    assert (counted, len(warnings)) == ({"unknown_function": 10}, 8)


async def faults_of(written: str, redis_url: str, db: Redis) -> tuple[dict[str, float], list[str]]:
    """What the metrics have counted of the faults of an answer's calls, and its warnings."""
    tokenizer, known = ByteTokenizer(template=CALLS), settings(redis_url)
    engine = FakeEngine(lambda sequence: tokenizer.encode(written))
    model = worker_context(known, engine, tokenizer)
    function = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {}}, "required": ["zone"]}}
    async with engine, working(known, real_chat, context=model):
        await ask(db, "a", {"messages": HELLO, "tools": [{"type": "function", "function": function}]})
        final = (await ended(db, "a"))[-1]
        assert final["finish_reason"] == "tool_calls"
        await until(
            lambda: counted(model.metrics, "vllm:request_success_total", "finished_reason") == {"tool_calls": 1}
        )
    result = json.loads(await db.get(keys.result("a")))
    noted = result["sluice"].get("warnings", [])
    assert final.get("warnings", []) == noted
    return counted(model.metrics, "sluice:faulty_tool_calls_total", "fault"), noted


def counted(metrics: Any, name: str, label: str) -> dict[str, float]:
    """The series of a counter that are not zero, by a label."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name)
    return {sample.labels[label]: sample.value for sample in samples if sample.value}


async def test_a_deadline_that_passed_in_the_queue_is_the_end(redis_url: str, db: Redis) -> None:
    at_ms = await queued_ago(db, 60)
    async with chatting(redis_url) as engine:
        await ask(db, "a", {"messages": HELLO, "deadline_s": 30}, at_ms=at_ms)
        (said,) = await ended(db, "a")
    assert (said["type"], said["error"]["type"]) == ("failed", "deadline")
    assert engine.sequences == []
    await check_all_ended(db)


async def test_a_deadline_that_passes_while_the_job_runs_is_the_end(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url, step_s=0.05, answer="long " * 100) as engine:
        await listening(db)
        at_ms = await queued_ago(db, 0)
        await ask(db, "a", {"messages": HELLO, "deadline_s": 1.5}, at_ms=at_ms)
        await ask(db, "b", {"messages": HELLO, "deadline_s": 60}, at_ms=at_ms)
        said = await ended(db, "a")
        assert engine.running == {"b#1"}
    assert types(said)[0] == "started"
    assert said[-1]["error"] == {
        "type": "deadline",
        "message": "The job was not done 1.5 s after it was submitted.",
        "retryable": said[-1]["error"]["retryable"],
    }
    assert 0 < said[-1]["usage"]["completion_tokens"] == sum(len(event.get("token_ids", [])) for event in said) < 60


async def test_a_deadline_that_is_far_does_nothing(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url):
        await ask(db, "a", {"messages": HELLO, "deadline_s": 60}, at_ms=await queued_ago(db, 1))
        assert words(await ended(db, "a")) == ANSWER


async def test_a_chat_that_was_handed_back_goes_on_after_what_was_delivered(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url, step_s=0.02, worker_name="ada"):
        await ask(db, "a", {"messages": HELLO})
        await until_it_has_said(db, "a", 6)
    delivered = words(await log(db, "a"))
    assert delivered == ANSWER[: len(delivered)] != ANSWER
    async with chatting(redis_url, worker_name="ben") as engine:
        said = await ended(db, "a")
    assert bytes(engine.sequences[0].resume_tokens).decode() == delivered
    assert [event["type"] for event in said if event["type"] != "delta"] == ["started", "resumed", "finished"]
    assert words(said) == ANSWER
    assert said[-1]["usage"]["completion_tokens"] == len(ANSWER)
    assert json.loads(await db.get(keys.result("a")))["choices"][0]["message"]["content"] == ANSWER
    await check_all_ended(db)


async def test_a_chat_that_lost_only_its_ending_is_ended_without_another_token(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url):
        await ask(db, "a", {"messages": HELLO, "max_tokens": 8})
        whole = await ended(db, "a")
    await db.rpop(keys.log("a"))
    await put(db, "a", envelope({"messages": HELLO, "max_tokens": 8}))
    await db.hset(keys.job("a"), "state", "running")
    async with chatting(redis_url, lease_s=1) as engine:
        said = await ended(db, "a")
    assert engine.sequences == []
    assert words(said) == words(whole) == ANSWER[:8]
    assert (types(said)[-2:], said[-1]["finish_reason"]) == (["resumed", "finished"], "length")


async def test_a_chat_that_lost_only_its_ending_after_a_stop_string_was_stopped(redis_url: str, db: Redis) -> None:
    request = {"messages": HELLO, "stop": " 4"}
    async with chatting(redis_url):
        await ask(db, "a", request)
        await ended(db, "a")
    await db.rpop(keys.log("a"))
    await put(db, "a", envelope(request))
    await db.hset(keys.job("a"), "state", "queued")
    async with chatting(redis_url) as engine:
        said = await ended(db, "a")
    assert engine.sequences == []
    assert (words(said), said[-1]["finish_reason"]) == ("I count slowly: 1 2 3", "stop")


async def test_a_chat_goes_on_after_what_was_said_since_it_last_started_over(redis_url: str, db: Redis) -> None:
    for events, fingerprint in ((5, "fp_old"), (10, "fp_new")):
        async with chatting(redis_url, step_s=0.02, fingerprint=fingerprint):
            if events == 5:
                await ask(db, "a", {"messages": HELLO})
            await until_it_has_said(db, "a", events)
    async with chatting(redis_url, fingerprint="fp_new"):
        said = await ended(db, "a")
    assert [kind for kind in types(said) if kind != "delta"] == ["started", "restarted", "resumed", "finished"]
    assert words(said[types(said).index("restarted") :]) == ANSWER
    assert json.loads(await db.get(keys.result("a")))["choices"][0]["message"]["content"] == ANSWER


async def test_a_chat_whose_model_has_changed_starts_over(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url, step_s=0.02):
        await ask(db, "a", {"messages": HELLO})
        await until_it_has_said(db, "a", 6)
    async with chatting(redis_url, answer="Something else", fingerprint="fp_other"):
        said = await ended(db, "a")
    again = types(said).index("restarted")
    assert words(said[again:]) == "Something else"
    assert "resumed" not in types(said)


async def test_an_answer_as_long_as_allowed_that_ends_in_a_stop_string_was_stopped(redis_url: str, db: Redis) -> None:
    async with chatting(redis_url, answer="abcd"):
        await ask(db, "a", {"messages": HELLO, "max_tokens": 4, "stop": "cd"})
        said = await ended(db, "a")
    assert (words(said), said[-1]["finish_reason"]) == ("ab", "stop")


async def test_a_row_whose_words_cannot_be_made_harms_no_other(redis_url: str, db: Redis) -> None:
    """A vocabulary may have holes, and the detokenizer raises on them."""
    tokenizer, known = ByteTokenizer(), settings(redis_url)
    hole = len(tokenizer.tokens)
    tokenizer.tokens.append("a name without bytes")

    def answer(sequence: Any) -> list[int]:
        return [*b"so far", hole] if sequence.id == "a#1" else list(b"all is well")

    engine = FakeEngine(answer, step_s=0.005)
    async with engine, working(known, real_chat, context=worker_context(known, engine, tokenizer)):
        await asyncio.gather(ask(db, "a", {"messages": HELLO}), ask(db, "b", {"messages": HELLO}))
        assert (await ended(db, "a"))[-1]["error"]["type"] == "internal"
        assert words(await ended(db, "b")) == "all is well"
        assert engine.running == set()


async def test_a_cancelled_offline_job_has_delivered_every_token_it_counted(redis_url: str, db: Redis) -> None:
    """Its deltas are gathered, and the last ones must not be lost."""
    async with chatting(redis_url, step_s=0.01, answer="long " * 200) as engine:
        await ask(db, "a", {"messages": HELLO}, lane="batch")
        await until(lambda: engine.running == {"a#1"})
        await asyncio.sleep(0.2)
        await cancel(db, "a")
        said = await ended(db, "a")
    assert 0 < said[-1]["usage"]["completion_tokens"] == sum(len(event.get("token_ids", [])) for event in said)


# Rows and lanes


async def test_no_more_jobs_run_than_there_are_rows(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url, max_rows=3, reserved_rows=0) as chat:
        for k in range(20):
            await ask(db, f"job-{k}", {"say": ["a", "b"], "pace_s": 0.01}, at_ms=k)
        for k in range(20):
            await ended(db, f"job-{k}")
        assert chat.most == 3
        assert chat.began == [f"job-{k}" for k in range(20)]
    await check_all_ended(db)


async def test_reserved_rows_stay_free_for_interactive_jobs(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url, max_rows=5, reserved_rows=2) as chat:
        for k in range(10):
            await ask(db, f"file-{k}", {"then": "hang"}, lane="batch", at_ms=k)
        await running(chat, "file-0", "file-1", "file-2")
        for k in range(2):
            await ask(db, f"chat-{k}", {"then": "hang"}, at_ms=100 + k)
        await running(chat, "file-0", "file-1", "file-2", "chat-0", "chat-1")
        assert chat.most == 5


async def test_interactive_jobs_are_claimed_first_however_old_the_others_are(redis_url: str, db: Redis) -> None:
    lane: Lane
    for k, lane in enumerate(("batch", "batch", "batch", "interactive", "interactive")):
        await put(db, f"job-{k}", envelope({"say": ["a"]}), lane=lane, at_ms=k)
    async with at_work(redis_url, max_rows=1, reserved_rows=0) as chat:
        for k in range(5):
            await ended(db, f"job-{k}")
        assert chat.began == ["job-3", "job-4", "job-0", "job-1", "job-2"]


# Leaving


async def test_running_rows_may_end_in_the_grace(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, grace_s=10), chat.chat) as worker:
        await ask(db, "a", {"say": ["Hel", "lo"], "pace_s": 0.2})
        await running(chat, "a")
        worker.stop()
        await ask(db, "late", {"say": ["never"]})
        assert words(await ended(db, "a")) == "Hello"
        await until(lambda: not worker.jobs)
    assert await field(db, "a", "state") == "finished"
    # A poll that had begun before the stop may have claimed the late job; then it was requeued.
    assert await field(db, "late", "state") in (None, "queued")
    assert chat.began == ["a"]


async def test_what_is_left_after_the_grace_goes_back_as_it_was(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, grace_s=0.1), chat.chat) as worker:
        await ask(db, "a", {"say": ["so far"], "then": "hang"})
        await running(chat, "a")
        worker.stop()
        await until(lambda: not worker.jobs)
    assert types(await log(db, "a")) == ["started", "delta"]
    names = ("state", "attempt", "crashes", "worker")
    assert [await field(db, "a", name) for name in names] == ["queued", "1", "0", ""]
    assert await db.exists(lease_key("a"), keys.worker("ada")) == 0
    assert await db.zscore(keys.queue("default", "interactive"), "a") == 1
    assert await db.exists("arq:job:a") == 1


async def test_the_log_of_a_worker_that_stops_tells_how_long_it_waits_and_how_to_end_that(
    redis_url: str, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    chat = FakeChat()
    async with working(settings(redis_url, grace_s=60), chat.chat) as worker:
        await ask(db, "a", {"then": "hang"})
        await running(chat, "a")
        for _ in range(3):
            worker.stop()
        await until(lambda: not worker.jobs)
    assert [message for message in caplog.messages if message.startswith("SIGTERM")] == [
        "SIGTERM: stopping; waiting up to 60 s for 1 job; a second signal requeues them at once",
        "SIGTERM again: requeueing 1 job",
    ]


@pytest.mark.timing
async def test_a_second_signal_ends_the_grace(redis_url: str, db: Redis) -> None:
    chat, began = FakeChat(), time.monotonic()
    async with working(settings(redis_url, grace_s=60), chat.chat) as worker:
        await ask(db, "a", {"then": "hang"})
        await running(chat, "a")
        worker.stop()
        await asyncio.sleep(0.1)
        assert chat.running
        worker.stop()
        await until(lambda: not worker.jobs)
    assert time.monotonic() - began < 5
    assert await field(db, "a", "state") == "queued"


async def test_a_job_handed_back_is_finished_by_the_next_worker(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url, worker_name="ada") as chat:
        await ask(db, "a", {"say": ["Hel", "lo"], "pace_s": 0.3})
        await running(chat, "a")
    async with at_work(redis_url, worker_name="ben"):
        said = await ended(db, "a")
    assert [(event["type"], event["attempt"]) for event in said if event["type"] != "delta"] == [
        ("started", 1), ("restarted", 2), ("finished", 2),
    ]  # fmt: skip
    assert await field(db, "a", "crashes") == "0"
    await check_all_ended(db)


@pytest.mark.timing
async def test_a_job_handed_back_to_a_worker_that_waits_is_taken_at_once(redis_url: str, db: Redis) -> None:
    async with AsyncExitStack() as first:
        ada = await first.enter_async_context(at_work(redis_url, worker_name="ada"))
        await ask(db, "a", {"then": "hang"})
        await running(ada, "a")
        async with at_work(redis_url, worker_name="ben", poll_s=60, lease_s=3600) as ben:
            await listening(db, workers=2)
            await first.aclose()
            await until(lambda: ben.began == ["a"], within_s=2)


@pytest.mark.timing
async def test_an_idle_worker_leaves_at_once(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url, grace_s=60):
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert await db.exists(keys.worker("ada")) == 0


# Redis away


async def test_a_worker_waits_for_a_server_that_is_not_there_yet(redis_url: str, db: Redis) -> None:
    await put(db, "a", envelope({"say": ["Hello"]}))
    async with Line(redis_url) as line:
        line.down()
        async with at_work(line.url):
            await asyncio.sleep(0.3)
            assert await db.exists(lease_key("a")) == 0
            line.up()
            assert words(await ended(db, "a")) == "Hello"
    await check_all_ended(db)


async def test_a_worker_can_be_stopped_while_it_waits_for_the_server(redis_url: str) -> None:
    async with Line(redis_url) as line:
        line.down()
        async with at_work(line.url):
            await asyncio.sleep(0.1)


async def test_an_outage_in_the_middle_costs_time_and_nothing_else(redis_url: str, db: Redis) -> None:
    say = [str(k) for k in range(30)]
    async with Line(redis_url) as line, at_work(line.url) as chat:
        await ask(db, "a", {"say": say, "pace_s": 0.02})
        await running(chat, "a")
        await asyncio.sleep(0.1)
        line.down()
        await asyncio.sleep(0.3)
        line.up()
        said = await ended(db, "a")
        assert types(said) == ["started", *["delta"] * 30, "finished"]
        assert words(said) == "".join(say)
        await ask(db, "b", {"say": ["after"]})
        await ended(db, "b")
    await check_all_ended(db)


@pytest.mark.timing
async def test_a_worker_keeps_its_own_jobs_through_an_outage_longer_than_a_lease(redis_url: str, db: Redis) -> None:
    async with Line(redis_url) as line, at_work(line.url, lease_s=0.4) as chat:
        await ask(db, "a", {"say": ["Hel", "lo"], "pace_s": 1.2})
        await running(chat, "a")
        await asyncio.sleep(0.1)
        line.down()
        await until_lapsed(db, "a")
        line.up()
        said = await ended(db, "a")
        assert [(event["type"], event["attempt"]) for event in said] == [
            ("started", 1), ("delta", 1), ("delta", 1), ("finished", 1),
        ]  # fmt: skip
        assert chat.began == ["a"]
    await check_all_ended(db)


async def until_lapsed(db: Redis, job_id: str) -> None:
    async def lapsed() -> bool:
        return not await db.exists(lease_key(job_id))

    await until(lapsed)


@pytest.mark.timing
async def test_a_worker_that_claims_its_own_job_again_ends_it_once(redis_url: str, db: Redis) -> None:
    """A server that failed over may have forgotten the lease."""

    async def was_claimed_again() -> bool:
        await lapse(db, "a")
        await db.publish(keys.wake("default"), "")
        return await field(db, "a", "attempt") != "1"

    async with at_work(redis_url, lease_s=1) as chat:
        await ask(db, "a", {"say": ["Hel", "lo"], "pace_s": 0.6})
        await running(chat, "a")
        await until(was_claimed_again)
        said = await ended(db, "a")
        assert words([event for event in said if event["attempt"] == said[-1]["attempt"]]) == "Hello"
        await until(lambda: not chat.running)
    await check_all_ended(db)


@pytest.mark.timing
async def test_a_worker_that_goes_on_with_its_own_job_says_every_token_once(redis_url: str, db: Redis) -> None:
    """The engine may still be in a step of the attempt that lost the job: here each attempt has its own name."""
    async with chatting(redis_url, step_s=0.05, lease_s=1) as engine:
        await ask(db, "a", {"messages": HELLO})
        for _ in range(20):
            await lapse(db, "a")
            await db.publish(keys.wake("default"), "")
            await asyncio.sleep(0.05)
        assert words(await ended(db, "a")) == ANSWER
    assert len({sequence.id for sequence in engine.sequences}) == len(engine.sequences) > 1


@pytest.mark.timing
async def test_a_loop_that_was_blocked_for_longer_than_a_lease_keeps_its_job(redis_url: str, db: Redis) -> None:
    async def chat(ctx: dict[Any, Any], request: Any) -> Any:
        if request == "block":
            time.sleep(0.6)
        return await FakeChat().chat(ctx, {"say": ["done"]})

    async with working(settings(redis_url, lease_s=0.4), chat):
        await asyncio.gather(ask(db, "a", {}), ask(db, "b", "block"))
        for job_id in ("a", "b"):
            said = await ended(db, job_id)
            assert [(event["type"], event["attempt"]) for event in said] == [
                ("started", 1), ("delta", 1), ("finished", 1),
            ]  # fmt: skip


async def test_a_hand_back_waits_for_a_server_that_is_away_for_a_moment(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with Line(redis_url) as line, working(settings(line.url, grace_s=0), chat.chat) as worker:
        await ask(db, "a", {"then": "hang"})
        await running(chat, "a")
        line.down()
        worker.stop()
        await asyncio.sleep(0.5)
        line.up()
        await until(lambda: not worker.jobs)
    assert [await field(db, "a", name) for name in ("state", "crashes")] == ["queued", "0"]


async def test_a_job_whose_past_could_not_be_read_goes_back_unharmed(
    redis_url: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningJobs, "start", start_and(lambda jobs, job_id: line.down()))
    await put(db, "a", envelope({"say": ["never"]}))
    await db.rpush(keys.log("a"), json.dumps({"seq": 0, "type": "delta", "ts": time.time(), "content": "so far"}))
    before, chat = await log(db, "a"), FakeChat()
    async with Line(redis_url) as line, working(settings(line.url), chat.chat) as worker:
        await until(lambda: bool(worker.jobs))
        worker.stop()
        await asyncio.sleep(0.3)
        line.up()
        await until(lambda: not worker.jobs)
    assert (await field(db, "a", "state"), await log(db, "a"), chat.began) == ("queued", before, [])


async def test_a_job_that_another_worker_took_is_let_go(redis_url: str, db: Redis) -> None:
    async with at_work(redis_url) as chat:
        await ask(db, "a", {"say": ["one", "two"], "pace_s": 0.1})
        await running(chat, "a")
        await db.hset(keys.job("a"), "attempt", 2)
        before = await log(db, "a")
        await until(lambda: not chat.running)
        assert await log(db, "a") == before
        assert await field(db, "a", "state") == "running"


async def test_losing_a_job_is_no_ending(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat) as worker:
        await ask(db, "a", {"then": "hang"})
        await running(chat, "a")
        worker.jobs["a"].interrupt(OwnershipLost())
        await until(lambda: not worker.jobs)
        assert types(await log(db, "a")) in ([], ["started"])


# Crashes


async def crash(db: Redis, job_id: str, *, lapses: int = 0, crashes: int = 0) -> None:
    """Leave a job as a worker does that died while it ran."""
    known = {"lapses": lapses, "probation": int(lapses > 0), "crashes": crashes}
    await db.hset(keys.job(job_id), mapping={"state": "running", "attempt": 1, "worker": "ben", **known})


async def test_the_third_crash_of_a_suspect_is_its_last(redis_url: str, db: Redis) -> None:
    body = envelope({"say": ["never"]})
    await put(db, "poison", body)
    await crash(db, "poison", lapses=3, crashes=2)
    async with at_work(redis_url, lease_s=1) as chat:
        (said,) = await ended(db, "poison")
        assert chat.began == []
    assert (said["type"], said["error"]["type"], said["error"]["retryable"]) == ("failed", "internal", False)
    letter = json.loads(await db.hget(keys.DEAD, "poison"))
    assert (letter["id"], letter["lane"], letter["body"]) == ("poison", "interactive", body.decode())
    await check_job_keys(db, "poison")


@pytest.mark.parametrize("dead", ["no hash", "no letters"])
async def test_a_culprit_ends_whatever_lies_with_the_dead(redis_url: str, db: Redis, dead: str) -> None:
    if dead == "no hash":
        await db.set(keys.DEAD, "x")
    else:
        good = {f"good-{k}": json.dumps({"id": "good", "parked_at": k + 1}) for k in range(999)}
        await db.hset(keys.DEAD, mapping={**good, "bad": "no JSON"})
    await put(db, "a", envelope({"say": ["never"]}))
    await db.hset(keys.job("a"), mapping={"state": "queued", "attempt": 3, "lapses": 3, "crashes": 3})
    async with at_work(redis_url):
        await ended(db, "a")
    assert await db.hexists(keys.DEAD, "a")
    assert not await db.hexists(keys.DEAD, "bad")


async def test_suspects_run_one_at_a_time_beside_the_innocent(redis_url: str, db: Redis) -> None:
    for k in range(3):
        await put(db, f"suspect-{k}", envelope({"say": ["a", "b"], "pace_s": 0.05}), at_ms=k)
        await crash(db, f"suspect-{k}")
    await put(db, "innocent", envelope({"say": ["a", "b"], "pace_s": 1.5}), at_ms=9)
    together, beside = 0, False
    async with at_work(redis_url, lease_s=1) as chat:
        await until(lambda: bool(chat.running))
        while len(chat.began) < 4 or chat.running:
            suspects = sum(job.on_probation for job in chat.running)
            together, beside = max(together, suspects), beside or 0 < suspects < len(chat.running)
            await asyncio.sleep(0.002)
    assert [job_id for job_id in chat.began if job_id != "innocent"] == ["suspect-0", "suspect-1", "suspect-2"]
    assert (together, beside) == (1, True)
    await check_all_ended(db)
