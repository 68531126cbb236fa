"""Generates the contract's JSON Schema, for producers in any language."""

import json
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

import schemas

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ABOUT = (
    "Refer to one of $defs: Request and EmbeddingRequest are the input, Event, Result, CountResult and EmbeddingResult "
    "the output of a job; BatchLine, BatchOutput and Batch belong to offline batches. Whole numbers are written "
    "without a fraction: 5, not 5.0. See also contract.md."
)
Mode = Literal["validation", "serialization"]
_PARTS: dict[str, tuple[Any, Mode]] = {
    "Request": (schemas.ChatRequest, "validation"),
    "EmbeddingRequest": (schemas.EmbeddingRequest, "validation"),
    "Event": (schemas.JobEvent, "serialization"),
    "Result": (schemas.ChatCompletion, "serialization"),
    "CountResult": (schemas.CountResult, "serialization"),
    "EmbeddingResult": (schemas.EmbeddingResult, "serialization"),
    "BatchLine": (schemas.BatchLine, "validation"),
    "BatchOutput": (schemas.BatchOutput, "serialization"),
    "Batch": (schemas.Batch, "serialization"),
}


class NamedByClass(GenerateJsonSchema):
    """Names each model by its class, without the underscore of one that only its module uses."""

    def normalize_name(self, name: str) -> str:
        return super().normalize_name(name).removeprefix("_")

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        schema_json = super().model_schema(schema)
        return {**schema_json, "title": schema_json["title"].removeprefix("_")}


class _Plain(NamedByClass):
    """Omits keywords without information: titles that repeat a name, defaults of null, minimum lengths of 0."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        schema_json = super().default_schema(schema)
        return {name: value for name, value in schema_json.items() if (name, value) != ("default", None)}

    def str_schema(self, schema: core_schema.StringSchema) -> JsonSchemaValue:
        schema_json = super().str_schema(schema)
        return {name: value for name, value in schema_json.items() if (name, value) != ("minLength", 0)}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        """Allow unknown fields, as `Sent` does: a later worker may send more."""
        return {**super().dataclass_schema(schema), "additionalProperties": True}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Refuse names that do not match the pattern, as pydantic does."""
        schema_json = super().dict_schema(schema)
        return {**schema_json, "additionalProperties": False} if "patternProperties" in schema_json else schema_json


def contract() -> dict[str, Any]:
    """Return the JSON Schema."""
    asked = [(name, mode, TypeAdapter(kind)) for name, (kind, mode) in _PARTS.items()]
    parts, shared = TypeAdapter.json_schemas(asked, schema_generator=_Plain)
    named = {name: parts[name, mode] for name, (_, mode) in _PARTS.items()}
    return {
        "$schema": _DIALECT,
        "title": "The contract of Sluice, version 1",
        "description": _ABOUT,
        "x-contract-version": 1,
        "$defs": dict(sorted({**named, **shared["$defs"]}.items())),
    }


def contract_text() -> str:
    """Return the contents of docs/contract.schema.json."""
    return json.dumps(contract(), indent=2, ensure_ascii=False) + "\n"
