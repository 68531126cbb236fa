"""A job's events in OpenAI's form, read with OpenAI's own types."""

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.shared import ErrorObject
from pydantic import BaseModel
from redis.exceptions import NoPermissionError

from sluice import (
    Event,
    JobCancelled,
    JobError,
    JobFailed,
    NoWorker,
    QueueFull,
    ServerFull,
    ServerUnreachable,
    SluiceError,
    UnknownJob,
)
from sluice.contract.events import parse_event
from sluice.openai import BadRequest, JobRestarted, chunks, error_reply, read_body, sse, wants_usage

Said = dict[str, Any]

ATTEMPT = {"model": "m", "fingerprint": "fp_1", "worker": "w", "seed": 7}
USAGE = {"prompt_tokens": 13, "completion_tokens": 5, "cached_tokens": 8}
TIMINGS = {"queue_s": 0.0, "prefill_s": 0.1, "ttft_s": 0.1, "decode_s": 0.4, "tokens_per_s": 10.0}
STARTED: Said = {"type": "started", **ATTEMPT}
RESUMED: Said = {"type": "resumed", **ATTEMPT, "worker": "w2"}
RESTARTED: Said = {"type": "restarted", **ATTEMPT, "fingerprint": "fp_2"}
FINISHED: Said = {"type": "finished", "finish_reason": "stop", "usage": USAGE, "timings": TIMINGS}
CANCELLED: Said = {"type": "cancelled", "reason": "requested", "usage": USAGE}
FAILED: Said = {
    "type": "failed",
    "error": {"type": "internal", "message": "It broke.", "retryable": True},
    "usage": USAGE,
}
HEAD = {"id": "j", "object": "chat.completion.chunk", "created": 1000, "model": "m", "system_fingerprint": "fp_1"}
OPENAI_USAGE = {
    "prompt_tokens": 13,
    "completion_tokens": 5,
    "total_tokens": 18,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def delta(**said: Any) -> Said:
    return {"type": "delta", "token_ids": [1], **said}


class Events:
    """A job's stream, which knows whether it was closed."""

    def __init__(self, *said: Said) -> None:
        self._said, self.closed = said, False

    async def stream(self) -> AsyncGenerator[Event]:
        try:
            for seq, event in enumerate(self._said):
                yield parse_event(json.dumps({"id": "j", "seq": seq, "attempt": 1, "ts": 1000.5 + seq, **event}))
        finally:
            self.closed = True


async def read(*said: Said, include_usage: bool = False) -> list[Said]:
    return [chunk async for chunk in chunks(Events(*said).stream(), include_usage=include_usage)]


def chunk(delta: Said, *, finish_reason: str | None = None, logprobs: Said | None = None) -> Said:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**HEAD, "choices": [choice]}


# Chunks


async def test_an_answer_is_a_role_then_its_deltas_then_the_finish_reason() -> None:
    thought, text = delta(reasoning="Hm."), delta(content="1 2")
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    finished = {**FINISHED, "finish_reason": "tool_calls"}
    assert await read(STARTED, thought, text, delta(tool_calls=[call]), finished) == [
        chunk({"role": "assistant"}),
        chunk({"reasoning": "Hm."}),
        chunk({"content": "1 2"}),
        chunk({"tool_calls": [call]}),
        chunk({}, finish_reason="tool_calls"),
    ]


async def test_usage_comes_last_without_choices_and_only_if_asked_for() -> None:
    plain = await read(STARTED, delta(content="1"), FINISHED)
    with_usage = await read(STARTED, delta(content="1"), FINISHED, include_usage=True)
    *others, last = with_usage
    assert others == [{**each, "usage": None} for each in plain]
    assert last == {**HEAD, "choices": [], "usage": OPENAI_USAGE}


async def test_waiting_resuming_and_held_back_text_say_nothing() -> None:
    waiting = {"type": "progress", "phase": "prefill", "done": 1, "total": 2}
    later = {"type": "paused"}  # of a worker that knows more events than we
    said = await read(STARTED, waiting, delta(content="1"), delta(), RESUMED, later, delta(content=" 2"), FINISHED)
    assert said == await read(STARTED, delta(content="1"), delta(content=" 2"), FINISHED)


async def test_logprobs_of_held_back_text_come_with_their_token() -> None:
    entry = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}
    assert (await read(STARTED, delta(logprobs=[entry]), FINISHED))[1] == chunk(
        {}, logprobs={"content": [entry], "refusal": None}
    )


async def test_a_restart_before_the_first_text_goes_unnoticed_but_for_the_fingerprint() -> None:
    role, text, _ = await read(STARTED, delta(), RESTARTED, delta(content="1"), FINISHED)
    assert role == chunk({"role": "assistant"})
    assert text == {**chunk({"content": "1"}), "system_fingerprint": "fp_2"}


