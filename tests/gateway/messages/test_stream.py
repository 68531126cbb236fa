"""A job's events become Anthropic's, which its SDK reads, and whose fold is the whole message."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event  # private: how the SDK folds a stream
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sluice import JobCancelled, JobFailed
from sluice.contract.events import Event, parse_event
from sluice.interfaces.messages.stream import PING, UNCHANGED, MessageEvent, MessageStream, whole_message
from sluice.openai import JobRestarted

SDK_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "cached_tokens": 4}
TIMINGS = {"queue_s": 0.0, "prefill_s": 0.0, "ttft_s": 0.0, "decode_s": 0.0, "tokens_per_s": 0.0}
STARTED = {"type": "started", "model": "m", "fingerprint": "f", "worker": "w", "seed": 1}


def delta(**said: Any) -> dict[str, Any]:
    return {"type": "delta", "token_ids": [1], **said}


def call(index: int, arguments: str, *, name: str = "") -> dict[str, Any]:
    head = {"id": f"call_{index}", "type": "function"} if name else {}
    named = {"name": name} if name else {}
    return {"index": index, **head, "function": {**named, "arguments": arguments}}


def finished(reason: str = "stop", stop_sequence: str | None = None) -> dict[str, Any]:
    return {
        "type": "finished", "finish_reason": reason, "stop_sequence": stop_sequence, "usage": USAGE, "timings": TIMINGS,
    }  # fmt: skip


def job(*events: dict[str, Any]) -> list[Event]:
    common = {"id": "msg_1", "attempt": 1, "ts": 1.0}
    return [parse_event(json.dumps({**common, "seq": seq, **event})) for seq, event in enumerate(events)]


def streamed(*events: dict[str, Any], **how: Any) -> list[MessageEvent]:
    stream = MessageStream(**how)
    return [each for event in job(*events) for each in stream.events(event)]


def by_sdk(events: Sequence[MessageEvent]) -> dict[str, Any]:
    """Return the message that the SDK makes of the stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(
            event=SDK_EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
        )
    message: dict[str, Any] = snapshot.to_dict()
    return message


def content(events: Sequence[MessageEvent]) -> list[dict[str, Any]]:
    """Return the blocks without their signatures, and without what no model writes."""
    blocks = whole_message(events)["content"]
    unwritten = ("signature", "citations", "caller")
    return [{name: value for name, value in block.items() if name not in unwritten} for block in blocks]


TEXT = st.text(max_size=5)
VALUES = st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=4) | st.integers() | st.none(), max_size=2)


