"""Events and results: the examples of the contract's page, and the guarantees for readers."""

import json
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from schemas import ChatCompletion, CountResult, Event, FinalEvent
from schemas.events import FINAL, ErrorType, ProgressPhase
from tests.schemas import page
from worker import errors, outcomes

EVENT: TypeAdapter[Any] = TypeAdapter(Event)
FINAL_EVENT: TypeAdapter[Any] = TypeAdapter(FinalEvent)
TYPES = [get_args(kind.model_fields["type"].annotation)[0] for kind in get_args(get_args(Event)[0])]


def test_the_page_has_an_example_of_each_type_and_of_no_other() -> None:
    assert sorted(page.EVENTS) == sorted(TYPES)


@pytest.mark.parametrize("type", TYPES)
def test_an_example_reads_as_an_event_and_is_written_as_it_was(type: str) -> None:
    example = page.EVENTS[type]
    event = EVENT.validate_json(json.dumps(example))
    assert event.type == type
    assert json.loads(event.model_dump_json(exclude_unset=True)) == example


def test_the_page_s_result_reads_as_a_result_and_is_written_as_it_was() -> None:
    result = ChatCompletion.model_validate_json(json.dumps(page.RESULT))
    assert json.loads(result.model_dump_json(exclude_unset=True)) == page.RESULT


def test_the_page_s_token_count_reads_as_one_and_is_written_as_it_was() -> None:
    counted = CountResult.model_validate_json(json.dumps(page.COUNT))
    assert json.loads(counted.model_dump_json(exclude_unset=True)) == page.COUNT


@pytest.mark.parametrize("type", TYPES)
def test_an_event_without_one_of_its_fields_is_no_event(type: str) -> None:
    example = page.EVENTS[type]
    for name in set(example) - {"content", "reasoning", "tool_calls", "logprobs", "stop_sequence"}:
        without = {key: value for key, value in example.items() if key != name}
        with pytest.raises(ValidationError):
            EVENT.validate_python(without)


@pytest.mark.parametrize("type", TYPES)
def test_a_field_that_a_later_worker_adds_is_kept(type: str) -> None:
    event = EVENT.validate_python({**page.EVENTS[type], "mood": "good"})
    assert event.model_dump()["mood"] == "good"


@pytest.mark.parametrize("type", TYPES)
def test_three_types_are_final(type: str) -> None:
    assert (type in FINAL) == (type in ("finished", "failed", "cancelled"))
    if type in FINAL:
        assert FINAL_EVENT.validate_python(page.EVENTS[type]).type == type
    else:
        with pytest.raises(ValidationError):
            FINAL_EVENT.validate_python(page.EVENTS[type])


@pytest.mark.parametrize(
    ("type", "change"),
    [
        ("delta", {"seq": -1}),
        ("delta", {"seq": "3"}),
        ("delta", {"attempt": 0}),
        ("delta", {"token_ids": ["27"]}),
        ("delta", {"token_ids": None}),
        ("delta", {"content": 5}),
        ("delta", {"type": "chunk"}),
        ("delta", {"ts": float("nan")}),
        ("progress", {"phase": "thinking"}),
        ("progress", {"done": 0.5}),
        ("finished", {"finish_reason": "content_filter"}),
        ("finished", {"usage": {"prompt_tokens": 1}}),
        ("failed", {"error": {"type": "oops", "message": "x", "retryable": False}}),
        ("failed", {"error": {"type": "internal", "message": "x", "retryable": 1}}),
        ("cancelled", {"reason": None}),
    ],
)
def test_an_event_that_breaks_the_contract_is_seen(type: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EVENT.validate_python({**page.EVENTS[type], **change})


def test_a_worker_reports_the_phases_of_the_contract_except_for_the_time_before_its_prompt_begins() -> None:
    assert {*get_args(outcomes.Phase), "waiting"} == {*get_args(ProgressPhase)}
    reported = [kind.phase for kind in get_args(outcomes.Outcome) if hasattr(kind, "phase")]
    assert sorted(reported) == sorted(get_args(outcomes.Phase))


def test_a_worker_refuses_with_exactly_the_types_of_the_contract() -> None:
    assert get_args(errors.ErrorType) == get_args(ErrorType)
