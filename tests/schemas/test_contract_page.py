"""docs/contract.md lists exactly the fields, events, keys and error types of the code."""

import json
import re
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

import pytest

from schemas import ChatRequest
from sluice.contract import keys
from sluice.contract.events import EVENTS, ErrorType, JobError, Timings, Usage
from sluice.gateway.caller import limit_key, reservation_key
from sluice.gateway.idempotency import left_key, registration_key
from sluice.gateway.responses.history import final_key, record_key
from tests.schemas import page
from tests.schemas.bodies import HELLO, LOOK, chat
from worker.bounded_json.strict import loads
from worker.chat.request import read_request
from worker.errors import JobFailure


def test_the_page_s_request_table_has_exactly_the_fields_of_the_request() -> None:
    listed = [name for cells in page.rows("The request") for name in page.names(cells[0])]
    roles = ["system", "developer", "user", "assistant", "tool", "function"]
    assert sorted(listed) == sorted([*ChatRequest.model_fields, *roles])


BASE = {"id", "seq", "attempt", "type", "ts"}


def names_of(value: type) -> set[str]:
    return {field.name for field in fields(value)}


def choices(value: type) -> set[str]:
    """Return the literal values of the class's fields, except `type`."""
    literals = [field.type for field in fields(value) if field.name != "type"]
    return {word for each in literals if get_origin(each) is Literal for word in get_args(each)}


@pytest.mark.parametrize("type", EVENTS)
def test_the_page_s_event_table_has_what_each_event_carries(type: str) -> None:
    (carried,) = [cells[1] for cells in page.rows("Events") if page.names(cells[0]) == [type]]
    own = names_of(EVENTS[type]) - BASE | choices(EVENTS[type])
    if type == "failed":
        own |= names_of(JobError)
    if type in ("resumed", "restarted"):
        assert names_of(EVENTS[type]) == names_of(EVENTS["started"])
        own = {"started"}
    assert set(page.names(carried)) == own


def test_the_page_s_event_table_has_what_every_event_carries() -> None:
    listed = [page.names(cells[0])[0] for cells in page.rows("Events") if page.names(cells[0])]
    assert listed == ["id", "seq", "attempt", "type", "ts", *EVENTS]


def test_the_page_names_what_is_in_usage_and_timings() -> None:
    assert names_of(Usage) | names_of(Timings) <= set(page.names(page.section("Events")))


def test_the_page_s_error_table_has_exactly_the_error_types() -> None:
    assert [page.names(cells[0]) for cells in page.rows("Errors")] == [[], *([name] for name in get_args(ErrorType))]


def test_the_page_s_key_table_has_every_key() -> None:
    listed = {name for cells in page.rows("Keys") for name in page.names(cells[0])}
    ours = [key("<id>") for key in (keys.log, keys.channel, keys.result, keys.job, keys.cancel)]
    ours.append("sluice:cron:<folder>:<unix>")  # keys.slot
    by_model = ["sluice:queue:<model>:<lane>", "sluice:index:2:<model>:<lane>", *(f":{part}" for part in keys.INDEX)]
    by_model += [keys.wake("<model>"), keys.model("<model>"), keys.rows("<model>"), keys.worker("<name>")]
    by_model += [keys.restart("<model>"), keys.models("<supervisor>"), keys.model_commands("<supervisor>")]
    by_model += [keys.fleet("<model>"), keys.ready("<model>"), keys.prefix_mark("<model>", "<mark>")]
    by_model.append("…:<tenant>:<mark>")
    by_model += [keys.capture("<model>"), keys.captured("<model>"), keys.captured("<model>", "<id>")]
    of_runs = [keys.batch("<run>"), keys.batch_cancel("<run>")]
    of_webhooks = [keys.WEBHOOKS, f"{keys.WEBHOOKS}:wanted", ":dropped", f"{keys.WEBHOOKS}:outbox:<kind>"]
    of_webhooks += [f"{keys.WEBHOOKS}:due:<id>", ":since:<id>", ":waiting:<id>", ":dead:<id>", ":counts:<id>"]
    assert listed - {"arq:job:<id>", "arq:in-progress:<id>", "arq:abort"} == {
        *ours,
        *by_model,
        *of_runs,
        *of_webhooks,
        keys.CONTROL,
        keys.DEAD,
        keys.ALIASES,
    }


def test_the_page_has_every_key_of_the_gateway() -> None:
    listed = {name for cells in page.rows("Keys of the HTTP gateway") for name in page.names(cells[0])}
    gateway = [reservation_key, registration_key, record_key, final_key]
    assert listed == {
        "sluice:serve:models",
        limit_key("<key>"),
        left_key("<digest>"),
        *(key("<id>") for key in gateway),
    }


def test_the_page_s_names_match_as_ours_do() -> None:
    assert keys.JOB_ID in page.names(page.TEXT)
    assert keys.MODEL_NAME in page.names(page.TEXT)


def test_the_page_s_body_is_one_that_a_worker_reads() -> None:
    (body,) = re.findall(r"^SET arq:job:chat-1 (\{.*\}) PX \d+$", page.TEXT, re.M)
    envelope: dict[str, Any] = loads(body.encode())
    assert list(envelope) == ["t", "f", "a", "k", "et"]
    ChatRequest.model_validate(envelope["a"][0])


WANTED: dict[str, dict[str, Any]] = {
    "tools": {"tools": [LOOK]},
    "response_format": {"response_format": {"type": "json_object"}},
    "logprobs": {"logprobs": True},
    "specprefill": {"specprefill": True},
    "specprefill_keep_pct": {"specprefill_keep_pct": 0.5},
    "speculation": {"speculation": True},
    "prediction": {"prediction": {"type": "content", "content": "1 2 3"}},
    "on_disconnect": {"on_disconnect": "cancel"},
    "deadline_s": {"deadline_s": 5},
    "parallel_tool_calls": {"parallel_tool_calls": True},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": True}},
    "metadata": {"metadata": {}},
}


@pytest.mark.parametrize("name", WANTED)
def test_what_the_page_says_is_refused_for_now_is_what_the_worker_refuses(name: str) -> None:
    listed = {name for cells in page.rows("Refused for now") for name in page.names(cells[0])}
    assert listed <= set(WANTED)
    if name in listed:
        with pytest.raises(JobFailure) as raised:
            read_request(chat(**WANTED[name]), "default", max_parts=100)
        assert (raised.value.type, name in raised.value.message) == ("unsupported", True)
    else:
        read_request(chat(**WANTED[name]), "default", max_parts=100)


def test_the_page_s_failed_event_is_what_that_request_gets() -> None:
    with pytest.raises(JobFailure) as raised:
        read_request({"messages": HELLO, "temperature": 5}, "default", max_parts=100)
    refused = raised.value
    said = {name: getattr(refused, name) for name in names_of(JobError)}
    assert page.EVENTS["failed"]["error"] == said


def test_the_page_s_example_of_an_invalid_request_is_what_audio_gets() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}
    with pytest.raises(JobFailure) as raised:
        read_request(body, "default", max_parts=100)
    assert f"`{raised.value.message}`" in page.section("Errors")


def test_the_page_says_the_result_in_bytes_as_a_worker_writes_them() -> None:
    assert json.dumps(page.RESULT, separators=(",", ":")) in page.TEXT