@pytest.mark.parametrize(
    ("ending", "raised"), [(RESTARTED, JobRestarted), (FAILED, JobFailed), (CANCELLED, JobCancelled)]
)
async def test_what_openai_has_no_form_for_is_raised_after_the_text_so_far(
    ending: Said, raised: type[SluiceError]
) -> None:
    events = Events(STARTED, delta(content="1"), ending)
    told = chunks(events.stream())
    assert [await anext(told) for _ in range(2)] == [chunk({"role": "assistant"}), chunk({"content": "1"})]
    with pytest.raises(raised):
        await anext(told)
    assert events.closed


async def test_chunks_that_are_closed_close_the_stream_of_the_job() -> None:
    events = Events(STARTED, delta(content="1"), FINISHED)
    told = chunks(events.stream())
    await anext(told)
    await told.aclose()
    assert events.closed


# As OpenAI's package reads them


WORDS = st.text(min_size=1, max_size=4)
ENTRIES = st.lists(
    st.fixed_dictionaries({
        "token": st.text(max_size=2),
        "logprob": st.floats(-20, 0),
        "bytes": st.lists(st.integers(0, 255), max_size=3),
        "top_logprobs": st.just([]),
    }),
    max_size=2,
)  # fmt: skip
DELTAS = st.lists(
    st.fixed_dictionaries({"content": st.none() | WORDS, "reasoning": st.none() | WORDS, "logprobs": ENTRIES}),
    max_size=6,
)
CALLS = st.lists(st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.lists(WORDS, max_size=3)), max_size=3)


def fragments(calls: list[tuple[str, list[str]]]) -> Iterator[Said]:
    """Yield the name of each call, then its arguments in pieces."""
    for index, (name, parts) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        yield {"index": index, "id": f"call_{index}", "type": "function", "function": function}
        for part in parts:
            yield {"index": index, "function": {"arguments": part}}


def calling(calls: list[tuple[str, list[str]]], a_delta: int) -> list[Said]:
    """Return deltas of several fragments, as in the batch lane."""
    told = list(fragments(calls))
    return [delta(tool_calls=told[first : first + a_delta]) for first in range(0, len(told), a_delta)]


def surprises(value: object) -> set[str]:
    """Fields that OpenAI's types do not know."""
    if isinstance(value, list):
        return {name for item in value for name in surprises(item)}
    if not isinstance(value, BaseModel):
        return set()
    known = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or ()).union(*map(surprises, known))


def joined(said: list[Said], name: str) -> str:
    return "".join(each[name] or "" for each in said)


@given(said=DELTAS, calls=CALLS, a_delta=st.integers(1, 4), include_usage=st.booleans())
async def test_openai_s_own_accumulation_makes_the_answer_whole(
    said: list[Said], calls: list[tuple[str, list[str]]], a_delta: int, include_usage: bool
) -> None:
    events = [STARTED, *(delta(**each) for each in said), *calling(calls, a_delta), FINISHED]
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for each in await read(*events, include_usage=include_usage):
        read_back = ChatCompletionChunk.model_validate(each, strict=True)
        assert surprises(read_back) <= {"reasoning"}
        state.handle_chunk(read_back)
    whole = state.get_final_completion()
    message, logprobs = whole.choices[0].message, whole.choices[0].logprobs
    assert (message.role, message.content or "") == ("assistant", joined(said, "content"))
    assert (message.model_extra or {}).get("reasoning", "") == joined(said, "reasoning")
    assert [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        (f"call_{index}", name, "".join(parts)) for index, (name, parts) in enumerate(calls)
    ]
    entries = [entry.to_dict() for entry in (logprobs and logprobs.content) or []]
    assert entries == [entry for each in said for entry in each["logprobs"]]
    assert (whole.usage and whole.usage.to_dict()) == (OPENAI_USAGE if include_usage else None)
    assert (whole.id, whole.model, whole.system_fingerprint, whole.created) == ("j", "m", "fp_1", 1000)


# As server-sent events


async def lines(*said: Said) -> list[str]:
    return [line async for line in await sse(chunks(Events(*said).stream()))]


async def test_lines_are_the_chunks_and_then_done() -> None:
    *told, done = await lines(STARTED, delta(content="é\n"), FINISHED)
    assert done == "data: [DONE]\n\n"
    assert all(line.startswith("data: ") and line.endswith("}\n\n") and "\n" not in line[:-2] for line in told)
    assert [json.loads(line[6:]) for line in told] == await read(STARTED, delta(content="é\n"), FINISHED)


async def test_a_job_that_ends_before_it_starts_is_raised_before_the_first_line() -> None:
    with pytest.raises(JobFailed, match=r"It broke\."):
        await sse(chunks(Events(FAILED).stream()))


async def test_a_failure_on_the_way_is_the_last_line_and_nothing_is_done() -> None:
    *_, last = await lines(STARTED, delta(content="1"), FAILED)
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {"message": "It broke.", "type": "server_error", "param": None, "code": "internal"}
    }


