"""Events and results: the examples of the contract's page, and the guarantees for readers."""

import json
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from schemas import ChatCompletion, CountResult, FinalEvent, JobEvent
from sluice.contract import events
from sluice.contract.events import EVENTS, FINAL, ProgressPhase, parse_event
from tests.schemas import page
from worker import outcomes

EVENT: TypeAdapter[Any] = TypeAdapter(JobEvent)
FINAL_EVENT: TypeAdapter[Any] = TypeAdapter(FinalEvent)
TYPES = list(EVENTS)
TOLD = {"role": "assistant", "index": 0}
WHOLE: dict[str, dict[str, Any]] = {
    "delta": {"content": "a", "reasoning": "b", "tool_calls": [TOLD], "logprobs": [TOLD, TOLD]},
    "finished": {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 3, "kept_tokens": 4}},
}


def validated(event: dict[str, Any]) -> Any:
    return EVENT.validate_json(json.dumps(event))


def as_json(event: events.Event) -> Any:
    """Return the event as it was in JSON, without the fields that were absent or null."""
    return json.loads(json.dumps(asdict(event)), object_hook=without_none)


def without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if each is not None}


def test_the_page_has_an_example_of_each_type_and_of_no_other() -> None:
    assert sorted(page.EVENTS) == sorted(TYPES)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("type", TYPES)
def test_an_example_reads_as_an_event_of_its_class_with_the_same_values(type: str, whole: bool) -> None:
    example = {**page.EVENTS[type], **(WHOLE.get(type, {}) if whole else {})}
    event = validated(example)
    assert parse_event(json.dumps(example)) == event
    assert isinstance(event, EVENTS[type])
    assert as_json(event) == without_none(example)


def test_the_page_s_result_reads_as_a_result_and_is_written_as_it_was() -> None:
    result = ChatCompletion.model_validate_json(json.dumps(page.RESULT))
    written = json.loads(result.model_dump_json(exclude_unset=True))
    assert written["sluice"]["timings"].pop("load_s") is None  # of a dataclass, which does not know what was set
    assert written == page.RESULT


def test_the_page_s_token_count_reads_as_one_and_is_written_as_it_was() -> None:
    counted = CountResult.model_validate_json(json.dumps(page.COUNT))
    assert json.loads(counted.model_dump_json(exclude_unset=True)) == page.COUNT


@pytest.mark.parametrize("type", TYPES)
def test_an_event_without_one_of_its_fields_is_no_event(type: str) -> None:
    example = page.EVENTS[type]
    for name in set(example) - {"content", "reasoning", "tool_calls", "logprobs", "stop_sequence"}:
        without = {key: value for key, value in example.items() if key != name}
        with pytest.raises(ValidationError):
            validated(without)
        with pytest.raises(ValueError, match="no event"):
            parse_event(json.dumps(without))


@pytest.mark.parametrize("type", TYPES)
def test_a_field_that_a_later_worker_adds_is_left_out(type: str) -> None:
    later = {**page.EVENTS[type], "mood": "good"}
    assert parse_event(json.dumps(later)) == validated(later) == validated(page.EVENTS[type])


def test_a_type_that_a_later_worker_adds_is_read_as_a_bare_event() -> None:
    said = page.EVENTS["delta"] | {"type": "paused"}
    read = parse_event(json.dumps(said))
    assert read == events.Event(type="paused", id="chat-1", seq=3, attempt=1, ts=said["ts"])
    assert not read.final


@pytest.mark.parametrize("type", TYPES)
def test_three_types_are_final(type: str) -> None:
    assert (type in FINAL) == (type in ("finished", "failed", "cancelled"))
    said = json.dumps(page.EVENTS[type])
    assert parse_event(said).final == (type in FINAL)
    if type in FINAL:
        assert FINAL_EVENT.validate_json(said).type == type
    else:
        with pytest.raises(ValidationError):
            FINAL_EVENT.validate_json(said)


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
        validated({**page.EVENTS[type], **change})


def test_a_worker_reports_the_phases_of_the_contract_except_for_the_time_before_its_prompt_begins() -> None:
    assert {*get_args(outcomes.Phase), "waiting"} == {*get_args(ProgressPhase)}
    reported = outcomes.Prefilled.phase, *get_args(get_type_hints(outcomes.PromptProgress)["phase"])
    assert sorted(reported) == sorted(get_args(outcomes.Phase))
