"""docs/contract.schema.json accepts the same bodies as the worker's models."""

import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

import schemas
from schemas import __main__ as command
from schemas import generate
from tests.schemas import page
from tests.schemas.bodies import ACCEPTED, DOCS, REFUSED, chat
from tests.schemas.strategies import ANYTHING, NAMES, mutated
from tests.selection import examples

CONTRACT = json.loads((DOCS / "contract.schema.json").read_text())

# What a schema cannot say.
BEYOND_A_SCHEMA = {"disagreement", "value_error", "string_unicode"}
# Names and numbers that no JSON holds, or no reader of schemas; and a limit that a schema reaches otherwise.
NO_JSON = {"half an emoji in a name", "infinitely hot", "no number", "hot beyond any float", "a huge seed"}
ODD = NO_JSON | {"too many fields"}


def _pattern(_: object, pattern: str, text: object, __: object) -> Any:
    """Match a pattern as ECMAScript does: `$` matches at the end only, not before a final line break."""
    if isinstance(text, str) and not re.search(pattern.replace("$", r"\Z"), text):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern}")


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Reader = jsonschema.validators.extend(
    Draft202012Validator,
    {"pattern": _pattern},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


ADAPTERS = dict[int, TypeAdapter[Any]]()  # by the id of the model: making one takes longer than many bodies


def adapter_of(kind: Any) -> TypeAdapter[Any]:
    if id(kind) not in ADAPTERS:
        ADAPTERS[id(kind)] = TypeAdapter(kind)
    return ADAPTERS[id(kind)]


def reads(part: str, body: Any) -> bool:
    return bool(Reader({"$ref": f"#/$defs/{part}", "$defs": CONTRACT["$defs"]}).is_valid(body))


def should_read(kind: Any, body: Any) -> bool:
    """Return True if the model accepts a body, or refuses it for reasons that a schema cannot express."""
    try:
        if kind is schemas.ChatRequest:
            adapter_of(kind).validate_python(body)  # as a worker does
        else:
            adapter_of(kind).validate_json(json.dumps(body))
    except ValidationError as error:
        return {each["type"] for each in error.errors()} <= BEYOND_A_SCHEMA
    return True


def test_the_file_is_up_to_date() -> None:
    assert (DOCS / "contract.schema.json").read_text() == generate.contract_text(), "run python -m schemas"


def test_the_file_is_a_schema_of_its_dialect() -> None:
    assert CONTRACT["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(CONTRACT)


def test_the_file_has_the_parts_and_the_version_of_the_contract() -> None:
    parts = "Request EmbeddingRequest Event Result CountResult EmbeddingResult BatchLine BatchOutput Batch".split()
    assert {*parts} <= CONTRACT["$defs"].keys()
    assert CONTRACT["x-contract-version"] == 1
    assert CONTRACT["title"].endswith("version 1")


def test_every_reference_in_the_file_leads_somewhere_else() -> None:
    for found in re.findall(r'"#/\$defs/(\w+)"', json.dumps(CONTRACT)):
        assert found in CONTRACT["$defs"]
        assert CONTRACT["$defs"][found] != {"$ref": f"#/$defs/{found}"}


def test_every_field_of_the_models_is_in_the_file_by_the_name_it_has_on_the_wire() -> None:
    schema = CONTRACT["$defs"]["JsonSchema"]["properties"]
    assert "schema" in schema
    assert "json_schema" not in schema
    assert CONTRACT["$defs"]["ChatRequest"]["properties"].keys() == schemas.ChatRequest.model_fields.keys()


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_schema_takes_a_good_request(name: str) -> None:
    assert reads("Request", ACCEPTED[name])


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - ODD))
def test_the_schema_refuses_a_bad_request_for_whatever_it_can_know(name: str) -> None:
    body, _ = REFUSED[name]
    assert reads("Request", body) == should_read(schemas.ChatRequest, body)