async def test_a_refusal_by_the_server_ends_the_lines_with_an_error_that_hides_its_words() -> None:
    async def refused() -> AsyncGenerator[Event]:
        async for event in Events(STARTED).stream():
            yield event
        raise NoPermissionError("user app has no permissions to run 'lrange'")

    lines = await sse(chunks(refused()))
    heard = [await anext(lines), await anext(lines)]
    error = json.loads(heard[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal")
    assert "lrange" not in error["message"]
    with pytest.raises(NoPermissionError):  # for the backend's own log
        await anext(lines)


async def test_lines_that_are_closed_close_the_stream_of_the_job() -> None:
    events = Events(STARTED, delta(content="1"), FINISHED)
    told = await sse(chunks(events.stream()))
    await anext(told)
    await told.aclose()
    assert events.closed


# Errors


def failed(type: str, *, retryable: bool) -> JobFailed:
    return JobFailed(JobError(type, "Why.", retryable))


REPLIES: list[tuple[SluiceError, int, str, str, str]] = [
    (failed("invalid_request", retryable=False), 400, "invalid_request_error", "invalid_request", "false"),
    (failed("unsupported", retryable=False), 400, "invalid_request_error", "unsupported", "false"),
    (failed("too_large", retryable=False), 400, "invalid_request_error", "context_length_exceeded", "false"),
    (failed("overloaded", retryable=True), 503, "server_error", "overloaded", "true"),
    (failed("deadline", retryable=True), 504, "server_error", "deadline", "true"),
    (failed("internal", retryable=False), 500, "server_error", "internal", "false"),
    (failed("of a later worker", retryable=True), 500, "server_error", "of a later worker", "true"),
    (JobCancelled("requested"), 499, "invalid_request_error", "cancelled", "false"),
    (UnknownJob("no trace"), 404, "invalid_request_error", "unknown_job", "false"),
    (BadRequest("no JSON"), 400, "invalid_request_error", "invalid_request", "false"),
    (NoWorker("m", ["other"]), 404, "invalid_request_error", "model_not_found", "false"),
    (NoWorker("m", []), 503, "server_error", "overloaded", "true"),
    (ServerFull("no memory"), 503, "server_error", "overloaded", "true"),
    (ServerUnreachable("no answer"), 503, "server_error", "overloaded", "true"),
    (JobRestarted("starts over"), 500, "server_error", "internal", "true"),
]


@pytest.mark.parametrize(("error", "status", "type", "code", "again"), REPLIES)
def test_an_error_has_openai_s_form_and_a_status(
    error: SluiceError, status: int, type: str, code: str, again: str
) -> None:
    reply = error_reply(error)
    wait = {"retry-after": "5"} if code == "overloaded" and not isinstance(error, ServerUnreachable) else {}
    assert reply.headers == {"x-should-retry": again, **wait}
    read_back = ErrorObject.model_validate(reply.body["error"], strict=True)
    assert (reply.status, read_back.type, read_back.code) == (status, type, code)


def test_a_body_without_a_model_is_for_the_default_one() -> None:
    assert read_body(b'{"a": 1.5}') == read_body(b'{"a": 1.5, "model": null}') == {"a": 1.5, "model": "default"}
    assert read_body(b'{"model": "tiny"}')["model"] == "tiny"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'{"messages": [}', "Expecting value at line 1 column 15: '}', after '{\"messages\": ['"),
        (b'{"a":\n 1}}', "Extra data at line 2 column 4: '}', after '{\"a\":\\n 1}'"),
        (b'["', "Unterminated string starting at line 1 column 2: '\"', after '['"),
        (b"", "Expecting value at line 1 column 1: the text ends"),
        (b"x" * 99, f"Expecting value at line 1 column 1: '{'x' * 20}'"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_a_body_that_is_not_json_is_told_where_and_what_stands_there(raw: bytes, problem: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_body(raw)
    assert str(refused.value) == f"The body is not JSON: {problem}."


@pytest.mark.parametrize(
    ("options", "wanted"), [({"include_usage": True}, True), ({}, False), (None, False), ([], False)]
)
def test_usage_is_wanted_only_by_options_that_ask_for_it(options: Any, wanted: bool) -> None:
    assert wants_usage({"stream_options": options}) is wanted


def test_a_failed_job_says_its_own_sentence() -> None:
    assert error_reply(failed("too_large", retryable=False)).body["error"]["message"] == "Why."


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (JobCancelled("requested"), "The job was cancelled, as requested."),
        (JobCancelled("disconnected"), "The job was cancelled, since its client has left."),
        (JobCancelled("shutdown"), "The job was cancelled, for this reason: shutdown."),
        (NoWorker("m", ["other"]), "No worker serves 'm'; there are workers for other."),
        (NoWorker("defualt", ["default"]), "No worker serves 'defualt'; did you mean 'default'?"),
    ],
)
def test_other_errors_are_told_in_whole_sentences(error: SluiceError, message: str) -> None:
    assert error_reply(error).body["error"]["message"] == message


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (2.1, "3")])
def test_a_full_queue_says_when_to_come_back(wait_s: float, header: str) -> None:
    reply = error_reply(QueueFull(5, 5, wait_s))
    assert (reply.status, reply.headers) == (503, {"x-should-retry": "true", "retry-after": header})
