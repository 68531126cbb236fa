"""The events of a response's stream, which depend on the head and the log alone."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from sluice.contract.events import Event
from sluice.interfaces.responses.record import ResponseHead
from sluice.interfaces.responses.stream import ResponseState, from_completion
from tests.gateway.openai_required import lacking
from tests.gateway.responses.events import (
    CANCELLED,
    PROGRESS,
    TIMINGS,
    TOOLS,
    Said,
    call,
    delta,
    failed,
    finished,
    head,
    log,
    logs,
    started,
    stream_events,
)

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HEADS = st.builds(
    head,
    background=st.booleans(),
    include=st.sampled_from([[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]]),
    reasoning=st.sampled_from([None, {"summary": "auto"}]),
    tools=st.sampled_from([[], TOOLS]),
)


def events(head: ResponseHead, *said: Said) -> list[Said]:
    return list(stream_events(head, log(*said)))


def types(events: list[Said]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text_is_one_message_between_its_events() -> None:
    made = events(head(), started(), delta(content="Hel"), delta(content="lo"), finished())
    assert types(made) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert made[-1]["response"]["output"] == [made[-2]["item"]]
    assert made[-2]["item"] == {
        "id": "msg_1_0",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }


def test_the_first_event_comes_before_the_log_and_a_background_response_is_queued() -> None:
    assert types(events(head())) == ["created"]
    made = events(head(background=True))
    assert [(event["type"], event["response"]["status"]) for event in made] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
    ]


def test_reasoning_is_content_of_an_item_of_its_own_before_the_message() -> None:
    made = events(head(), started(), delta(reasoning="8+3"), delta(content="11"), finished())
    assert types(made)[2:7] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
    ]  # fmt: skip
    reasoning, message = made[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "8+3"}]
    assert (reasoning["summary"], reasoning["encrypted_content"], message["type"]) == ([], None, "message")


def test_a_summary_that_was_requested_holds_the_reasoning_instead() -> None:
    made = events(head(reasoning={"summary": "auto"}), started(), delta(reasoning="8+3"), finished())
    assert types(made)[2:8] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    (reasoning,) = made[-1]["response"]["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "8+3"}]
    assert "content" not in reasoning


def test_a_call_streams_its_arguments_and_is_done_before_the_next_one() -> None:
    calls = [call(0, "get_weather"), call(0, None, '{"city"'), call(0, None, ': "Oslo"}'), call(1, "files__read", "{}")]
    made = events(head(tools=TOOLS), started(), *calls, finished("tool_calls"))
    assert types(made)[2:9] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
    ]  # fmt: skip
    weather, read = made[-1]["response"]["output"]
    assert (weather["call_id"], weather["name"], weather["arguments"]) == ("call_0", "get_weather", '{"city": "Oslo"}')
    assert "namespace" not in weather
    assert (read["call_id"], read["name"], read["namespace"]) == ("call_1", "read", "files")


def test_a_custom_call_streams_its_input_decoded_with_whole_characters() -> None:
    pieces = ['{"inp', 'ut": "a\\', 'n\\ud83d', '\\ude00"}']  # fmt: skip
    made = events(
        head(tools=TOOLS), started(), call(0, "apply_patch"), *(call(0, None, each) for each in pieces), finished()
    )
    deltas = [event["delta"] for event in made if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a", "\n", "😀"]
    (custom,) = made[-1]["response"]["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", "a\n😀")


def test_the_arguments_of_another_form_are_a_custom_call_s_input_as_they_are() -> None:
    made = events(head(tools=TOOLS), started(), call(0, "apply_patch", '{"patch": "x"}'), finished())
    assert made[-1]["response"]["output"][0]["input"] == '{"patch": "x"}'


def test_an_answer_that_was_cut_off_is_incomplete_and_so_is_its_last_item() -> None:
    made = events(head(), started(), delta(content="Hel"), finished("length"))
    response = made[-1]["response"]
    assert (made[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_a_call_with_half_an_object_is_incomplete_whatever_follows() -> None:
    made = events(head(tools=TOOLS), started(), call(0, "get_weather", '{"ci'), delta(content="<call>"), finished())
    assert [item["status"] for item in made[-1]["response"]["output"]] == ["incomplete", "completed"]


@pytest.mark.parametrize(
    ("kind", "code"), [("internal", "server_error"), ("unsupported", "invalid_prompt"), ("deadline", "server_error")]
)
def test_a_failure_is_the_last_event_and_closes_no_item(kind: str, code: str) -> None:
    made = events(head(tools=TOOLS), started(), call(0, "get_weather", "{}"), failed(kind))
    assert types(made)[-2:] == ["function_call_arguments.delta", "failed"]
    assert made[-1]["response"]["error"] == {"code": code, "message": "It broke."}
    assert [item["status"] for item in made[-1]["response"]["output"]] == ["incomplete"]


def test_a_cancelled_response_ends_as_incomplete_with_the_status_cancelled() -> None:
    made = events(head(), started(), CANCELLED)
    assert (made[-1]["type"], made[-1]["response"]["status"]) == ("response.incomplete", "cancelled")


def test_progress_and_resumption_make_no_event() -> None:
    said = [started(), delta(content="a"), finished()]
    more = [said[0], PROGRESS, started("resumed"), *said[1:]]
    assert types(events(head(), *more)) == types(events(head(), *said))


def test_a_restart_after_text_is_an_error_and_the_items_begin_again() -> None:
    made = events(head(), started(), delta(content="old"), started("restarted"), delta(content="new"), finished())
    at = types(made).index("error")
    assert made[at]["code"] == made[at]["error"]["code"] == "restarted"
    assert made[at + 1]["output_index"] == 0
    assert [item["content"][0]["text"] for item in made[-1]["response"]["output"]] == ["new"]


def test_a_restart_before_any_text_goes_unnoticed() -> None:
    said = [started(), started("restarted"), delta(content="a"), finished()]
    assert "error" not in types(events(head(), *said))


def test_logprobs_come_with_the_text_they_belong_to() -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    asked = head(include=["message.output_text.logprobs"])
    made = events(asked, started(), delta(content="a", logprobs=(entry,)), finished())
    assert [event["logprobs"] for event in made if "logprobs" in event] == [[entry], [entry]]
    assert made[-1]["response"]["output"][0]["content"][0]["logprobs"] == [entry]


def test_reasoning_tokens_are_those_of_the_job_s_usage() -> None:
    said = [started(), delta(reasoning="a"), delta(content="b"), finished()]
    usage = events(head(), *said)[-1]["response"]["usage"]
    assert usage == {
        "input_tokens": 13,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 18,
    }


@given(HEADS, logs())
def test_every_event_is_one_of_openai_s(head: ResponseHead, log: list[Event]) -> None:
    for event in stream_events(head, log):
        STREAM_EVENT.validate_python(json.loads(json.dumps(event)))
        assert list(lacking(event)) == []


@given(HEADS, logs())
def test_numbers_count_up_from_zero_and_a_longer_log_only_adds_events(head: ResponseHead, log: list[Event]) -> None:
    whole = list(stream_events(head, log))
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    for end in range(len(log)):
        part = list(stream_events(head, log[:end]))
        assert part == whole[: len(part)]


@given(HEADS, logs())
def test_the_final_event_has_the_response_that_is_retrieved(head: ResponseHead, log: list[Event]) -> None:
    state = ResponseState(head)
    made = [*state.opening(), *(event for each in log for event in state.add(each))]
    Response.model_validate(state.response)
    assert state.ended == (log[-1].final if log else False)
    if state.ended:
        assert made[-1]["response"] == state.response


@given(HEADS, logs())
def test_items_are_added_and_done_in_order_at_the_places_they_have_in_the_output(
    head: ResponseHead, log: list[Event]
) -> None:
    added, done = list[Said](), dict[int, Said]()
    response: Said = {}
    for event in stream_events(head, log):
        match event["type"]:
            case "error":
                added, done = [], {}
            case "response.output_item.added":
                assert event["output_index"] == len(added)
                added.append(event["item"])
            case "response.output_item.done":
                done[event["output_index"]] = event["item"]
        response = event.get("response", response)
    assert all(item["id"] == added[index]["id"] for index, item in done.items())
    if response["status"] in ("completed", "incomplete"):
        assert response["output"] == [done[index] for index in range(len(added))]


def test_the_result_makes_the_same_response_as_the_log() -> None:
    said = [started(), delta(reasoning="r"), delta(content="c"), call(0, "get_weather", "{}"), finished("tool_calls")]
    *_, last = events(head(tools=TOOLS), *said)
    function = {"name": "get_weather", "arguments": "{}"}
    message = {"content": "c", "reasoning": "r", "tool_calls": [{"id": "call_0", "function": function}]}
    completion = {
        "id": "resp_1",
        "created": 1004,
        "choices": [{"message": message, "finish_reason": "tool_calls", "logprobs": None}],
        "usage": {"prompt_tokens": 13, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
        | {"completion_tokens_details": {"reasoning_tokens": 2}},
        "sluice": {"attempt": 1, "timings": {name: getattr(TIMINGS, name) for name in TIMINGS.__slots__}},
    }
    made = from_completion(head(tools=TOOLS), completion).response
    assert made == last["response"]