@st.composite
def deltas(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Deltas of reasoning, content and calls in any order, each call cut into pieces; some are no JSON."""
    said = list[dict[str, Any]]()
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "both", "call"]), max_size=6)):
        if kind == "both":
            said.append(delta(content=draw(TEXT), reasoning=draw(TEXT)))
        elif kind != "call":
            said.append(delta(**{kind: draw(TEXT)}))
        else:
            written = draw(VALUES.map(json.dumps) | st.sampled_from(["", "{", '{"a": "b', "no JSON", "[1]", '{"a" 1}']))
            at = draw(st.integers(0, len(written)))
            said.append(delta(tool_calls=[call(calls, written[:at], name="f")]))
            said.append(delta(tool_calls=[call(calls, written[at:])]))
            calls += 1
    return said


ENDINGS = st.sampled_from([finished(), finished("length"), finished("tool_calls"), finished("stop", "END")])


@given(deltas(), ENDINGS, st.booleans())
def test_the_whole_message_is_what_the_sdk_makes_of_the_stream(
    said: list[dict[str, Any]], ending: dict[str, Any], omit_thinking: bool
) -> None:
    events = streamed(STARTED, *said, ending, omit_thinking=omit_thinking)
    whole = whole_message(events)
    Message.model_validate(whole)
    assert by_sdk(events) == whole


@given(deltas(), ENDINGS)
def test_blocks_are_opened_and_closed_one_after_the_other(said: list[dict[str, Any]], ending: dict[str, Any]) -> None:
    events = streamed(STARTED, *said, ending)
    assert (events[0]["type"], events[-2]["type"], events[-1]) == (
        "message_start", "message_delta", {"type": "message_stop"},
    )  # fmt: skip
    steps = [(event["type"], event["index"]) for event in events if "index" in event]
    opened = [index for kind, index in steps if kind == "content_block_start"]
    assert opened == list(range(len(opened)))
    for index in opened:
        of_block = [kind for kind, each in steps if each == index]
        assert (of_block[0], of_block[-1]) == ("content_block_start", "content_block_stop")
        assert set(of_block[1:-1]) <= {"content_block_delta"}
    assert [index for _, index in steps] == sorted(index for _, index in steps)


@given(deltas(), ENDINGS)
def test_no_text_is_lost(said: list[dict[str, Any]], ending: dict[str, Any]) -> None:
    blocks = content(streamed(STARTED, *said, ending))
    for kind, field in (("text", "content"), ("thinking", "reasoning")):
        assert "".join(block.get(kind, "") for block in blocks) == "".join(each.get(field, "") for each in said)


def test_thinking_ends_with_a_signature_before_the_text() -> None:
    events = streamed(STARTED, delta(reasoning="Hm"), delta(reasoning="."), delta(content="Oslo"), finished())
    kinds = [event.get("delta", {}).get("type", event["type"]) for event in events]
    assert kinds == [
        "message_start",
        "content_block_start", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    thinking, text = whole_message(events)["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm.", "Oslo")
    assert thinking["signature"]


def test_omitted_thinking_leaves_an_empty_block() -> None:
    said = (STARTED, delta(reasoning="Hm."), delta(content="Oslo"), finished())
    assert [block.get("thinking", block.get("text")) for block in content(streamed(*said, omit_thinking=True))] == [
        "", "Oslo",
    ]  # fmt: skip


def test_a_call_is_emitted_when_the_next_one_begins_or_the_answer_ends() -> None:
    first = [delta(tool_calls=[call(0, '{"city"', name="f")]), delta(tool_calls=[call(0, ': "Oslo"}')])]
    begun = delta(tool_calls=[call(1, "{}", name="g")])
    stream = MessageStream()
    emitted = [stream.events(event) for event in job(STARTED, *first, begun, finished("tool_calls"))]
    assert [len(events) for events in emitted] == [1, 0, 0, 3, 5]
    whole = whole_message([each for events in emitted for each in events])
    assert whole["stop_reason"] == "tool_use"
    assert [(block["id"], block["name"], block["input"]) for block in whole["content"]] == [
        ("call_0", "f", {"city": "Oslo"}),
        ("call_1", "g", {}),
    ]


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
@pytest.mark.parametrize("written", ["{no", "[1]", "no JSON"])
def test_a_call_whose_arguments_are_no_object_is_a_call_with_what_was_written(reason: str, written: str) -> None:
    """Claude Code tells the model then what its tool expects."""
    said = [delta(tool_calls=[call(0, written, name="f")]), delta(tool_calls=[call(1, "{}", name="g")])]
    first, second = content(streamed(STARTED, *said, finished(reason)))
    assert (first["name"], first["input"]) == ("f", {"arguments": written})
    assert (second["name"], second["input"]) == ("g", {})


def test_a_call_that_the_limit_cut_off_has_the_input_so_far() -> None:
    said = delta(tool_calls=[call(0, '{"city": "Oslo", "day": "Mon', name="f")])
    whole = whole_message(streamed(STARTED, said, finished("length")))
    assert (whole["stop_reason"], whole["content"][0]["input"]) == ("max_tokens", {"city": "Oslo"})


@pytest.mark.parametrize(
    ("ending", "stop_reason", "stop_sequence"),
    [
        (finished(), "end_turn", None),
        (finished("length"), "max_tokens", None),
        (finished("stop", "END"), "stop_sequence", "END"),
        (finished("tool_calls", "END"), "tool_use", None),
    ],
)
def test_the_stop_reason_is_anthropic_s(ending: dict[str, Any], stop_reason: str, stop_sequence: str | None) -> None:
    whole = whole_message(streamed(STARTED, ending))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, stop_sequence)


def test_cached_tokens_are_apart_from_the_others() -> None:
    usage = whole_message(streamed(STARTED, finished()))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 4, 3)


def test_a_message_has_the_job_s_id_and_the_served_model() -> None:
    whole = whole_message(streamed(STARTED, finished()))
    assert (whole["id"], whole["model"], whole["role"], whole["content"]) == ("msg_1", "m", "assistant", [])


def test_a_resumed_answer_continues_its_blocks() -> None:
    resumed = {**STARTED, "type": "resumed", "attempt": 2}
    events = streamed(STARTED, delta(content="One "), resumed, delta(content="two"), finished())
    assert content(events) == [{"type": "text", "text": "One two"}]


def test_an_answer_that_starts_over_is_broken_off_only_if_blocks_were_emitted() -> None:
    restarted = {**STARTED, "type": "restarted"}
    announced = delta(tool_calls=[call(0, "{", name="f")])
    events = streamed(STARTED, announced, restarted, delta(content="One"), finished())
    assert content(events) == [{"type": "text", "text": "One"}]
    with pytest.raises(JobRestarted):
        streamed(STARTED, delta(content="One"), restarted)


# What Anthropic's description of November 2026 requires, `null` included. The SDK's types do not.
REQUIRED = {
    "message": "id type role content model stop_reason stop_sequence stop_details usage container",
    "usage": "cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo input_tokens "
    "output_tokens output_tokens_details server_tool_use service_tier",
    "text": "citations text type",
    "thinking": "signature thinking type",
    "tool_use": "caller id input name type",
    "delta": "container stop_details stop_reason stop_sequence",
}


def test_every_object_has_the_fields_that_anthropic_s_has() -> None:
    events = streamed(
        STARTED, delta(reasoning="Hm"), delta(content="a"), delta(tool_calls=[call(0, "{}", name="f")]), finished()
    )
    whole = whole_message(events)
    (last,) = (event for event in events if event["type"] == "message_delta")
    objects = [
        ("message", whole),
        ("usage", whole["usage"]),
        ("message", events[0]["message"]),
        ("delta", last["delta"]),
    ]
    for kind, found in [*objects, *((block["type"], block) for block in whole["content"])]:
        assert found.keys() >= set(REQUIRED[kind].split()), kind


def test_failures_and_cancellations_are_raised() -> None:
    error = {"type": "internal", "message": "It failed.", "retryable": True}
    with pytest.raises(JobFailed) as failed:
        streamed({"type": "failed", "error": error, "usage": USAGE})
    assert failed.value.error.type == "internal"
    with pytest.raises(JobCancelled):
        streamed(STARTED, {"type": "cancelled", "reason": "requested", "usage": USAGE})


@pytest.mark.parametrize("between_blocks", [PING, UNCHANGED])
def test_signs_of_life_after_every_event_change_nothing(between_blocks: MessageEvent) -> None:
    said = [
        STARTED,
        delta(reasoning="Hm"),
        delta(content="a"),
        delta(tool_calls=[call(0, "", name="f")]),
        delta(tool_calls=[call(0, '{"x": 1}')]),
        finished("tool_calls"),
    ]
    events = [
        parse_event(json.dumps({"id": "j", "seq": k, "attempt": 1, "ts": 1.0, **each})) for k, each in enumerate(said)
    ]
    quiet, silent = MessageStream(), MessageStream()
    kept = [silent.keep_alive("j", "m", between_blocks=between_blocks)]
    for event in events:
        kept += silent.events(event)
        if event is not events[-1]:
            kept.append(silent.keep_alive("j", "m", between_blocks=between_blocks))
    plain = [made for event in events for made in quiet.events(event)]
    assert len(kept) == len(plain) + len(events) - 1
    snapshot = by_sdk([each for each in kept if each["type"] != "ping"])  # which the client drops before
    expected = whole_message(plain)
    assert [block["type"] for block in snapshot["content"]] == ["thinking", "text", "tool_use"]
    assert [block["type"] for block in expected["content"]] == ["thinking", "text", "tool_use"]
    assert whole_message(kept) == expected
    assert (snapshot["stop_reason"], snapshot["usage"]["output_tokens"]) == ("tool_use", 3)
