"""`sluice.wire`, which a backend imports, agrees with `schemas`, which a worker imports."""

import json
from dataclasses import asdict, fields
from importlib.resources import files
from inspect import getmembers, isfunction
from typing import Any, get_args

import pytest
from arq.constants import job_key_prefix
from pydantic import BaseModel, TypeAdapter

from schemas import Event, keys
from schemas import events as theirs
from sluice import wire
from tests.schemas import page
from worker.queue.scripts import JOB_LIFE_MS
from worker.settings import Settings

EVENT: TypeAdapter[Any] = TypeAdapter(Event)
MODELS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(Event)[0])
}
KEYS = {
    "queue": "queue_key", "log": "log_key", "channel": "channel", "result": "result_key", "job": "job_key",
    "cancel": "cancel_key", "wake": "wake_channel", "model": "model_key",
    "batch": "batch_key", "batch_channel": "batch_channel", "batch_cancel": "batch_cancel_key",
}  # fmt: skip
FOR_WORKERS_ALONE = {"worker", "slot", "index", "rows"}
TOLD = {"role": "assistant", "index": 0}
WHOLE: dict[str, dict[str, Any]] = {
    "delta": {"content": "a", "reasoning": "b", "tool_calls": [TOLD], "logprobs": [TOLD, TOLD]},
    "finished": {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 3, "kept_tokens": 4}},
}


def made(type: str, **change: Any) -> Any:
    return EVENT.validate_python({**page.EVENTS[type], **change})


def as_lists(value: Any) -> Any:
    """Convert the tuples of a frozen dataclass to JSON lists."""
    return json.loads(json.dumps(value))


def without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: without_none(v) if isinstance(v, dict) else v for key, v in value.items() if v is not None}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_named_the_same_on_both_sides(name: str) -> None:
    args = ("m-1", "batch") if name == "queue" else ("m-1",)
    assert getattr(wire, KEYS[name])(*args) == getattr(keys, name)(*args)


@pytest.mark.parametrize("script", ["lib", "index", "ending", "cancel"])
def test_a_script_of_both_sides_is_the_same(script: str) -> None:
    producers, workers = (files(package) / "lua" / f"{script}.lua" for package in ("sluice", "worker.queue"))
    assert producers.read_text() == workers.read_text()


def test_what_a_client_keeps_of_a_job_that_it_ends_is_what_workers_keep_by_default() -> None:
    defaults = Settings(_env_file=None, model="none")  # type: ignore[call-arg]
    assert (defaults.log_ttl_s, defaults.result_ttl_s) == (wire.LOG_TTL_S, wire.RESULT_TTL_S)
    assert wire.JOB_LIFE_S * 1000 == JOB_LIFE_MS


def test_no_key_is_known_to_one_side_only() -> None:
    def named(module: Any) -> set[str]:
        public = {name for name, value in getmembers(module, isfunction) if value.__module__ == module.__name__}
        return {name for name in public if not name.startswith(("_", "is_", "check_", "parse_"))}

    assert named(keys) == KEYS.keys() | FOR_WORKERS_ALONE | {"queue_problem"}
    assert named(wire) == {*KEYS.values(), "body_key", "queue_problem"}


@pytest.mark.parametrize(
    "name",
    [
        "LANES",
        "MODEL_NAME",
        "JOB_ID",
        "CONTROL",
        "DEAD",
        "WORKERS",
        "BATCHES",
        "CANCEL_S",
        "Lane",
        "TENANT_CHARACTERS",
        "CACHE_KEY_CHARACTERS",
    ],
)
def test_a_constant_is_the_same_on_both_sides(name: str) -> None:
    assert getattr(wire, name) == getattr(keys, name)


def test_the_body_is_where_arq_looks_for_it() -> None:
    assert wire.body_key("a") == job_key_prefix + "a"


@pytest.mark.parametrize("text", ["a", "", "a\n", "-a", ".", "a" * 64, "a" * 65, "a" * 128, "a" * 129, "a:b", "ä"])
def test_both_sides_take_the_same_names(text: str) -> None:
    def takes(check: Any) -> bool:
        try:
            check(text)
        except ValueError:
            return False
        return True

    assert takes(wire.check_job_id) == keys.is_job_id(text)
    assert takes(wire.check_model_name) == keys.is_model_name(text)


def test_both_sides_know_the_same_types_of_event() -> None:
    assert {type: kind.__name__ for type, kind in wire.EVENTS.items()} == {
        type: kind.__name__ for type, kind in MODELS.items()
    }


def field_names(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


@pytest.mark.parametrize("type", MODELS)
def test_an_event_has_the_same_fields_on_both_sides(type: str) -> None:
    assert {field.name for field in fields(wire.EVENTS[type])} == field_names(MODELS[type])


@pytest.mark.parametrize("name", ["Usage", "Timings", "JobError"])
def test_a_part_of_an_event_has_the_same_fields_on_both_sides(name: str) -> None:
    assert {field.name for field in fields(getattr(wire, name))} == field_names(getattr(theirs, name))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("type", MODELS)
def test_an_event_that_schemas_wrote_is_read_with_the_same_values(type: str, whole: bool) -> None:
    event = made(type, **(WHOLE.get(type, {}) if whole else {}))
    read = wire.parse_event(event.model_dump_json(exclude_none=True))
    assert type_of(read) is wire.EVENTS[type]
    assert without_none(as_lists(asdict(read))) == event.model_dump(exclude_none=True)
    assert read.final == (type in theirs.FINAL)


def type_of(event: wire.Event) -> type[wire.Event]:
    return event.__class__


@pytest.mark.parametrize("type", MODELS)
def test_the_client_skips_a_field_that_it_does_not_know(type: str) -> None:
    assert wire.parse_event(made(type, mood="good").model_dump_json()) == wire.parse_event(made(type).model_dump_json())


def test_the_client_reads_a_type_that_it_does_not_know_as_a_bare_event() -> None:
    said = page.EVENTS["delta"] | {"type": "paused"}
    read = wire.parse_event(json.dumps(said))
    assert read == wire.Event(type="paused", id="chat-1", seq=3, attempt=1, ts=said["ts"])
    assert not read.final
