"""Large bodies are read, or refused, without holding up what runs beside them."""

import asyncio
import json
import marshal
import sys
import threading
import time
from typing import Any

import pytest

from worker.bounded_json import strict as child
from worker.bounded_json.reader import SMALL_BYTES, BodyReader
from worker.bounded_json.strict import MAX_BODY_VALUES, TOO_DEEP, parse_body, send_value
from worker.errors import JobFailure
from worker.process.child import ChildCrashed, ChildFailed, Children
from worker.process.frames import Frame, FrameKind, FrameLimits, LimitExceeded

MEGABYTE = 1_000_000


def lists(count: int) -> bytes:
    return b'{"metadata":{"a":[' + b",".join([b"[]"] * count) + b"]}}"


async def refusal(body: bytes) -> JobFailure:
    with pytest.raises(JobFailure) as raised:
        await BodyReader().parse(body, "interactive")
    return raised.value


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each body that a child process was given."""
    given, ask = list[int](), Children.ask

    async def watched(children: Children, task: Any, body: bytes, limits: FrameLimits) -> Frame:
        given.append(len(body))
        return await ask(children, task, body, limits)

    monkeypatch.setattr(Children, "ask", watched)
    return given


async def test_more_values_than_a_worker_reads_are_refused_by_their_number(children: list[int]) -> None:
    why = await refusal(lists(MAX_BODY_VALUES))
    assert why.type == "too_large"
    assert f"{2 * MAX_BODY_VALUES + 2:,}" in why.message
    assert f"{MAX_BODY_VALUES:,}" in why.message
    assert len(children) == 1


async def test_as_many_values_as_a_worker_reads_are_read_without_a_process(children: list[int]) -> None:
    body = lists(MAX_BODY_VALUES // 2 - 2)
    assert await BodyReader().parse(body, "interactive") == json.loads(body)
    assert children == []


@pytest.mark.parametrize(
    "text",
    [
        "a, [b] and {c}. " * MEGABYTE,
        "one line\n" * MEGABYTE,
        "a" * 5 * MEGABYTE + "\U0001f600",
        "\U0001f600" * MEGABYTE,
    ],
    ids=["commas", "escapes", "one wide character", "wide characters"],
)
async def test_a_long_string_is_read_whole_whatever_is_in_it(text: str) -> None:
    for ascii_only in (True, False):
        body = json.dumps({"a": [text, 0.5, None, 10**30]}, ensure_ascii=ascii_only).encode()
        assert await BodyReader().parse(body, "interactive") == {"a": [text, 0.5, None, 10**30]}


async def test_a_dear_body_that_is_wrong_is_refused_with_the_same_sentence() -> None:
    for end in (b"NaN]", b"9" * 5000 + b"]", b"1e999]", b"oops"):
        small, large = b'["",' + end, b'["' + b"\\n" * 1_100_000 + b'",' + end
        assert (await refusal(small)).message == (await refusal(large)).message
        assert (await refusal(large)).type == "invalid_request"


def refused(body: bytes) -> str | None:
    """The sentence by which a child process refuses a body; None if it does not."""
    try:
        send_value(None, body, lambda head, marshalled: None)
    except JobFailure as refusal:
        return refusal.message
    return None


@pytest.mark.parametrize("opened", [b"[", b'{"a":'], ids=["lists", "objects"])
def test_a_dear_body_of_any_depth_has_a_verdict(opened: bytes) -> None:
    closed = b"]" if opened == b"[" else b"}"
    verdicts = {refused(opened * depth + b"1" + closed * depth) for depth in range(800, 1000)}
    assert verdicts == {None, TOO_DEEP}


def test_what_json_reads_and_is_too_deep_to_be_searched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(3_000):
        deep = [deep]
    monkeypatch.setattr(child, "loads", lambda body: deep)  # as json reads it from Python 3.13 on
    with pytest.raises(JobFailure) as raised:
        parse_body(b"[]")
    assert (raised.value.type, raised.value.message) == ("invalid_request", TOO_DEEP)


def test_what_json_reads_and_marshal_does_not_write_is_nested_too_deeply() -> None:
    limit, depth = sys.getrecursionlimit(), 3_000
    sys.setrecursionlimit(20_000)  # from Python 3.13 on json's own
    try:
        said = refused(b'{"a":[{}],"k":' + b"[" * depth + b"]" * depth + b"}")
    finally:
        sys.setrecursionlimit(limit)
    assert said == TOO_DEEP


async def test_half_of_a_surrogate_pair_in_a_dear_body_is_refused_by_its_place(children: list[int]) -> None:
    text = b'"\\ud83d' + b"\\n" * 1_100_000 + b'"'
    why = await refusal(b'{"f":"chat","a":[{"messages":[{"role":"user","content":' + text + b"}]}]}")
    assert why.type == "invalid_request"
    assert why.message.startswith("messages[0].content holds half of a surrogate pair")
    assert len(children) == 1


DEAR = {
    "empty lists": lists(5_300_000),
    "escapes": b'["' + b"a\\n" * 5_300_000 + b'"]',
    "wide text": b'["' + b"a" * 15_900_000 + "\U0001f600".encode() + b'"]',
    "halves of surrogate pairs": b'["' + b"\\ud83d " * 2_200_000 + b'"]',
}


@pytest.mark.parametrize("name", DEAR)
async def test_sixteen_megabytes_take_the_event_loop_a_moment_at_a_time(name: str) -> None:
    reading = asyncio.ensure_future(BodyReader().parse(DEAR[name], "interactive"))
    longest_s, last = 0.0, time.thread_time()  # of this thread alone: the machine may be busy
    while not reading.done():
        await asyncio.sleep(0.001)
        longest_s, last = max(longest_s, time.thread_time() - last), time.thread_time()
    await asyncio.gather(reading, return_exceptions=True)
    assert longest_s < 0.2, "json.loads takes some of these three seconds"


async def test_a_dear_body_keeps_no_ordinary_one_and_no_other_lane_waiting(children: list[int]) -> None:
    reader = BodyReader()
    dear = [asyncio.ensure_future(reader.parse(lists(MAX_BODY_VALUES), "batch")) for _ in range(3)]
    while not children:
        await asyncio.sleep(0.01)
    for lane in ("batch", "interactive"):
        assert await reader.parse(b"[" + b" " * SMALL_BYTES + b"]", lane) == []
    ended = sum(task.done() for task in dear)
    assert len(children) <= 1 + ended, "each waits for the one before it"
    for task in dear:
        task.cancel()
    await asyncio.gather(*dear, return_exceptions=True)


async def test_large_work_leaves_the_event_loop_s_thread_and_small_work_does_not() -> None:
    reader, ours = BodyReader(), threading.current_thread()
    assert await reader.run(threading.current_thread, size=SMALL_BYTES, lane="batch") is ours
    assert await reader.run(threading.current_thread, size=SMALL_BYTES + 1, lane="batch") is not ours


@pytest.mark.parametrize(
    ("failure", "type", "retryable"),
    [
        (LimitExceeded("it took too long"), "too_large", False),
        (ChildCrashed("its stack overflowed"), "too_large", False),
        (ChildFailed("it was killed"), "overloaded", True),
        (TimeoutError(), "overloaded", True),
    ],
    ids=repr,
)
async def test_a_body_is_refused_by_the_reason_why_its_process_failed(
    failure: Exception, type: str, retryable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(*_: Any) -> Frame:
        raise failure

    monkeypatch.setattr(Children, "ask", failed)
    why = await refusal(lists(MAX_BODY_VALUES))
    assert (why.type, why.retryable) == (type, retryable)


async def test_tenants_take_turns_in_a_lanes_thread() -> None:
    reader, go, order = BodyReader(), threading.Event(), list[str]()
    size = SMALL_BYTES + 1
    works = [reader.run(go.wait, size=size, lane="interactive", tenant="greedy")]
    works += [reader.run(order.append, f"greedy {i}", size=size, lane="interactive", tenant="greedy") for i in range(5)]
    works += [reader.run(order.append, "small", size=size, lane="interactive", tenant="small")]
    running = asyncio.gather(*works)
    await asyncio.sleep(0.05)
    go.set()
    await asyncio.wait_for(running, 10)
    assert order.index("small") <= 1


async def test_a_tenants_dear_bodies_do_not_hold_up_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[int]()

    async def noted(children: Children, task: Any, body: bytes, limits: FrameLimits) -> Frame:
        order.append(len(body))
        await asyncio.sleep(0.01)
        return Frame(FrameKind.ANSWER, None, marshal.dumps(None))

    monkeypatch.setattr(Children, "ask", noted)
    reader, other = BodyReader(), lists(2 * MAX_BODY_VALUES)
    greedy = [
        asyncio.ensure_future(reader.parse(lists(MAX_BODY_VALUES + 1), "interactive", "greedy")) for _ in range(5)
    ]
    while not order:
        await asyncio.sleep(0.001)
    await reader.parse(other, "interactive", "small")
    assert order.index(len(other)) <= 2
    assert not all(task.done() for task in greedy)
    await asyncio.gather(*greedy)