@settings(max_examples=examples(300), deadline=None)
@given(ANYTHING | mutated() | mutated(names=NAMES))
def test_the_schema_and_the_model_agree_on_any_request(body: Any) -> None:
    assert reads("Request", body) == should_read(schemas.ChatRequest, body)


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat()}
OUTPUT = {
    "id": "batch_req_1", "custom_id": "a", "error": None,
    "response": {"status_code": 200, "request_id": "a", "body": page.RESULT},
}  # fmt: skip
BATCH = {
    "id": "batch_1", "object": "batch", "endpoint": "/v1/chat/completions", "input_file_id": "in.jsonl",
    "completion_window": "24h", "status": "in_progress", "created_at": 1,
    "request_counts": {"total": 2, "completed": 1, "failed": 0}, "model": "default",
    "errors": {"object": "list", "data": [{"code": "invalid_url", "message": "no", "line": 3, "param": "url"}]},
    "usage": {
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15,
    },
    "sluice": {"host": "mac-1", "seconds": 1.5, "models": {"default": 2}, "retried": 0, "failures": {"internal": 1}},
}  # fmt: skip
PARTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "started": (schemas.JobEvent, "Event", page.EVENTS["started"]),
    "progress": (schemas.JobEvent, "Event", page.EVENTS["progress"]),
    "delta": (schemas.JobEvent, "Event", page.EVENTS["delta"]),
    "resumed": (schemas.JobEvent, "Event", page.EVENTS["resumed"]),
    "restarted": (schemas.JobEvent, "Event", page.EVENTS["restarted"]),
    "finished": (schemas.JobEvent, "Event", page.EVENTS["finished"]),
    "failed": (schemas.JobEvent, "Event", page.EVENTS["failed"]),
    "cancelled": (schemas.JobEvent, "Event", page.EVENTS["cancelled"]),
    "result": (schemas.ChatCompletion, "Result", page.RESULT),
    "count": (schemas.CountResult, "CountResult", page.COUNT),
    "embeddings": (schemas.EmbeddingResult, "EmbeddingResult", page.EMBEDDINGS),
    "line": (schemas.BatchLine, "BatchLine", LINE),
    "output": (schemas.BatchOutput, "BatchOutput", OUTPUT),
    "batch": (schemas.Batch, "Batch", BATCH),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_schema_takes_the_example_of_each_part(name: str) -> None:
    _, part, example = PARTS[name]
    assert reads(part, example)


@pytest.mark.parametrize("name", PARTS)
def test_the_schema_and_the_model_agree_where_one_field_of_an_example_is_another(name: str) -> None:
    kind, part, example = PARTS[name]
    for field, value in product(example, [None, "x", -1, 0.5, True, [], {}, ["x"], {"a": 1}]):
        body = {**example, field: value}
        assert reads(part, body) == should_read(kind, body), (field, value)


@pytest.mark.parametrize("name", PARTS)
def test_the_schema_and_the_model_agree_where_a_field_of_an_example_is_absent(name: str) -> None:
    kind, part, example = PARTS[name]
    for field in example:
        body = {key: value for key, value in example.items() if key != field}
        assert reads(part, body) == should_read(kind, body), field


def test_what_the_models_write_is_what_the_schema_reads() -> None:
    for kind, part, example in PARTS.values():
        adapter = adapter_of(kind)
        written = adapter.validate_json(json.dumps(example))
        assert reads(part, json.loads(adapter.dump_json(written))), part


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = tmp_path / "docs" / "contract.schema.json"
    monkeypatch.setattr(command, "FILE", file)
    return file


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["schemas", *args])
    return command.main()


def test_the_check_fails_until_the_command_has_written_the_file(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert run(monkeypatch, "--check") == 1
    assert run(monkeypatch) == 0
    assert file.read_text() == generate.contract_text()
    assert run(monkeypatch, "--check") == 0
    file.write_text("{}")
    assert run(monkeypatch, "--check") == 1
    assert file.read_text() == "{}", "a check writes nothing"
